"""Where programs run: two databases of one kind, an Outbox, a broker, and what a stranger does to a database.

Programs are run one after the other; what their messages came to is seen once for many, when the sender, which is held
back meanwhile, has sent, and a compensator's pass has sent the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine, delete, select, update
from sqlalchemy.exc import SAWarning
from sqlalchemy.util import greenlet_spawn

from broker_adapter.embedded import EmbeddedBroker
from outbox import Outbox, RelayPolicy, SenderLimits
from outbox.store.database import background_engine
from outbox.store.message_table import MessageStore
from outbox.store.schema import outbox_tables
from outbox.testing import AdvancingClock
from outbox_core import Message, PublishResult
from tests.fixtures.databases import Server
from tests.fixtures.table_scan import Scan
from tests.outbox.transaction_model.business import STANDING_ROW, Payment, Witness
from tests.outbox.transaction_model.generator import Kind
from tests.outbox.transaction_model.interpreter import DELAY, NUMBERS_MAX, Run, Side, Trace
from tests.outbox.transaction_model.oracle import Observed, Sent, judge, judge_before_delivery
from tests.outbox.transaction_model.steps import (
    BeginConnection,
    Execute,
    Opening,
    OpenSession,
    Program,
    Statement,
    Topic,
    walk,
)
from tests.outbox.transaction_model.twins import Twin, twins

PULL_MAX = 500
PULLS_WITHOUT_ANSWER_MAX = 100
PULL_WAIT_MS = 20
CLOSE_TIMEOUT_MS = 3_000
"""For so long a sender waits for older messages of its keys, which may be the compensator's by then."""
FREE_SECONDS_MAX = 60
BOXES = 2
TOPICS = [f"{topic}.{box}" for topic in Topic for box in range(BOXES)]
ORDERED = frozenset(f"{Topic.ORDERED}.{box}" for box in range(BOXES))
LIMITS = SenderLimits(lease_ms=600_000, lease_margin_ms=1_000, close_timeout_ms=CLOSE_TIMEOUT_MS)
GROUP = "model"


class GatedBroker(EmbeddedBroker):
    """The embedded broker; who publishes waits until the gate is open."""

    def __init__(self, url: str, *, gate: threading.Event, clock: AdvancingClock) -> None:
        super().__init__(url, clock=clock)
        self._gate = gate

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        self._gate.wait()
        return super().publish(batch)


@dataclass(frozen=True, slots=True)
class Failed:
    """What is wrong with a program, and what its steps did."""

    wrong: list[str]
    trace: Trace
    plain: Trace

    def lines(self, program: Program) -> Iterator[str]:
        """All of it in a form to read."""
        yield from self.wrong
        yield from (f"  {line}" for line in program.lines())
        for path, outcome in self.trace.outcomes.items():
            beside = self.plain.outcomes.get(path)
            plain = "" if beside is None or not beside.error else f" | plain: {beside.error}"
            if outcome.error or plain:
                yield f"    {'.'.join(map(str, path))}: {outcome.failure} {outcome.error}{plain}"


