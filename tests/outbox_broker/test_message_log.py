"""The log of messages: what a publish answered is there after any end of its process; damage is told, never served."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_broker.server.log_report import LogStatus, report_folder
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    SEGMENT_HEAD_BYTES,
    SegmentHead,
    SegmentKind,
)
from outbox_core.journal.journal import (
    SegmentDamaged,
)
from outbox_core.messages.message import Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.action_log import action_segments, blocks_in
from tests.outbox_broker.failing_storage import FailingStorage, HeldSyncs
from tests.outbox_broker.message_log import NOTE, flip, flip_directory, footers_of, message_segments

TOPIC = "orders"
BODIES = [word * 5 for word in (b"first", b"second", b"third")]
LOG = "messages"
SMALL = {"segment_bytes": 4096}
LONG = [bytes([number]) * (1 << 19) for number in range(11)]
type_of_open = Callable[..., Engine]


@pytest.fixture
def open_engine(open_engine: type_of_open) -> type_of_open:
    """Open an engine without a reserve, which these tests would copy again and again."""
    return lambda **options: open_engine(reserve_bytes=0, **options)


def publish(engine: Engine, *bodies: bytes) -> list[str]:
    """Publish bodies as one batch, whose ids say where they stand in their topic; returns their statuses."""
    stored = engine.admin.topic_figures(TOPIC)["stored"] if TOPIC in engine.admin.topics() else 0
    batch = [Message(id=f"m{number}", topic=TOPIC, body=body) for number, body in enumerate(bodies, stored)]
    return [str(result.status) for result in engine.publisher.publish(batch)]


def written(open_engine: type_of_open, folder: Path, *, bodies: list[bytes] = BODIES, **options: int) -> list[int]:
    """Publish bodies one by one and close; returns how long the log was before each, and at the end."""
    engine = open_engine(**options)
    sizes = [log_bytes(folder)]
    for body in bodies:
        assert publish(engine, body) == ["stored"]
        sizes.append(log_bytes(folder))
    engine.close()
    return sizes


def bodies_in(engine: Engine, *, group: str = "readers") -> list[bytes]:
    """The bodies of all that is there, in order."""
    bodies: list[bytes] = []
    while deliveries := engine.puller.pull(TOPIC, group, max_messages=100):
        bodies += [delivery.body for delivery in deliveries]
    return bodies


def log_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in message_segments(folder))


def only_segment(folder: Path) -> Path:
    [path] = message_segments(folder)
    return path


def kill(engine: Engine, folder: Path) -> None:
    """End the engine and leave the folder as a kill at this moment would."""
    killed = folder.with_name("killed")
    shutil.copytree(folder, killed)
    engine.close()
    shutil.rmtree(folder)
    killed.rename(folder)


def flipped(data: bytes, position: int) -> bytes:
    """The data with one bit of one byte turned over."""
    return data[:position] + bytes([data[position] ^ 0x04]) + data[position + 1 :]


# -- damage --------------------------------------------------------------------------------------------------------


def test_a_tail_of_zeros_is_cut(open_engine: type_of_open, folder: Path) -> None:
    size = written(open_engine, folder)[-1]
    with only_segment(folder).open("ab") as file:
        file.write(bytes(500))

    engine = open_engine()

    assert bodies_in(engine) == BODIES
    assert log_bytes(folder) == size
    assert engine.log_figures()["quarantined_bytes"] == 0, "a torn tail is no damage"


def test_a_torn_tail_is_cut_in_the_last_of_many_segments(open_engine: type_of_open, folder: Path) -> None:
    bodies = [bytes([65 + number]) * 500 for number in range(20)]
    written(open_engine, folder, bodies=bodies, **SMALL)
    last = message_segments(folder)[-1]
    last.write_bytes(last.read_bytes()[:-3])

    engine = open_engine(**SMALL)
    assert bodies_in(engine) == bodies[:-1]
    assert publish(engine, b"after") == ["stored"]

    assert bodies_in(open_engine(**SMALL), group="later") == [*bodies[:-1], b"after"]


def test_a_flipped_bit_in_any_byte_costs_its_message_alone_and_is_told_with_file_and_offset(
    open_engine: type_of_open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = written(open_engine, folder)
    starts[0] = SEGMENT_HEAD_BYTES
    segment = only_segment(folder)
    whole = segment.read_bytes()

    for position in range(starts[0], starts[2]):
        segment.write_bytes(flipped(whole, position))
        damaged = max(number for number, start in enumerate(starts) if start <= position)
        is_head = position < starts[damaged] + BLOCK_HEAD_BYTES
        caplog.clear()
        engine = open_engine()
        rest = BODIES if is_head else [*BODIES[:damaged], *BODIES[damaged + 1 :]]
        assert bodies_in(engine, group=f"g{position}") == rest, position
        assert engine.log_figures()["quarantined_bytes"] == starts[damaged + 1] - starts[damaged], position
        [told] = [record for record in caplog.records if event_name(record) == "block_damaged"]
        where = (vars(told)["segment"], vars(told)["position"])
        assert where == (segment.stem, starts[damaged] - SEGMENT_HEAD_BYTES)
        engine.close()
        assert segment.read_bytes() == flipped(whole, position), "what is damaged stays, for whoever can mend it"


@pytest.mark.parametrize("behind", [3, 500_000], ids=["length", "body"])
def test_a_flipped_bit_in_a_long_message_costs_nothing_that_follows_it(
    open_engine: type_of_open, folder: Path, behind: int
) -> None:
    written(open_engine, folder, bodies=[b"x" * 2_000_000, b"after", b"last"])
    segment = only_segment(folder)
    frame = SEGMENT_HEAD_BYTES + BLOCK_HEAD_BYTES
    segment.write_bytes(flipped(segment.read_bytes(), frame + behind))

    assert bodies_in(open_engine()) == [b"after", b"last"]


def test_a_flipped_bit_in_the_header_costs_no_message_and_is_told(
    open_engine: type_of_open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    written(open_engine, folder)
    segment = only_segment(folder)
    whole = segment.read_bytes()

    for position in range(SEGMENT_HEAD_BYTES):
        segment.write_bytes(flipped(whole, position))
        caplog.clear()
        engine = open_engine()
        assert bodies_in(engine, group=f"g{position}") == BODIES, position
        assert "segment_head_damaged" in map(event_name, caplog.records), position
        engine.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_segment_before_the_last_that_is_cut_short_costs_its_last_message_alone(
    open_engine: type_of_open, folder: Path, number: int
) -> None:
    bodies = [bytes([65 + at]) * 500 for at in range(20)]
    written(open_engine, folder, bodies=bodies, **SMALL)
    segments = message_segments(folder)
    last = max(at for at, body in enumerate(bodies) if body in segments[number].read_bytes())
    segments[number].write_bytes(segments[number].read_bytes()[:-3])
    flip_directory(footers_of(folder)[number])  # else it is found where the message is read

    engine = open_engine(**SMALL)

    assert bodies_in(engine) == [*bodies[:last], *bodies[last + 1 :]]
    assert len(bodies[last]) < engine.log_figures()["quarantined_bytes"] < 2 * len(bodies[last])


def test_a_segment_that_is_missing_between_others_is_refused(open_engine: type_of_open, folder: Path) -> None:
    written(open_engine, folder, bodies=[b"x" * 500] * 30, **SMALL)
    before = message_segments(folder)
    before.pop(1).unlink()

    with pytest.raises(SegmentDamaged, match="missing"):
        open_engine(**SMALL)

    assert message_segments(folder) == before


def test_a_segment_of_another_log_is_refused(open_engine: type_of_open, folder: Path) -> None:
    written(open_engine, folder)
    data = only_segment(folder).read_bytes()
    head = SegmentHead(kind=SegmentKind.ACTIONS, epoch=1, first=0, created_at_ms=0).encode()
    only_segment(folder).write_bytes(head + data[len(head) :])

    with pytest.raises(SegmentDamaged, match="another log"):
        open_engine()


@pytest.mark.parametrize("size", ["empty", "short", "zeros"])
def test_a_segment_that_was_being_made_when_the_machine_ended_is_removed(
    open_engine: type_of_open, folder: Path, size: str
) -> None:
    written(open_engine, folder)
    unfinished = folder / LOG / "messages-000000000002.segment"
    unfinished.write_bytes(
        {"empty": b"", "short": only_segment(folder).read_bytes()[:6], "zeros": bytes(SEGMENT_HEAD_BYTES)}[size]
    )

    engine = open_engine()

    assert not unfinished.exists()
    assert engine.log_figures()["quarantined_bytes"] == 0
    assert publish(engine, b"after") == ["stored"]
    assert bodies_in(engine) == [*BODIES, b"after"]


# -- failed writes and syncs ---------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_half_written(open_engine: type_of_open, folder: Path) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage)
    publish(engine, b"before")
    size = log_bytes(folder)

    for room_bytes in (0, 1, 8, 30):
        storage.room_bytes = room_bytes
        with pytest.raises(StorageFailed, match="No space left"):
            publish(engine, b"a" * 20, b"b" * 20)
        assert bodies_in(engine, group=f"g{room_bytes}") == [b"before"]

    storage.mend()
    assert publish(engine, b"after") == ["stored"]
    assert log_bytes(folder) < 2 * size
    assert bodies_in(open_engine()) == [b"before", b"after"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_roll_without_room_refuses_and_a_later_publish_rolls(
    open_engine: type_of_open, folder: Path, number: int
) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage, **SMALL)
    publish(engine, b"x" * 5000)
    storage.fail("create", number)

    for _ in range(2):
        with pytest.raises(StorageFailed, match=os.strerror(number)):
            publish(engine, b"y")

    assert len(message_segments(folder)) == 1
    storage.mend()
    assert publish(engine, b"z") == ["stored"]
    assert len(message_segments(folder)) == len(footers_of(folder)) + 1 == 2
    assert bodies_in(engine) == [b"x" * 5000, b"z"]
    assert bodies_in(open_engine(**SMALL), group="other") == [b"x" * 5000, b"z"]


def test_what_a_half_written_block_left_is_cut_by_the_next_write(open_engine: type_of_open) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage)
    publish(engine, b"before")
    storage.room_bytes = 5
    storage.fail("truncate")
    with pytest.raises(StorageFailed):
        publish(engine, b"torn" * 10)
    storage.mend()

    assert publish(engine, b"after") == ["stored"]

    assert bodies_in(engine) == [b"before", b"after"]
    assert bodies_in(open_engine(), group="later") == [b"before", b"after"]


def test_a_sync_that_fails_while_rolling_is_final_too(open_engine: type_of_open) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage, **SMALL)
    publish(engine, b"x" * 5000)
    storage.fail("sync")
    with pytest.raises(StorageFailed):
        publish(engine, b"y")
    storage.mend()

    with pytest.raises(StorageFailed, match="restarted"):
        publish(engine, b"z")


def test_a_roll_does_not_swallow_the_failure_that_a_publish_waits_for(open_engine: type_of_open) -> None:
    """The kernel reports a lost page once a descriptor: two syncs at a time, and one of them would be told "well"."""
    storage = HeldSyncs(within=LOG)
    engine = open_engine(storage=storage, **SMALL)
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(publish, engine, b"x" * 5000)
        assert storage.waiting.wait(120)
        rolling = threading.Event()
        storage.before = lambda call: rolling.set() if call == "sync" else None
        rolls = pool.submit(publish, engine, b"y")
        rolled_meanwhile = rolling.wait(0.2)
        storage.release()
        assert (waiting.result(120), rolls.result(120)) == (["stored"], ["stored"])

    assert not rolled_meanwhile


class FailingOnce(HeldSyncs):
    """The one sync that is released with an error fails, and no other."""

    def sync(self, descriptor: int) -> None:
        try:
            super().sync(descriptor)
        finally:
            self.error = None


def test_a_roll_that_waited_for_a_sync_that_failed_is_refused(open_engine: type_of_open, folder: Path) -> None:
    """The kernel reports a lost page once a descriptor: the sync that waited would be told "well"."""
    storage = FailingOnce(within=LOG)
    engine = open_engine(storage=storage, **SMALL)
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(publish, engine, b"x" * 5000)
        assert storage.waiting.wait(120)
        rolls = pool.submit(publish, engine, b"y")
        wait([rolls], timeout=0.2)
        storage.release(error=OSError(errno.EIO, "Input/output error"))
        failures = [waiting.exception(120), rolls.exception(120)]

    assert [type(failure) for failure in failures] == [StorageFailed, StorageFailed]
    assert len(message_segments(folder)) == 1, "of several, an opening would prove the newest alone"


# -- long batches --------------------------------------------------------------------------------------------------


def fail_at(storage: FailingStorage, number: int, error: BaseException) -> None:
    """Have the so-manieth write from now on fail."""
    left = number

    def before(call: str) -> None:
        nonlocal left
        left -= call == "write"
        if call == "write" and left == 0:
            raise error

    storage.before = before


def test_a_long_batch_comes_as_it_was_published(open_engine: type_of_open) -> None:
    engine = open_engine()

    publish(engine, *LONG)

    assert bodies_in(engine) == LONG
    assert bodies_in(open_engine(), group="later") == LONG


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["full", "interrupted"])
def test_a_long_batch_that_fails_is_not_there_and_may_be_sent_again(
    open_engine: type_of_open, *, is_interrupted: bool
) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage)
    publish(engine, b"before")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fail_at(storage, 1, KeyboardInterrupt() if is_interrupted else full)

    with pytest.raises(KeyboardInterrupt if is_interrupted else StorageFailed):
        publish(engine, *LONG)

    storage.mend()
    assert bodies_in(engine) == [b"before"]
    assert publish(engine, *LONG) == ["stored"] * len(LONG)
    assert bodies_in(open_engine(), group="later") == [b"before", *LONG]


def test_a_message_longer_than_what_is_read_ahead_is_read_whole(open_engine: type_of_open) -> None:
    bodies = [b"x", bytes(range(256)) * 100, b"y"]
    engine = open_engine()
    for body in bodies:
        publish(engine, body)

    assert bodies_in(engine) == bodies
    assert [engine.puller.pull(TOPIC, "one-by-one", max_messages=1)[0].body for _ in bodies] == bodies


# -- files ---------------------------------------------------------------------------------------------------------


def test_segments_can_be_read_and_written_by_their_owner_alone(open_engine: type_of_open, folder: Path) -> None:
    written(open_engine, folder)

    segments = [*message_segments(folder), *action_segments(folder)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in segments} == {0o600}


def test_without_fsync_a_publish_does_not_sync(open_engine: type_of_open) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage, durability="os")
    publish(engine, b"before")  # begins a segment, whose entry in its folder is synced anyhow
    storage.calls.clear()
    before = engine.log_figures()["syncs"]

    publish(engine, *BODIES)

    assert "sync" not in storage.calls
    assert engine.log_figures()["syncs"] == before
    assert bodies_in(engine) == [b"before", *BODIES]


@pytest.mark.parametrize("log", [LOG, "actions"])
def test_a_new_folder_is_synced_into_the_folder_above_it(open_engine: type_of_open, folder: Path, log: str) -> None:
    storage = FailingStorage()

    open_engine(storage=storage)

    assert f"sync_folder {log}" in storage.calls
    assert f"sync_folder {folder.name}" in storage.calls


# -- what a failed sync of an earlier process may have lost --------------------------------------------------------


def test_after_an_end_in_order_nothing_is_written_anew(open_engine: type_of_open, folder: Path) -> None:
    written(open_engine, folder)
    before = only_segment(folder).stat().st_ino

    engine = open_engine()

    assert bodies_in(engine) == BODIES
    assert only_segment(folder).stat().st_ino == before


def test_after_any_other_end_the_newest_segment_is_written_anew_and_synced_before_it_counts(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    kill(engine, folder)
    before = only_segment(folder).stat().st_ino
    storage = FailingStorage(within=LOG)

    engine = open_engine(storage=storage)

    assert only_segment(folder).stat().st_ino != before
    calls = [call for call in storage.calls if call in {"write", "sync", "sync_folder messages"}]
    assert calls[:3] == ["write", "sync", "sync_folder messages"]
    assert publish(engine, b"after") == ["stored"]
    assert bodies_in(open_engine()) == [*BODIES, b"after"]


def test_what_came_after_a_failed_sync_is_not_taken_for_proven_when_the_log_is_closed(
    open_engine: type_of_open, folder: Path
) -> None:
    storage = FailingStorage(within=LOG)
    engine = open_engine(storage=storage)
    storage.fail("sync")
    with pytest.raises(StorageFailed, match="did not confirm"):
        publish(engine, *BODIES)
    storage.mend()
    engine.close()
    before = only_segment(folder).stat().st_ino

    engine = open_engine()

    assert bodies_in(engine) == BODIES
    assert only_segment(folder).stat().st_ino != before


def test_a_log_that_cannot_be_proven_is_not_opened(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    kill(engine, folder)
    storage = FailingStorage(within=LOG)
    storage.fail("sync")

    with pytest.raises(StorageFailed, match="Input/output error"):
        open_engine(storage=storage)

    assert bodies_in(open_engine()) == BODIES


def test_without_room_for_a_copy_the_log_opens_and_is_proven_the_next_time(
    open_engine: type_of_open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    kill(engine, folder)
    segment = only_segment(folder)
    before = segment.stat().st_ino
    storage = FailingStorage(within=LOG)
    storage.room_bytes = 10

    engine = open_engine(storage=storage)

    assert bodies_in(engine) == BODIES
    assert segment.stat().st_ino == before
    assert "segment_not_verified" in [event_name(record) for record in caplog.records]
    assert not segment.with_suffix(".new").exists()
    kill(engine, folder)
    before = segment.stat().st_ino
    open_engine()
    assert segment.stat().st_ino != before


def test_a_copy_that_was_not_finished_is_made_anew(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    kill(engine, folder)
    segment = only_segment(folder)
    size = segment.stat().st_size
    segment.with_suffix(".new").write_bytes(b"half a copy" * 1_000)

    engine = open_engine()

    assert bodies_in(engine) == BODIES
    assert not segment.with_suffix(".new").exists()
    assert segment.stat().st_size == size


def test_whatever_call_of_an_opening_is_the_last_nothing_is_lost(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    kill(engine, folder)
    ended = 0
    for at in range(1, 12):
        storage = FailingStorage(within=LOG)
        storage.before = lambda call, storage=storage, at=at: ends_at(storage, at)  # type: ignore[misc]
        try:
            engine = open_engine(storage=storage)
        except (StorageFailed, OSError):
            ended += 1
        else:
            storage.mend()
            kill(engine, folder)
        engine = open_engine()
        assert bodies_in(engine, group=f"g{at}") == BODIES, at
        kill(engine, folder)
        (folder / LOG / NOTE).unlink()

    assert ended >= 4


def ends_at(storage: FailingStorage, number: int) -> None:
    if len(storage.calls) >= number:
        raise OSError(errno.EIO, "the process ended here")


def test_the_note_of_the_segment_before_proves_nothing(open_engine: type_of_open, folder: Path) -> None:
    """The file may have been begun by a process whose sync of it failed, right behind what is proven."""
    written(open_engine, folder, bodies=[b"x" * 5000], **SMALL)
    engine = open_engine(**SMALL)
    publish(engine, b"y")
    kill(engine, folder)
    newest = message_segments(folder)[-1]
    newest.with_suffix(".proven").unlink()
    os.truncate(newest, SEGMENT_HEAD_BYTES)  # of what was written into it, nothing
    before = newest.stat().st_ino

    engine = open_engine(**SMALL)

    assert newest.stat().st_ino != before
    assert bodies_in(engine) == [b"x" * 5000]


@pytest.mark.parametrize("cut_bytes", [0, 5])
def test_damage_of_the_last_message_that_was_proven_is_told_and_not_taken_for_a_torn_tail(
    open_engine: type_of_open, folder: Path, cut_bytes: int
) -> None:
    engine = open_engine()
    publish(engine, *BODIES)
    engine.close()
    data = bytearray(only_segment(folder).read_bytes())
    data[-20] ^= 1
    only_segment(folder).write_bytes(data[: len(data) - cut_bytes])

    for group in ("first", "second"):
        engine = open_engine()
        assert engine.log_figures()["quarantined_bytes"] > 0
        assert bodies_in(engine, group=group) == BODIES[:-1]
    publish(engine, b"after")
    assert bodies_in(open_engine(), group="third") == [*BODIES[:-1], b"after"]


# -- what a reviewer of this log found ------------------------------------------------------------------------------


def test_what_is_not_committed_is_handed_to_nobody_also_after_a_roll(open_engine: type_of_open) -> None:
    storage = HeldSyncs(within=LOG)
    engine = open_engine(storage=storage, **SMALL)
    publish(engine, b"x" * 3000)
    assert bodies_in(engine) == [b"x" * 3000]
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(publish, engine, b"y" * 3000)]
        assert storage.waiting.wait(120)
        waiting.append(pool.submit(engine.publisher.publish, [Message(id="other", topic="other", body=b"z" * 3000)]))
        wait(waiting, timeout=0.2)
        seen = engine.context.state.topics[TOPIC].index.durable_end(engine.context.messages.committed)
        storage.release()
        assert waiting[0].result(120) == ["stored"]

    assert seen == 1, "the second message of the topic is not committed"


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_segment_whose_end_is_gone_costs_none_that_follows_it(
    open_engine: type_of_open, folder: Path, durability: str
) -> None:
    options = {"segment_bytes": 4096, "durability": durability}
    engine = open_engine(**options)
    bodies = [bytes([65 + number]) * 900 for number in range(9)]
    for body in bodies:
        publish(engine, body)
    engine.close()
    [*_, before, newest] = message_segments(folder)
    blocks = list(blocks_in(before))
    os.truncate(before, blocks[-1].position)
    newest_data = newest.read_bytes()
    [told] = [log for store in report_folder(folder) for log in store.logs if log.name == LOG]
    assert (told.status, told.unacknowledged, told.refused) == (LogStatus.DAMAGED, None, None)

    engine = open_engine(**options)

    assert newest.read_bytes()[: len(newest_data)] == newest_data
    lost = [body for body in bodies if body in blocks[-1].frames[0].payload]
    assert bodies_in(engine) == [body for body in bodies if body not in lost]


def test_a_log_whose_files_are_all_gone_is_missed(open_engine: type_of_open, folder: Path) -> None:
    written(open_engine, folder, bodies=[b"x" * 900] * 12, **SMALL)
    open_engine(**SMALL).close()
    for path in (folder / LOG).glob("messages-*"):
        path.unlink()
    left = sorted((folder / "actions").iterdir())

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=f"all segments in .*{LOG} are missing"):
            open_engine(**SMALL)
    assert sorted((folder / "actions").iterdir()) == left != [], "nothing is touched where an opening is refused"


def test_a_broker_without_messages_opens_after_a_power_cut_whatever_the_durability(
    open_engine: type_of_open, folder: Path
) -> None:
    storage = FailingStorage()
    engine = open_engine(durability="os", storage=storage)
    engine.close()

    synced = [call for call in storage.calls if call == f"sync_folder {LOG}"]
    assert synced, "the number of its openings is durable, or the log would be taken for removed"
    assert f"sync_folder {folder.name}" in storage.calls, "and so is the folder that holds it"


def test_a_flipped_bit_in_the_head_of_a_segment_does_not_age_the_one_before(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    clock.step_wall(int(time.time() * 1000) - clock.now_ms())  # as the files' times
    options = {**SMALL, "retention_ms": 7 * 86_400_000, "retention_check_ms": 10**15}
    written(open_engine, folder, bodies=[b"x" * 900] * 12, **options)
    second = message_segments(folder)[1]
    second.write_bytes(flipped(second.read_bytes(), 20))

    engine = open_engine(**options)

    assert engine.retention.drop_outdated() == 0
    assert len(engine.reader.read(TOPIC, start="earliest").messages) == 12


class WithoutCopies(DiskStorage):
    """Has no room for the copy by which an opening proves the newest segment of messages."""

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name.startswith("messages-") and path.suffix == ".new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)


def test_what_an_opening_has_found_before_it_let_go_of_the_note_is_read_though_there_is_no_room_for_a_copy(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine()
    publish(engine, *(b"a%d" % number for number in range(3)))
    publish(engine, *(b"b%d" % number for number in range(20)))  # in one block, acknowledged
    killed = folder.with_name("killed")
    shutil.copytree(folder, killed)
    engine.close()
    shutil.rmtree(folder)
    killed.rename(folder)
    [path] = message_segments(folder)
    flip(path, path.stat().st_size - 20)

    engine = open_engine(storage=WithoutCopies())

    assert bodies_in(engine) == [*(b"a%d" % number for number in range(3)), *(b"b%d" % number for number in range(19))]
    publish(engine, b"next")
    assert bodies_in(engine) == [b"next"]
    engine = open_engine()
    assert bodies_in(engine) == []
    assert bodies_in(engine, group="other")[-1] == b"next"
