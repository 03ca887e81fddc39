"""Who gets a slot: clients keep theirs, strangers make room for newcomers, and a reserve is left for operators."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.http.admission_limits import ConnectionSlot, ConnectionTable


class Clients:
    """Connections by name, and which of them were ended to make room."""

    def __init__(self, *, connections_max: int = 3, per_address_max: int = 3, reserved_max: int = 2) -> None:
        self.table = ConnectionTable(
            connections_max=connections_max, per_address_max=per_address_max, reserved_max=reserved_max
        )
        self.slots: dict[str, ConnectionSlot] = {}
        self.evicted: list[str] = []

    def come(self, name: str, *, address: str = "a", known: bool = False) -> str:
        slot = self.table.enter(address, partial(self.evicted.append, name))
        if slot is None:
            return "refused"
        self.slots[name] = slot
        if known:
            self.table.mark_authorized(slot)
        return "reserved" if slot.is_reserved else "open"


@pytest.fixture
def clients() -> Clients:
    return Clients()


def test_the_oldest_stranger_makes_room_for_a_newcomer(clients: Clients) -> None:
    found = [clients.come(name) for name in "wxyz"]

    assert found == ["open"] * 4
    assert clients.evicted == ["w"]
    assert len(clients.table) == 3


def test_a_client_that_is_known_is_never_ended_for_another(clients: Clients) -> None:
    for name in "xyz":
        clients.come(name, known=True)

    found = [clients.come(name) for name in ("r", "s", "t")]

    assert found == ["reserved"] * 3
    assert clients.evicted == ["r"]
    assert len(clients.table) == 5


def test_a_newcomer_is_refused_where_the_reserve_is_of_known_clients_too(clients: Clients) -> None:
    for name in "vwxyz":
        clients.come(name, known=True)

    assert clients.come("late") == "refused"
    assert (clients.table.refused, clients.evicted) == (1, [])


def test_an_address_makes_room_among_its_own(clients: Clients) -> None:
    clients = Clients(per_address_max=2)
    clients.come("other", address="b")
    clients.come("x", known=True)
    clients.come("y")

    assert clients.come("z") == "open"
    assert clients.evicted == ["y"]
    clients.table.mark_authorized(clients.slots["z"])
    assert clients.come("w") == "reserved"
    assert clients.evicted == ["y"]


def test_a_slot_that_is_left_is_free_and_left_once(clients: Clients) -> None:
    for name in "xyz":
        clients.come(name, known=True)

    for _ in range(2):
        clients.table.leave(clients.slots["x"])

    assert clients.come("w") == "open"
    assert len(clients.table) == 3


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "mark_authorized", "leave"]), st.integers(0, 30))
    )
)
def test_no_bound_is_ever_passed_and_every_slot_is_counted(steps: list[tuple[str, str, int]]) -> None:
    clients = Clients(connections_max=4, per_address_max=3, reserved_max=2)
    for number, (address, what, which) in enumerate(steps):
        slots = list(clients.slots.values())
        if what == "come":
            clients.come(str(number), address=address)
        elif slots:
            getattr(clients.table, what)(slots[which % len(slots)])

        taken = [slot for slot in clients.slots.values() if slot.is_taken]
        opened = [slot for slot in taken if not slot.is_reserved]
        assert len(clients.table) == len(taken)
        assert len(opened) <= 4
        assert len(taken) - len(opened) <= 2
        assert all(sum(slot.address == one for slot in opened) <= 3 for one in "abc")
