"""A client serves one user at a time, then the next; one whose user failed is closed, and close leaves none open."""

from __future__ import annotations

import pytest

from broker_adapter.publishing.client_pool import ClientPool
from outbox_core.common.errors import ConfigurationError


class Client:
    """One that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        """See Client of the pool."""
        self.closed += 1

    def leave_to_parent(self) -> None:
        """See Client of the pool; nothing is forked here."""


@pytest.fixture
def made() -> list[Client]:
    """The clients that were made."""
    return []


@pytest.fixture
def pool(made: list[Client]) -> ClientPool[Client]:
    """A pool of them."""

    def make() -> Client:
        made.append(Client())
        return made[-1]

    return ClientPool(make)


def test_one_after_the_other_use_the_same_client_and_two_at_a_time_use_two(
    pool: ClientPool[Client], made: list[Client]
) -> None:
    for _ in range(3):
        with pool.client() as first, pool.client() as second:
            assert first is not second

    assert [client.closed for client in made] == [0, 0]


def test_a_client_whose_user_failed_is_closed_and_not_used_again(pool: ClientPool[Client], made: list[Client]) -> None:
    with pytest.raises(OSError, match="lost"), pool.client():
        raise OSError("lost")
    with pool.client() as next_one:
        pass

    assert [client.closed for client in made] == [1, 0]
    assert next_one is made[1]


def test_close_ends_what_is_free_at_once_and_what_is_in_use_when_it_is_given_back(
    pool: ClientPool[Client], made: list[Client]
) -> None:
    with pool.client(), pool.client():
        pass
    with pool.client() as in_use:
        pool.close()
        pool.close()
        closed_meanwhile = [(client is in_use, client.closed) for client in made]

    assert sorted(closed_meanwhile) == [(False, 1), (True, 0)]
    assert [client.closed for client in made] == [1, 1]
    with pytest.raises(ConfigurationError, match="was closed"), pool.client():
        pass
