"""On file systems that really fill up, and whose power is really cut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import Message, PublishStatus
from tests.outbox_broker.killed_engine import DAY_MS, GROUP, START_MS, TOPIC, message
from tests.outbox_broker.mounts import FailingDisk, failing_disk, powered_disk, small_disk
from tests.outbox_broker.test_engine_kills import ROOT, pulls, told_in

MIB = 1 << 20
OPTIONS = EngineOptions(reserve_bytes=MIB)
ACKED = b'"answered": "ack"'


def batch(name: str) -> list[Message]:
    return [Message(id=f"{name}-{number}", topic=TOPIC, body=b"x" * 1_000) for number in range(50)]


def until_full(write: Callable[[int], object]) -> str:
    """Write until it is refused; returns how."""
    for number in range(10_000):
        try:
            write(number)
        except StorageFailed as error:
            return str(error)
    raise AssertionError("the disk did not fill up")


def test_on_a_full_disk_what_is_stored_is_consumed_and_publishes_are_taken_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path, size_mb=8) as disk:
        options = EngineOptions(segment_bytes=MIB, checkpoint_bytes=MIB, reserve_bytes=MIB)
        engine = Engine.open(disk / "data", options=options)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2 * MIB))
        stored: list[str] = []

        def publish(number: int) -> None:
            stored.extend(one.id for one in engine.publisher.publish(batch(f"b{number}")))

        refusal = until_full(publish)
        (disk / "rest").write_bytes(b"")
        try:
            with (disk / "rest").open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
        except OSError:
            pass

        got: list[str] = []
        while deliveries := engine.puller.pull(TOPIC, GROUP, max_messages=40):
            assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)
            got += [one.id for one in deliveries]
            with pytest.raises(StorageFailed, match="No space left"):
                publish(99_999)

        assert "No space left" in refusal
        assert got == stored
        ballast.unlink()
        publish(0)
        publish(10_000)
        engine.close()
        engine = Engine.open(disk / "data", options=options)
        assert [one.id for one in engine.puller.pull(TOPIC, GROUP)] == [f"b10000-{number}" for number in range(50)]
        engine.close()


def asked_only(lines: bytes) -> bytes:
    """What was asked, without the answers. Once the power is cut nobody answers; but a file system that is shut down by
    ioctl says "synced" now and then of what it has dropped, while a commit of its journal is being aborted.
    """
    return b"".join(line for line in lines.splitlines(keepends=True) if b'"asked"' in line)


@pytest.mark.slow
@pytest.mark.parametrize("after", [20, 300])
def test_what_was_answered_before_the_power_was_cut_holds(tmp_path: Path, random_seed: int, after: int) -> None:
    random = Random(random_seed)
    with powered_disk(tmp_path) as disk:
        lines = b""
        for life in range(3):
            command = [
                sys.executable,
                "-m",
                "tests.outbox_broker.killed_engine",
                str(disk.place / "data"),
                f"r{life}",
            ]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                count = after + random.randint(0, 100)
                while count > 0 or ACKED not in lines:
                    line = process.stdout.readline()
                    assert line, "the engine ended by itself"
                    lines += line
                    count -= 1
                disk.cut_power()
                process.kill()
                lines += asked_only(process.stdout.read())
            disk.take_out()
            disk.power_on()
        told = told_in(lines)

        engine = Engine.open(disk.place / "data")
        stored = [one for deliveries in pulls(engine, "audit") for one in deliveries]
        mine = engine.admin.group_figures(TOPIC, GROUP)
        damaged, _ = engine.admin.dead(TOPIC, "audit")
        engine.close()

    ids = {one.id for one in stored}
    assert told.answered["ack"]
    assert told.answered["publish"] - ids == set(), "lost"
    assert ids - told.asked["publish"] == set(), "invented"
    assert all(one.body == message(one.id).body for one in stored)
    assert damaged == []
    assert len(told.asked["ack"]) >= len(ids) - mine["backlog"] - mine["in_flight"] >= len(told.answered["ack"])


def answered_though_it_fails(place: Path, disk: FailingDisk, *, later_ms: int | None) -> list[Message]:
    """Publish until a sync fails, mend the disk, open anew and publish what was refused again; returns it.

    It came before, and the broker says so: that is an answer to whoever asks for it to be stored.
    """
    engine = Engine.open(place, clock=ManualClock(START_MS), options=OPTIONS)
    engine.publisher.publish([message("before", deliver_at_ms=later_ms)])
    disk.fail()
    refused = [message(f"r{number}", deliver_at_ms=later_ms) for number in range(2_000)]
    with pytest.raises(StorageFailed, match="did not confirm"):
        engine.publisher.publish(refused)
    disk.mend()
    with suppress(StorageFailed):
        engine.close()

    engine = Engine.open(place, clock=ManualClock(START_MS), options=OPTIONS)
    answers = {one.status for one in engine.publisher.publish(refused)}
    assert answers <= {PublishStatus.DUPLICATE, PublishStatus.STORED}
    engine.close()
    return refused


@pytest.mark.parametrize("later_ms", [None, START_MS + DAY_MS], ids=["for_now", "for_later"])
def test_what_a_failed_sync_lost_is_proven_when_the_broker_opens_again(tmp_path: Path, later_ms: int | None) -> None:
    with failing_disk(tmp_path) as disk:
        answered = answered_though_it_fails(disk.place / "data", disk, later_ms=later_ms)
        disk.cut_power()
        disk.take_out()
        disk.power_on()

        engine = Engine.open(disk.place / "data", clock=ManualClock(START_MS + 2 * DAY_MS), options=OPTIONS)
        engine.publisher.cancel([])
        stored = [one for deliveries in pulls(engine, "audit") for one in deliveries]
        engine.close()

    assert {one.id for one in stored} == {"before", *(one.id for one in answered)}
