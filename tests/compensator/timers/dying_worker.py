"""A compensator that kills itself at a named point of a turn of timers. Run as a module; not imported.

Arguments: `POINT URL SCHEMA BROKER_URL STORE_URL`: one turn over what is due; where it dies is the point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import event

from compensator.work.engines import InstanceEngines
from compensator.work.timer_turn import TimerTurnOptions, take_timer_turn
from outbox_core import SystemClock
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TakenTimers, TimedRow, TimingStore
from tests.compensator.serving import source_at
from tests.fixtures.dying_broker import DyingBroker, die, nothing


class DyingQueue:
    """A timing store, with something to do after timers were taken and before they are settled."""

    def __init__(self, store: TimingStore, *, taken: Callable[[], None], settling: Callable[[], None]) -> None:
        self._store, self._taken, self._settling = store, taken, settling

    def take(self, slots: Sequence[int], *, limit: int, lease_ms: int, ahead_ms: int = 0) -> list[TakenTimers]:
        found = self._store.take(slots, limit=limit, lease_ms=lease_ms, ahead_ms=ahead_ms)
        if any(one.rows for one in found):
            self._taken()
        return found

    def settle(self, taken: Sequence[TakenTimers], *, later_ms: Mapping[TimedRow, int]) -> None:
        self._settling()
        self._store.settle(taken, later_ms=later_ms)

    def wait(self, timeout_ms: int) -> None:
        self._store.wait(timeout_ms)


def on_statement(begins: str, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
    """Die at the first statement on the message table that begins so."""
    if statement.startswith(begins) and "message" in statement:
        die()


def main() -> None:
    """One turn, and the end."""
    point, url, schema, broker_url, store_url = sys.argv[1:]
    store = connect_timing(store_url)
    queue = DyingQueue(
        store,
        taken=die if point == "after take" else nothing,
        settling=die if point == "before the timers go" else nothing,
    )
    broker = DyingBroker(
        broker_url,
        before=die if point == "before publish" else nothing,
        after=die if point == "after publish" else nothing,
    )
    engines = InstanceEngines(url)
    for name, (moment, begins) in {
        "before claim": ("before_cursor_execute", "UPDATE"),
        "in claim": ("after_cursor_execute", "UPDATE"),
        "before delete": ("before_cursor_execute", "DELETE"),
        "in delete": ("after_cursor_execute", "DELETE"),
    }.items():
        if name == point:
            event.listen(engines.work, moment, partial(on_statement, begins))
    clock = SystemClock()
    source, _ = source_at(engines.work.url, schema or None, broker, engines=engines, clock=clock, lease_ms=3_600_000)
    take_timer_turn(source, queue, range(store.slots), options=TimerTurnOptions(), clock=clock, going_on=lambda: True)
    if point == "the end":
        die()


main()
