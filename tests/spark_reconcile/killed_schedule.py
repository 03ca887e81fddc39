"""Schedules messages in a broker that is killed at each storage call in turn, always on one folder. Not a test.

    python -m tests.spark_reconcile.killed_schedule FOLDER

What the broker answered, also to the resends at the end, is written to `FOLDER/told.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.killed_engine import KillAt, KillingStorage, teller, type_of_tell
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, REMINDER

START_MS = NOW_MS - HOUR_MS
ROUND_MS = 5_000
SOON_MS = 1_000
SETTLED_MS = NOW_MS - HOUR_MS // 2
ROUNDS_MAX = 300
KILLED = 137


def due_ms(message_id: str) -> int:
    """When a message is due: soon after its round began, or far ahead."""
    name, number = message_id.split("-")
    return NOW_MS + HOUR_MS if name == "far" else START_MS + int(number) * ROUND_MS + SOON_MS


def key(message_id: str) -> int:
    """Which order the message is about."""
    name, number = message_id.split("-")
    return 2 * int(number) + (name == "far")


def run(folder: Path) -> None:
    """A process a round, ended at one storage call later each time, until one lives; two more; then all is settled."""
    tell = teller(os.open(folder / "told.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    with closing(_open(folder, at_ms=START_MS)) as engine:
        engine.admin.declare_group(REMINDER, MAIL, GroupConfig())
    for number in range(1, ROUNDS_MAX):
        way = "before" if number % 2 else "half"
        if _lived(folder, number, KillingStorage(way=way, on_call=KillAt(number)), tell):
            if _lived(folder, number + 1, _WithoutArrivals(), tell):
                raise SystemExit("nothing was filed")
            _lived(folder, number + 2, DiskStorage(), tell)
            _settle(folder, number + 2, tell)
            return
    raise SystemExit(f"no round came to its end within {ROUNDS_MAX} storage calls")


class _WithoutArrivals(DiskStorage):
    """Cuts the power of a broker that leaves syncs to the system, once the schedule has filed what a publish brought:
    of the message log that alone is lost.
    """

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}
        self._kept: tuple[Path, int] | None = None

    def arm(self, folder: Path) -> None:
        """From now on nothing that comes to the message log stays, and the schedule's next flush is the end."""
        [messages] = (folder / "messages").glob("messages-*.segment")
        self._kept = messages, messages.stat().st_size

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._files[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        super().write(descriptor, data, position=position)
        if self._kept is not None and self._files[descriptor].name.startswith("log-") and b"flushed" in data:
            os.truncate(*self._kept)
            os._exit(KILLED)


def _lived(folder: Path, number: int, storage: Storage, tell: type_of_tell) -> bool:
    child = os.fork()
    if child == 0:
        _round(folder, number, storage, tell)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in {0, KILLED}:
        raise SystemExit(f"round {number} failed")
    return status == 0


def _round(folder: Path, number: int, storage: Storage, tell: type_of_tell) -> None:
    clock, ids = ManualClock(START_MS + number * ROUND_MS), [f"soon-{number}", f"far-{number}"]
    if isinstance(storage, _WithoutArrivals):
        options = EngineOptions(durability=Durability.OS)
        engine = Engine.open(folder / "broker", clock=clock, storage=storage, options=options)
        storage.arm(folder / "broker")
        _publish(engine, ids, clock.now_ms(), lambda **_: None)  # the answer does not arrive
        engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)
        return
    engine = Engine.open(folder / "broker", clock=clock, storage=storage)
    _publish(engine, ids, clock.now_ms(), tell)
    clock.advance(SOON_MS)
    engine.settler.ack([one.receipt for one in engine.puller.pull(REMINDER, MAIL, max_messages=10)])
    engine.close()


def _settle(folder: Path, rounds: int, tell: type_of_tell) -> None:
    """What was never answered is sent again, as a compensator would; all that is due is handed out and acknowledged."""
    ids = [f"{name}-{number}" for number in range(1, rounds + 1) for name in ("soon", "far")]
    answered = {json.loads(line)["id"] for line in (folder / "told.jsonl").read_text().splitlines()}
    with closing(_open(folder, at_ms=SETTLED_MS)) as engine:
        _publish(engine, [one for one in ids if one not in answered], SETTLED_MS, tell)
        while found := engine.puller.pull(REMINDER, MAIL, max_messages=100):
            engine.settler.ack([one.receipt for one in found])


def _publish(engine: Engine, ids: list[str], now_ms: int, tell: type_of_tell) -> None:
    batch = [
        Message(
            id=one, topic=REMINDER, key=str(key(one)), body=one.encode(), created_at_ms=due_ms(one) - SOON_MS,
            deliver_at_ms=due_ms(one),
        )
        for one in ids
    ]  # fmt: skip
    for result in engine.publisher.publish(batch):
        tell(id=result.id, outcome=result.status, sent_ms=now_ms)


def _open(folder: Path, *, at_ms: int) -> Engine:
    return Engine.open(folder / "broker", clock=ManualClock(at_ms))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
