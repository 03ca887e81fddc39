"""Runs an engine for what a death at each of its storage calls leaves, or until a signal ends it. Not a test.

What is asked and what is answered is told on a pipe or file before it happens and after it returned, a JSON line each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_core.common.clock import ManualClock
from outbox_core.messages.ids import edited_id
from outbox_core.messages.message import DeadEdit, GroupConfig, Message

TOPIC, GROUP, OTHERS = "orders", "billing", "mail"
START_MS = 1_800_000_000_000
DAY_MS = 86_400_000
CALLS_MAX = 1_000
RESERVE_BYTES = 64 * 1024
"""Of each of hundreds of brokers, which all stay on the disk."""
type_of_tell = Callable[..., None]
type_of_place = Callable[[Path], Path]
type_of_leave = Callable[[type_of_place], None]


@dataclass(slots=True)
class _File:
    path: Path
    size: int
    synced: int
    in_folder: bool


class KillAt:
    """Ends the process at one call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, leave: type_of_leave) -> None:
        self._left -= 1
        if self._left <= 0:
            leave(lambda path: path)
            os._exit(137)


class CopyEach:
    """Copies a folder at each call as a death there would leave it, with what was told until then, and goes on."""

    def __init__(self, live: Path, told: Path, *, into: Path) -> None:
        self._live, self._told, self._into = live, told, into
        self._calls = 0

    def __call__(self, leave: type_of_leave) -> None:
        self._calls += 1
        assert self._calls <= CALLS_MAX
        copy = self._into / str(self._calls)
        if self._live.exists():
            shutil.copytree(self._live, copy, copy_function=_copy_if_there)
        shutil.copy(self._told, copy.with_suffix(".told"))
        leave(lambda path: copy / path.relative_to(self._live))


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file. Another thread may remove or rename one that was listed: a death may come behind that as well."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