class Laboratory:
    """Runs programs on one kind of database. Not thread-safe."""

    def __init__(self, folder: Path, *, with_messages: Twin, plain: Twin) -> None:
        self._twin, self._plain = with_messages, plain
        self._serial = 0
        self._gate = with_messages.gate
        self._clock = AdvancingClock()
        url = f"embedded:{folder / 'broker'}"
        self._broker = EmbeddedBroker(url, clock=self._clock)
        self._gated = GatedBroker(url, gate=self._gate, clock=self._clock)
        self._boxes: dict[int, tuple[Outbox, ...]] = {}
        self._runner = asyncio.Runner() if with_messages.is_async else None
        self._tables = outbox_tables(with_messages.database.namespace)
        self._background = background_engine(with_messages.watching)
        self._scan = Scan(
            engine=self._background,
            store=MessageStore(dialect=with_messages.watching.dialect, schema=with_messages.database.schema),
            broker=self._broker,
            policy=RelayPolicy(outage_delay_ms=60_000),
        )

    def check(self, programs: Sequence[Program]) -> dict[int, Failed]:
        """Run programs on both sides, deliver, and return those that failed, by their index."""
        self._gate.clear()
        observed = [self._observe(program) for program in programs]
        sent = self._deliver([seen.trace for seen in observed])
        found = {
            index: Failed(wrong, seen.trace, seen.plain)
            for index, (program, seen) in enumerate(zip(programs, observed, strict=True))
            if (wrong := judge(program, seen, sent))
        }
        self._empty()
        return found

    def close(self) -> None:
        """Close what is open; the twins are their maker's."""
        self._gate.set()
        self._close_boxes()
        self._dispose()
        self._background.dispose()
        self._broker.close()
        self._gated.close()
        if self._runner is not None:
            self._runner.close()

    # -- running -----------------------------------------------------------------------------------------------------

    def _observe(self, program: Program) -> Observed:
        self._serial += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SAWarning)
            trace = self._run(self._publishing_side(program.pool_size), program, None)
            plain = self._run(self._plain.side(program.pool_size), program, trace)
        observed = Observed(
            trace=trace,
            plain=plain,
            rows=self._numbers(self._twin.watching, Payment),
            plain_rows=self._numbers(self._plain.watching, Payment),
            witnesses=self._numbers(self._plain.watching, Witness),
        )
        is_short = trace.checked_out or plain.checked_out
        if _taints(program) or is_short or judge_before_delivery(program, observed) or self._is_locked():
            self._dispose()
            self._free()
            for twin in (self._twin, self._plain):
                twin.end_prepared()
        return observed

    def _is_locked(self) -> bool:
        """Whether a connection that nobody has any more holds SQLite's lock: async garbage is not rolled back."""
        if self._runner is None or self._twin.database.name != "sqlite":
            return False
        return not all(self._is_free(twin) for twin in (self._twin, self._plain))

    def _free(self) -> None:
        """Wait until what a cancelled task left is collected, with the lock that it held while it was closed."""
        deadline = time.monotonic() + FREE_SECONDS_MAX
        while self._is_locked():
            assert time.monotonic() < deadline, "somebody holds SQLite's lock"
            gc.unfreeze()
            gc.collect()
            time.sleep(0.01)

    @staticmethod
    def _is_free(twin: Twin) -> bool:
        is_free: bool = twin.faults.hold_row()
        twin.faults.let_go()
        return is_free

    def _run(self, side: Side, program: Program, followed: Trace | None) -> Trace:
        run = Run(side, program, serial=self._serial, followed=followed)
        return run.run() if self._runner is None else self._runner.run(greenlet_spawn(run.run))

    def _publishing_side(self, pool_size: int) -> Side:
        side = self._twin.side(pool_size)
        if pool_size not in self._boxes:
            database = side.async_engine or side.engine
            self._boxes[pool_size] = tuple(
                Outbox(database, broker=self._gated, schema=self._twin.database.schema, sender=LIMITS, ordered=ORDERED)
                for _ in range(BOXES)
            )
            self._twin.prefer_own_settings(side)
        return replace(side, boxes=self._boxes[pool_size])

    def _numbers(self, engine: Engine, table: type[Payment | Witness]) -> frozenset[int]:
        first = self._serial * NUMBERS_MAX
        with engine.connect() as connection:
            ids = connection.scalars(select(table.id).where(table.id.between(first, first + NUMBERS_MAX - 1)))
            return frozenset(row_id - first for row_id in ids)

    # -- delivering --------------------------------------------------------------------------------------------------

    def _deliver(self, traces: Sequence[Trace]) -> Sent:
        """Let the sender send, have the compensator send the rest, and pull everything."""
        self._gate.set()
        self._close_boxes()
        if self._left():
            with self._twin.watching.begin() as connection:
                connection.execute(update(self._tables.message).values(due_at_us=1))
            self._scan.run()
        self._clock.advance(2 * DELAY)
        expected = {message_id for trace in traces for ids in trace.messages.values() for message_id in ids}
        return Sent(pulled=self._pull(expected), left=self._left())

    def _pull(self, expected: set[str]) -> Counter[str]:
        """What the broker hands out, until no topic has any more; delayed ones may take it a moment."""
        pulled: Counter[str] = Counter()
        waits_ms = 0
        for _ in range(2):
            for topic in TOPICS:
                while deliveries := self._broker.pull(topic, GROUP, max_messages=PULL_MAX, wait_ms=waits_ms):
                    pulled.update(delivery.id for delivery in deliveries)
                    self._broker.ack([delivery.receipt for delivery in deliveries])
            waits_ms = PULL_WAIT_MS
        return pulled

    def _left(self) -> frozenset[str]:
        with self._twin.watching.connect() as connection:
            return frozenset(connection.scalars(select(self._tables.message.c.id)))

    # -- cleaning up -------------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        for twin in (self._twin, self._plain):
            with twin.watching.begin() as connection:
                connection.execute(delete(Payment).where(Payment.id != STANDING_ROW))
                connection.execute(delete(Witness))
        with self._twin.watching.begin() as connection:
            for table in (
                self._tables.message,
                self._tables.archive,
                self._tables.order_head,
                self._tables.order_queue,
            ):
                connection.execute(delete(table))

    def _close_boxes(self) -> None:
        """Close them side by side: each may wait for its time, and most do, for a message that has no sender."""
        threads = [
            threading.Thread(target=box.close, kwargs={"timeout_ms": CLOSE_TIMEOUT_MS}, name="outbox closes")
            for boxes in self._boxes.values()
            for box in boxes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._boxes.clear()

    def _dispose(self) -> None:
        """Close the pools' connections, so that no program finds what another has left."""
        for twin in (self._twin, self._plain):
            for side in twin.sides.values():
                if side.async_engine is None:
                    side.engine.dispose()
                elif self._runner is not None:
                    self._runner.run(side.async_engine.dispose())
            if self._runner is None:
                twin.cut_off()
            else:
                self._runner.run(greenlet_spawn(twin.cut_off))


def kind_of(database: str) -> Kind:
    """What programs of a database may contain."""
    return Kind(
        has_server=database.endswith(("mariadb", "mysql")),
        is_async=database.startswith("async"),
        waits_are_short=not database.endswith("mysql"),
    )


@contextlib.contextmanager
def open_laboratory(database: str, folder: Path, *, server: Server | None) -> Iterator[Laboratory]:
    """A laboratory on fresh databases."""
    is_async = database.startswith("async")
    with twins(folder, server=server, is_async=is_async) as (with_messages, plain):
        opened = Laboratory(folder, with_messages=with_messages, plain=plain)
        try:
            yield opened
        finally:
            opened.close()


def _taints(program: Program) -> bool:
    """Whether plain SQLAlchemy, too, would give back connections that are not as they were."""
    return any(
        (isinstance(step, Execute) and step.statement is Statement.AUTOCOMMIT)
        or (isinstance(step, OpenSession) and step.two_phase)
        or (isinstance(step, BeginConnection) and step.opening is Opening.TWO_PHASE)
        for step in walk(program.steps)
    )
