"""A database server killed again and again while producers, senders and a compensator work: what committed is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random
from typing import Self

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox_core.common.errors import OutboxError
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop, open_shop
from tests.traps.passes import compensate, one_pass

KILLS = 3
PRODUCERS = 2
COMMITS_BETWEEN_KILLS_MAX = 60
WAIT_SECONDS = 300
RETRY_SECONDS = 0.01


class Business:
    """Producers that go on with the next payment whatever became of the last one, until told to stop."""

    def __init__(self, box: Outbox, engine: Engine) -> None:
        self._box = box
        self._engine = engine
        self.stopping = threading.Event()
        self.answered: set[int] = set()
        self.errors = 0
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._produce, args=(number,)) for number in range(PRODUCERS)]

    def start(self) -> None:
        """Begin to pay."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the payment in hand."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    def wait_for(self, commits: int) -> None:
        """Until so many more commits were answered."""
        with self._changed:
            wanted = len(self.answered) + commits
            assert self._changed.wait_for(lambda: len(self.answered) >= wanted, WAIT_SECONDS), "no more commits came"

    def _produce(self, producer: int) -> None:
        number = producer
        while not self.stopping.is_set():
            number += PRODUCERS
            try:
                with Session(self._engine) as session, session.begin():
                    session.add(Payment(id=number))
                    self._box.publish("payments", "", key=f"k{producer}", message_id=str(number), session=session)
            except (DBAPIError, OutboxError):
                self.errors += 1
                self.stopping.wait(RETRY_SECONDS)
                continue
            with self._changed:
                self.answered.add(number)
                self._changed.notify_all()


class Passes:
    """A compensator that passes until told to stop."""

    def __init__(self, shop: Shop, broker: RecordingBroker) -> None:
        self._shop = shop
        self._broker = broker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        engine = self._shop.other_engine()
        while not self._stopping.is_set():
            try:
                self._shop.end_leases()  # so that it races the senders as well
                one_pass(self._shop, self._broker, engine=engine)
            except (DBAPIError, OutboxError):
                self._stopping.wait(RETRY_SECONDS)


@pytest.fixture
def killable_shop(mysql_like_server: LocalServer) -> Iterator[tuple[LocalServer, Shop]]:
    """A shop on a server of the test's own."""
    with mysql_like_server.fresh_database() as database, open_shop(database) as shop:
        yield mysql_like_server, shop


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [set(), {"payments"}], ids=["unordered", "ordered"])
def test_a_server_that_is_killed_again_and_again_loses_and_invents_no_message(
    killable_shop: tuple[LocalServer, Shop], broker: RecordingBroker, random_seed: int, ordered: set[str]
) -> None:
    server, shop = killable_shop
    random = Random(random_seed)
    engine = shop.other_engine()
    box = shop.box(broker, engine=engine, sender=BUSY_LIMITS, ordered=ordered)
    business = Business(box, engine)

    with Passes(shop, broker):
        business.start()
        for _ in range(KILLS):
            business.wait_for(random.randrange(1, COMMITS_BETWEEN_KILLS_MAX))
            server.kill9()
            server.restart()
        business.wait_for(10)
        business.stop()
    box.close()
    shop.engine.dispose()
    compensate(shop, broker)

    committed = set(shop.payments())
    assert business.answered <= committed, "a commit that was answered is gone"
    assert sorted(map(int, broker.ids)) == sorted(committed)
    assert shop.archived() == len(committed)
    assert business.errors > 0, "no kill met anybody"
