"""Payments that are committed while an engine fails, and what consumers must find of their messages. Not a test."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy.orm import Session

from outbox import Outbox
from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS: Final = 300
KEYS: Final = 12
ROWS_MAX: Final = 100
"""How many messages the load leaves in the table before it waits for some to be sent."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what other threads and processes do."""
    deadline, nothing = time.monotonic() + WAIT_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        nothing.wait(0.01)


class Load:
    """Payments that are committed until they are to end, each with a message of its key; numbers are in order."""

    def __init__(self, shop: Shop, box: Outbox, topic: str) -> None:
        self._shop = shop
        self._box = box
        self._topic = topic
        self._ending = threading.Event()
        self.ids: list[str] = []

    def run(self) -> None:
        """Commit, and wait where the table has ROWS_MAX messages."""
        pay = self._box.transactional(self._pay)
        while not self._ending.is_set():
            if len(self.left()) < ROWS_MAX:
                self.ids.append(pay(len(self.ids)))
            else:
                self._ending.wait(0.01)

    def end(self) -> None:
        """Let `run` return."""
        self._ending.set()

    def left(self) -> set[str]:
        """The messages that no broker has accepted."""
        return {row["id"] for row in self._shop.rows()}

    def wait_for_more(self, count: int) -> None:
        """Wait until `count` more are committed, and all that are committed by then are accepted."""
        least = len(self.ids) + count
        wait_for(lambda: len(self.ids) >= least)
        committed = set(self.ids)
        wait_for(lambda: not committed & self.left())

    def _pay(self, session: Session, number: int) -> str:
        session.add(Payment(id=number))
        return self._box.publish(self._topic, str(number), key=f"k{number % KEYS}").id


def first_copies_by_key(partition: Sequence[PlainMessage]) -> dict[str | None, list[int]]:
    """The numbers of each key as they come to a consumer with an inbox."""
    first = {one.id: one for one in reversed(partition)}
    numbers: defaultdict[str | None, list[int]] = defaultdict(list)
    for one in partition:
        if first.pop(one.id, None) is one:
            numbers[one.key].append(int(one.body))
    return numbers
