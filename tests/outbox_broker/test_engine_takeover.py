"""An engine on ledgers that another one takes over, in an empty folder, while it goes on: nothing is lost or twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.segments.port import Segments
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import CancelStatus, Delivery, GroupConfig, Message
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
OPTIONS = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, schedule_memory_messages_max=8)


class Owners:
    """Engines on the same ledgers, each in a folder of its own, which is empty at first."""

    def __init__(self, folder: Path, clock: ManualClock, stack: ExitStack, take_over: Callable[[], Segments]) -> None:
        self._folder, self._clock, self._stack, self._take_over = folder, clock, stack, take_over
        self._count = 0

    def open(self) -> Engine:
        """Take over."""
        self._count += 1
        taken = self._take_over()
        engine = Engine.open(
            self._folder / f"owner-{self._count}", clock=self._clock, options=OPTIONS, segments=lambda _part: taken
        )
        self._stack.callback(engine.close)
        return engine


@pytest.fixture(params=range(5))
def owners(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Owners]:
    """No owner yet. The seed decides what the ledgers keep of what was not confirmed."""
    with ExitStack() as stack:
        yield Owners(tmp_path, clock, stack, LedgerCluster(request.param).open)


def message(name: str, *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=name, topic=TOPIC, key=name[-1], body=name.encode() * 20, deliver_at_ms=deliver_at_ms)


def drained(engine: Engine) -> list[str]:
    """All that is ready, acked; each has the body that it was published with."""
    ids: list[str] = []
    while found := engine.puller.pull(TOPIC, GROUP, max_messages=50):
        assert [one.body for one in found] == [one.id.encode() * 20 for one in found]
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"] * len(found)
        ids += [one.id for one in found]
    return ids


def test_what_was_acknowledged_is_there_for_each_owner_and_the_deposed_one_acknowledges_nothing(
    owners: Owners, clock: ManualClock
) -> None:
    stored: set[str] = set()
    settled: set[str] = set()
    died: set[str] = set()
    waiting: dict[str, int] = {}
    before: Engine | None = None
    held: list[Delivery] = []
    for owner in range(4):
        engine = owners.open()
        if before is not None:
            with suppress(StorageFailed):  # unless it knows already that it is deposed, it delivers
                held += before.puller.pull(TOPIC, GROUP, max_messages=3)
            with suppress(StorageFailed):  # or their time has passed, and they are stale
                assert "acked" not in before.settler.ack([one.receipt for one in held])
            with pytest.raises(StorageFailed):
                before.publisher.publish([message(f"deposed-{owner}")])
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
        for number in range(30):
            batch = [message(f"{owner}-{number}-{part}") for part in range(number % 4 + 1)]
            engine.publisher.publish(batch)
            stored |= {one.id for one in batch}
        for number in range(20):
            due_ms = clock.now_ms() + (number + 1) * HOUR_MS
            engine.publisher.publish([message(f"later-{owner}-{number}", deliver_at_ms=due_ms)])
            waiting[f"later-{owner}-{number}"] = due_ms
        assert engine.publisher.cancel([f"later-{owner}-7"]) == [CancelStatus.CANCELED]
        del waiting[f"later-{owner}-7"]
        found = engine.puller.pull(TOPIC, GROUP, max_messages=40)
        assert not settled & {one.id for one in found}
        dead, done, held = found[:1], found[1:-2], found[-2:]
        assert engine.settler.ack([one.receipt for one in done]) == ["acked"] * len(done)
        engine.settler.nack([one.receipt for one in dead], reason="broken")
        settled |= {one.id for one in (*done, *dead)}
        died |= {one.id for one in dead}
        before = engine
        clock.advance(60_000)  # what was pulled by a deposed owner, or not settled, is ready again

    last = owners.open()

    assert {one.id for one in last.admin.dead(TOPIC, GROUP, limit=100)[0]} == died
    came = drained(last)
    assert sorted(came) == sorted(stored - settled - {f"deposed-{owner}" for owner in range(4)}), "each once"
    duplicates = last.publisher.publish([message(name) for name in sorted(stored)[:100]])
    assert {str(result.status) for result in duplicates} == {"duplicate"}
    for _ in range(20):
        clock.advance(HOUR_MS)
        due = drained(last)
        assert all(waiting.pop(name) <= clock.now_ms() for name in due), "none early, none twice"
    assert not waiting