class KillingStorage:
    """Has `on_call` see each call, with what leaves the files as a death there would, by this `way`. Syncs are only
    noted: the machine runs on.

    before: instead of the call. half: after half of a write. power, power-messages, power-actions, power-schedule: as
    before, and what was not synced (of everything, or of the one folder) is not on the disk.
    """

    def __init__(self, *, way: str, on_call: Callable[[type_of_leave], None]) -> None:
        """`on_call` takes what leaves the files as the death would, where a function of their paths says."""
        self._on_call = on_call
        self._way = way
        self._disk = DiskStorage()
        self._open: dict[int, _File] = {}
        self._files: dict[Path, _File] = {}
        self._removed: dict[Path, bytes] = {}
        self._lock = threading.RLock()

    def create(self, path: Path) -> int:
        self._count()
        with self._lock:  # another thread may be at a call, and look at all files
            descriptor = self._disk.create(path)
            size = os.fstat(descriptor).st_size
            if path not in self._files:
                self._files[path] = _File(path, size, size, in_folder=size > 0)
            self._open[descriptor] = self._files[path]
        return descriptor

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        file = self._file(descriptor)
        self._count(lambda place: _write(place(file.path), data[: len(data) // 2], position=position))
        self._disk.write(descriptor, data, position=position)
        file.size = position + len(data)

    def truncate(self, descriptor: int, size: int) -> None:
        self._count()
        self._disk.truncate(descriptor, size)
        self._file(descriptor).size = size

    def sync(self, descriptor: int) -> None:
        self._count()
        file = self._file(descriptor)
        file.synced = file.size

    def sync_folder(self, folder: Path) -> None:
        self._count()
        with self._lock:
            for file in self._files.values():
                file.in_folder |= file.path.parent == folder
            self._removed = {path: data for path, data in self._removed.items() if path.parent != folder}

    def remove(self, path: Path) -> None:
        self._count()
        with self._lock:
            if path.exists():
                self._removed[path] = path.read_bytes()
                self._files.pop(path, None)
        self._disk.remove(path)

    def _file(self, descriptor: int) -> _File:
        """A file by its name of now: a copy is renamed to what it is a copy of."""
        file, path = self._open[descriptor], Path(f"/proc/self/fd/{descriptor}").readlink()
        if path != file.path and path.exists():
            with self._lock:
                self._files.pop(file.path, None)
                file.path = path
                self._files[path] = file
        return file

    def _count(self, half: type_of_leave | None = None) -> None:
        def leave(place: type_of_place) -> None:
            if self._way == "half" and half is not None:
                half(place)
            if self._way.startswith("power"):
                self._cut_power(self._way.removeprefix("power").removeprefix("-"), place)

        with self._lock:
            self._on_call(leave)

    def _cut_power(self, folder: str, place: type_of_place) -> None:
        for file in self._files.values():
            path = place(file.path)
            if folder in {"", file.path.parent.name} and path.exists():
                os.truncate(path, min(file.size, file.synced))
                if not file.in_folder:
                    path.unlink()
        for path, data in self._removed.items():
            if folder in {"", path.parent.name}:
                place(path).write_bytes(data)


def _write(path: Path, data: bytes, *, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


type_of_run = Callable[[Path, KillingStorage, type_of_tell], None]


def message(message_id: str, *, deliver_at_ms: int | None = None) -> Message:
    """A message whose body proves whose it is."""
    return Message(id=message_id, topic=TOPIC, body=message_id.encode() * 150, deliver_at_ms=deliver_at_ms)


class Client:
    """Uses an engine, and tells what it asks and what is answered."""

    def __init__(self, engine: Engine, tell: type_of_tell) -> None:
        self._engine = engine
        self._tell = tell

    def publish(self, *ids: str, deliver_at_ms: int | None = None) -> None:
        self._tell(asked="publish", ids=ids, due_ms=deliver_at_ms)
        results = self._engine.publisher.publish([message(one, deliver_at_ms=deliver_at_ms) for one in ids])
        self._tell(answered="publish", ids=[one.id for one in results if one.status == "stored"])

    def cancel(self, *ids: str) -> None:
        self._tell(asked="cancel", ids=ids)
        statuses = self._engine.publisher.cancel(ids)
        self._tell(
            answered="cancel", ids=[one for one, status in zip(ids, statuses, strict=True) if status != "too_late"]
        )

    def pull(self, count: int) -> list[tuple[str, str]]:
        deliveries = self._engine.puller.pull(TOPIC, GROUP, max_messages=count, invisible_ms=5_000)
        self._tell(answered="pull", ids=[one.id for one in deliveries])
        return [(one.id, one.receipt) for one in deliveries]

    def ack(self, held: Sequence[tuple[str, str]]) -> None:
        self._tell(asked="ack", ids=[one for one, _ in held])
        statuses = self._engine.settler.ack([receipt for _, receipt in held])
        acked = [one for (one, _), status in zip(held, statuses, strict=True) if status == "acked"]
        self._tell(answered="ack", ids=acked)

    def nack(self, held: Sequence[tuple[str, str]]) -> None:
        statuses = self._engine.settler.nack([receipt for _, receipt in held], delay_ms=0, reason="broken")
        dead = [one for (one, _), status in zip(held, statuses, strict=True) if status == "dead"]
        self._tell(answered="die", ids=dead)

    def edit(self, operation: str, *ids: str) -> list[str]:
        """Edit dead letters; returns the ids that they have from then on."""
        self._tell(asked="edit", operation=operation, ids=ids)
        new_ids = edited(self._engine, operation, ids)
        self._tell(answered="edit", operation=operation, ids=ids)
        return new_ids

    def discard(self, *ids: str) -> None:
        self._tell(asked="discard", ids=ids)
        if self._engine.dead_letters.discard(TOPIC, GROUP, ids=ids, by="ops", why="wrong") == len(ids):
            self._tell(answered="discard", ids=ids)


def edited(engine: Engine, operation: str, ids: Sequence[str]) -> list[str]:
    """Edit dead letters, all of which must become others; returns the ids of these."""
    named = EditOperation(name=operation, by="ops", why="typo")
    edits = dict.fromkeys(ids, DeadEdit(headers={"edited-by": operation}))
    results = engine.dead_letters.edit(TOPIC, GROUP, edits, operation=named)
    new_ids = [edited_id(operation, TOPIC, GROUP, one) for one in ids]
    assert [one.new_id for one in results] == new_ids
    return new_ids


def short_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Every kind of call once or twice, over more than one segment of each log."""
    clock = ManualClock(START_MS)
    engine = Engine.open(
        folder, clock=clock, options=EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES), storage=storage
    )
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    client = Client(engine, tell)
    client.publish("a0", "a1", "a2", "a3")
    client.publish("due", "gone", deliver_at_ms=START_MS + 1_000)
    client.publish("far", deliver_at_ms=START_MS + 700 * DAY_MS)
    held = client.pull(3)
    client.ack(held[:1])
    client.cancel("gone", "unborn")
    client.nack(held[1:2])
    client.publish(*(f"b{number}" for number in range(12)))
    client.publish("unborn", "c0")
    clock.advance(1_000)
    tell(now_ms=clock.now_ms())
    held = client.pull(4)
    client.nack(held[:1])
    client.ack(held[1:])
    client.publish(*(f"d{number}" for number in range(8)))
    client.ack(client.pull(2))
    clock.advance(5_000)
    tell(now_ms=clock.now_ms())
    for _ in range(8):
        client.ack(client.pull(1))
    engine.dead_letters.redrive(TOPIC, GROUP)
    client.ack(client.pull(1))
    engine.close()


def dead_letter_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages die; of those an operator discards some and redrives the others."""
    clock = ManualClock(START_MS)
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    client = Client(engine, tell)
    client.publish(*(f"d{number}" for number in range(10)))
    client.nack(client.pull(8))
    client.discard("d1", "d2", "d5")
    client.publish(*(f"e{number}" for number in range(10)))
    client.nack(client.pull(6))
    client.discard("d0", "e3")
    engine.dead_letters.redrive(TOPIC, GROUP, ids=["d3", "d4"])
    client.ack(client.pull(1))
    client.discard("e1")
    client.publish("f0")
    engine.close()


EDITED = ("d1", "d2", "d5", "d6")
"""What edit_run() edits: the first three at once, then one of these once more, and the last."""


def edit_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages die, and an operator edits them; one dies again, and is edited again."""
    clock = ManualClock(START_MS)
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.admin.declare_group(TOPIC, OTHERS, GroupConfig())
    client = Client(engine, tell)
    client.publish(*(f"d{number}" for number in range(8)))
    client.nack(client.pull(8))
    new_ids = client.edit("one", *EDITED[:3])
    held = client.pull(3)
    client.ack(held[:2])
    client.nack(held[2:])
    client.publish(*(f"e{number}" for number in range(10)))
    engine.writer.write_checkpoint()
    client.edit("two", new_ids[2], EDITED[3])
    client.ack(client.pull(1))
    client.publish("f0")
    engine.close()


def cleaning_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages die, are edited, or are put off; what is wanted of old segments is moved, some of it twice."""
    clock = ManualClock(START_MS)
    options = EngineOptions(
        segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES, retention_ms=DAY_MS,
        retention_check_ms=10**15,
    )  # fmt: skip
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    client = Client(engine, tell)
    for number in range(3):
        client.publish(*(f"a{number}-{part}" for part in range(12)))
        held = client.pull(12)
        client.nack(held[:2])
        engine.settler.nack([receipt for _, receipt in held[2:4]], delay_ms=5 * DAY_MS, counts=False)
        client.ack(held[4:])
        if number == 0:
            client.edit("one", *(one for one, _ in held[:1]))
        client.publish(*(f"b{number}-{part}" for part in range(8)))
        client.ack(client.pull(8))
        clock.advance(DAY_MS)
        tell(now_ms=clock.now_ms())
        engine.retention.drop_outdated()
        tell(answered="clean", ids=[str(engine.cleaner.moved_messages)])
    client.discard(*(one.id for one in engine.admin.dead(TOPIC, GROUP)[0][:1]))
    engine.close()


REDRIVEN = tuple(f"r{number}" for number in range(8))
"""What redrive_run() redrives, two a second."""


def redrive_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages die and are redriven at a rate; after two seconds of it an operator stops that."""
    clock = ManualClock(START_MS)
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    client = Client(engine, tell)
    client.publish(*REDRIVEN)
    client.nack(client.pull(8))
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=2)
    client.ack(client.pull(1))
    clock.advance(1_000)
    tell(now_ms=clock.now_ms())
    client.ack(client.pull(1))
    tell(asked="stop", ids=REDRIVEN[4:])
    if engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops") == len(REDRIVEN[4:]):
        tell(answered="stop", ids=REDRIVEN[4:])
    client.ack(client.pull(1))
    client.publish("z0")
    engine.close()


def rolling_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Both logs roll again and again, beside checkpoints."""
    clock = ManualClock(START_MS)
    options = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    client = Client(engine, tell)
    for number in range(3):
        client.publish(*(f"a{number}-{part}" for part in range(14)))
        client.publish(f"due{number}", deliver_at_ms=clock.now_ms() + 500)
        client.publish(*(f"b{number}-{part}" for part in range(14)))
        held = client.pull(25)
        client.ack(held[:20])
        client.nack(held[20:22])
        clock.advance(1_000)
        tell(now_ms=clock.now_ms())
        client.ack(client.pull(4))
        engine.writer.write_checkpoint()
    engine.close()


def arriving_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages for later arrive among others in segments that roll, and that retention drops while some still wait."""
    clock = ManualClock(START_MS)
    options = EngineOptions(
        segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES, retention_ms=DAY_MS,
        retention_check_ms=10**15, schedule_memory_messages_max=5,
    )  # fmt: skip
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    client = Client(engine, tell)
    for number in range(3):
        client.publish(f"far{number}", f"gone{number}", deliver_at_ms=START_MS + 20 * DAY_MS + number)
        client.publish(f"due{number}", f"late{number}", deliver_at_ms=clock.now_ms() + 1_000)
        client.publish(*(f"a{number}-{part}" for part in range(8)))
        client.ack(client.pull(8))
        client.cancel(f"gone{number}", f"late{number}", f"unborn{number}")
        client.publish(f"unborn{number}", f"soon{number}", deliver_at_ms=clock.now_ms() + 2_000)
        clock.advance(DAY_MS)
        tell(now_ms=clock.now_ms())
        client.ack(client.pull(4))
        client.publish(*(f"b{number}-{part}" for part in range(14)))
        client.ack(client.pull(14))
        clock.advance(DAY_MS)
        tell(now_ms=clock.now_ms())
        if engine.retention.drop_outdated():
            tell(answered="drop", ids=[str(number)])
    engine.close()


def scheduling_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """A schedule that is flushed again and again, goes down its levels, fires, and is canceled on the way."""
    clock = ManualClock(START_MS)
    options = EngineOptions(schedule_memory_messages_max=4, fire_batch_max=3, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)
    client = Client(engine, tell)
    for number in range(4):
        client.publish(f"near{number}", f"x{number}", deliver_at_ms=START_MS + 1_000 + number)
        client.publish(f"far{number}", f"y{number}", deliver_at_ms=START_MS + 20 * DAY_MS + number)
    client.cancel("x0", "y0", "unborn")
    clock.advance(2_000)
    tell(now_ms=clock.now_ms())
    client.ack(client.pull(5))
    client.publish("unborn", "soon", deliver_at_ms=clock.now_ms() + 500)
    for passing_ms in (8 * DAY_MS, 6 * DAY_MS, 5 * DAY_MS, DAY_MS):
        clock.advance(passing_ms)
        tell(now_ms=clock.now_ms())
        client.cancel(f"y{passing_ms // DAY_MS % 4}")
        client.ack(client.pull(2))
    for _ in range(8):
        client.ack(client.pull(3))
    engine.close()


def copy_at_each_call(run: type_of_run, folder: Path, *, way: str) -> None:
    """Run to the end. What a death at the n-th storage call leaves is `folder/n` then, and what was told until there
    `folder/n.told`; the last ones are those of the whole run.
    """
    live, told = folder / "live", folder / "told"
    copy = CopyEach(live, told, into=folder)
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT)
    try:
        run(live, KillingStorage(way=way, on_call=copy), teller(descriptor))
    finally:
        os.close(descriptor)
    copy(lambda _place: None)
    shutil.rmtree(live)


def run_until_signal(folder: Path, *, round_name: str) -> None:
    """Publishers and consumers in many threads, until somebody kills the process; tells on its standard output."""
    engine = Engine.open(folder, options=EngineOptions(segment_bytes=65_536, reserve_bytes=RESERVE_BYTES))
    tell = teller(1)

    def publish(name: str) -> None:
        client = Client(engine, tell)
        for number in range(1_000_000):
            client.publish(*(f"{round_name}-{name}-{number}-{part}" for part in range(3)))

    def consume() -> None:
        client = Client(engine, tell)
        while True:
            held = client.pull(5)
            client.ack(held[:4])

    for target in (lambda: publish("p1"), lambda: publish("p2"), lambda: publish("p3"), consume, consume):
        threading.Thread(target=target, daemon=True).start()
    threading.Event().wait(120)


def teller(descriptor: int) -> type_of_tell:
    """Tells by a single write, which outlives its process."""

    def tell(**what: object) -> None:
        os.write(descriptor, json.dumps(what).encode() + b"\n")

    return tell


if __name__ == "__main__":
    run_until_signal(Path(sys.argv[1]), round_name=sys.argv[2])
