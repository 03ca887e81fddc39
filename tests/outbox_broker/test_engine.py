"""What the engine promises its callers, on a real disk and by a clock that the test moves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.timer import WOKEN_AGAIN_MS
from outbox_broker.log.folder_lock import FolderLock
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, InvalidMessage, StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import SegmentHead, SegmentKind
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.limits import CLOCK_DIFFERENCE_MS_MAX, DELAY_MAX_MS
from outbox_core.messages.message import DeadEdit, Delivery, GroupConfig, Message
from tests.fixtures.forks import FORKS
from tests.outbox_broker.action_log import action_segments, damage_action, stored_actions
from tests.outbox_broker.failing_storage import FailingStorage, HeldSyncs
from tests.outbox_broker.message_log import message_segments, segments_of
from tests.outbox_broker.open_files import open_files

TOPIC, GROUP = "orders", "billing"
EDIT, OPERATION = DeadEdit(headers={"region": "eu"}), EditOperation(name="op", by="ops", why="typo")
HOUR_MS = 3_600_000
WAIT_MS = 60_000
"""Longer than any test lets pass: what ends such a wait is an event."""

type_of_open = Callable[..., Engine]


def message(message_id: str, *, topic: str = TOPIC, deliver_at_ms: int | None = None, body: bytes = b"x") -> Message:
    return Message(id=message_id, topic=topic, body=body, deliver_at_ms=deliver_at_ms)


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> list[str]:
    """Publish messages of these ids; returns their statuses."""
    results = engine.publisher.publish([message(one, topic=topic, deliver_at_ms=deliver_at_ms) for one in ids])
    return [str(one.status) for one in results]


def pull(engine: Engine, *, max_messages: int = 100, invisible_ms: int = 30_000) -> list[Delivery]:
    return engine.puller.pull(TOPIC, GROUP, max_messages=max_messages, invisible_ms=invisible_ms)


def pull_ids(engine: Engine) -> list[str]:
    return [one.id for one in pull(engine)]


def drained(engine: Engine) -> list[str]:
    """All that is ready, pull after pull."""
    ids: list[str] = []
    while found := pull_ids(engine):
        ids += found
    return ids


def pull_one(engine: Engine, *, invisible_ms: int = 30_000) -> Delivery:
    [delivery] = pull(engine, max_messages=1, invisible_ms=invisible_ms)
    return delivery


def declare(engine: Engine, *, max_attempts: int = 16) -> None:
    config = GroupConfig(max_attempts=max_attempts, backoff_initial_ms=100, backoff_max_ms=1_000)
    engine.admin.declare_group(TOPIC, GROUP, config)


def make_dead(engine: Engine, *ids: str) -> list[Delivery]:
    """Publish messages and have the group refuse each for good."""
    declare(engine, max_attempts=1)
    publish(engine, *ids)
    deliveries = pull(engine)
    engine.settler.nack([one.receipt for one in deliveries], reason="broken")
    return deliveries


# -- storage -------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_publish_and_takes_it_when_there_is_room(open_engine: type_of_open) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage)
    publish(engine, "before")
    storage.room_bytes = 20

    with pytest.raises(StorageFailed, match="No space left"):
        publish(engine, "a", "b", topic="new")

    assert engine.admin.topics() == [TOPIC], "nothing of what was refused is there"
    storage.mend()
    assert publish(engine, "a", "b") == ["stored", "stored"]
    assert pull_ids(engine) == ["before", "a", "b"]


@pytest.mark.parametrize(
    "what", ["pull", "ack", "nack", "extend", "cancel", "pause", "seek", "redrive", "discard", "edit"]
)
def test_a_full_disk_refuses_an_action_and_changes_nothing(
    open_engine: type_of_open, clock: ManualClock, what: str
) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage)
    [dead] = make_dead(engine, "dead")
    declare(engine)
    publish(engine, "held", "fresh")
    held = pull_one(engine)
    publish(engine, "later", deliver_at_ms=clock.now_ms() + HOUR_MS)
    figures = engine.admin.group_figures(TOPIC, GROUP)
    action: Callable[[], object] = {
        "pull": lambda: pull(engine),
        "ack": lambda: engine.settler.ack([held.receipt]),
        "nack": lambda: engine.settler.nack([held.receipt], delay_ms=0),
        "extend": lambda: engine.settler.extend([held.receipt], invisible_ms=5),
        "cancel": lambda: engine.publisher.cancel(["later"]),
        "pause": lambda: engine.admin.pause(TOPIC, GROUP, paused=True),
        "seek": lambda: engine.admin.seek(TOPIC, GROUP, to_offset=0),
        "redrive": lambda: engine.dead_letters.redrive(TOPIC, GROUP),
        "discard": lambda: engine.dead_letters.discard(TOPIC, GROUP, by="ops", why="wrong"),
        "edit": lambda: engine.dead_letters.edit(TOPIC, GROUP, {"dead": EDIT}, operation=OPERATION),
    }[what]
    storage.room_bytes = 3

    with pytest.raises(StorageFailed):
        action()

    storage.mend()
    after = engine.admin.group_figures(TOPIC, GROUP)
    assert (after["in_flight"], after["dead"], after["scheduled"]) == (1, 1, 1)
    assert after["backlog"] == figures["backlog"] == 1
    assert engine.settler.ack([held.receipt]) == ["acked"]
    assert [(one.id, one.attempt) for one in pull(engine)] == [("fresh", 1)]
    engine = open_engine()
    assert engine.settler.ack([dead.receipt]) == ["stale"]
    assert pull_ids(engine) == []


def test_a_failed_sync_fails_all_who_wait_and_all_who_come_until_the_broker_is_opened_again(
    open_engine: type_of_open,
) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    publish(engine, "before")
    storage.hold()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(publish, engine, f"lost-{number}") for number in range(4)]
        assert storage.waiting.wait(120)
        storage.release(error=OSError(errno.EIO, os.strerror(errno.EIO)))
        failures = [one.exception(120) for one in waiting]

    assert [type(one) for one in failures] == [StorageFailed] * 4
    storage.error = None
    with pytest.raises(StorageFailed, match="restart"):
        publish(engine, "after")
    with pytest.raises(StorageFailed, match="restart"):
        publish(engine, "lost-1")
    with pytest.raises(StorageFailed, match="restart"):
        engine.check_ready()
    assert pull_ids(engine) == ["before"], "what is not known to be durable is not handed out"

    engine = open_engine()
    assert publish(engine, "before", "after") == ["duplicate", "stored"]
    assert "after" in {one.id for one in pull(engine)}


def test_concurrent_publishers_share_syncs(open_engine: type_of_open) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    before = engine.log_figures()["syncs"]
    storage.hold()

    with ThreadPoolExecutor(32) as pool:
        leader = pool.submit(publish, engine, "leader")
        assert storage.waiting.wait(120)
        followers = [pool.submit(publish, engine, f"m{number}") for number in range(31)]
        # The followers cannot be durable before the next sync: let it come once all of them have been written.
        while engine.admin.topic_figures(TOPIC)["stored"] < 32:
            assert not any(one.done() for one in followers)
        storage.release()
        assert all(one.result(120) == ["stored"] for one in [leader, *followers])

    assert engine.log_figures()["syncs"] - before == 2


def test_nothing_is_handed_out_before_it_is_durable(open_engine: type_of_open, clock: ManualClock) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(engine.publisher.publish, [message("now")])
        assert storage.waiting.wait(120)
        early = pull_ids(engine)
        storage.release()
        publishing.result(120)

    assert early == []
    assert pull_ids(engine) == ["now"]


def test_what_falls_due_before_it_is_durable_is_handed_out_after_it_is(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(engine.publisher.publish, [message("due", deliver_at_ms=clock.now_ms() + 10)])
        assert storage.waiting.wait(120)
        clock.advance(10)
        pulling = pool.submit(pull_ids, engine)
        assert wait([publishing, pulling], timeout=0.2).done == set()
        storage.release()
        assert publishing.result(120)[0].status == "stored"
        early = pulling.result(120)

    assert [*early, *pull_ids(engine)] == ["due"]


def test_a_second_engine_on_the_folder_is_refused_and_told_who_holds_it(engine: Engine, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on "):
        Engine.open(folder)

    engine.close()
    Engine.open(folder).close()


@pytest.mark.processes
def test_a_second_process_on_the_folder_is_refused_and_told_who_holds_it(engine: Engine, folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from outbox_broker.engine.engine import Engine; "
        "Engine.open(Path(sys.argv[1]))"
    )

    other = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)

    assert other.returncode == 1
    assert f"in use by process {os.getpid()} on " in other.stderr


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_that_releases_a_folders_lock_leaves_its_parents(
    tmp_path: Path, fork: Callable[[], int]
) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()

    child = fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)

    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on "):
        FolderLock(tmp_path).acquire()
    lock.release()
    FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_takes_the_lock_of_its_parent_that_was_killed(tmp_path: Path, fork: Callable[[], int]) -> None:
    told, tells = os.pipe()

    holder = fork()
    if holder == 0:
        lock, living = FolderLock(tmp_path), os.pipe()
        lock.acquire()
        if fork() == 0:
            os.close(living[1])
            os.read(living[0], 1)  # to the end of the parent
            with suppress(ConfigurationError):
                FolderLock(tmp_path).acquire()
                os.write(tells, b"taken")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(tells)
    os.waitpid(holder, 0)

    assert os.read(told, 5) == b"taken"
    os.close(told)


def test_a_full_disk_on_opening_is_told_as_such_and_the_folder_let_go(folder: Path) -> None:
    storage = FailingStorage()
    storage.fail("create", errno.ENOSPC)

    with pytest.raises(StorageFailed, match="No space left"):
        Engine.open(folder, storage=storage)

    Engine.open(folder).close()


def test_a_refused_opening_keeps_no_descriptor(engine: Engine, folder: Path) -> None:
    publish(engine, "a", "b")
    engine.close()
    [segment] = message_segments(folder)
    other = SegmentHead(kind=SegmentKind.ACTIONS, epoch=1, first=0, created_at_ms=0).encode()
    segment.write_bytes(other + segment.read_bytes()[len(other) :])

    with pytest.raises(SegmentDamaged):
        Engine.open(folder)

    assert open_files(folder) == []


def test_a_data_folder_that_cannot_be_made_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageFailed, match="cannot make the data folder"):
        Engine.open(tmp_path / "file" / "data")
    with pytest.raises(StorageFailed, match="file: a file has this name"):
        Engine.open(tmp_path / "file")


def test_a_sync_that_fails_on_closing_is_raised_and_the_folder_let_go(folder: Path, clock: ManualClock) -> None:
    storage = FailingStorage()
    engine = Engine.open(folder, clock=clock, storage=storage)
    publish(engine, "a")
    assert pull_one(engine).id == "a"  # which is not synced
    storage.fail("sync")

    with pytest.raises(StorageFailed):
        engine.close()

    engine.close()
    Engine.open(folder).close()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: publish(engine, "a"),
        pull,
        lambda engine: engine.settler.ack([]),
        lambda engine: engine.settler.nack([]),
        lambda engine: engine.settler.extend([], invisible_ms=1),
        lambda engine: engine.publisher.cancel(["a"]),
        lambda engine: engine.admin.declare_group(TOPIC, GROUP, GroupConfig()),
        lambda engine: engine.admin.seek(TOPIC, GROUP, to_offset=0),
        lambda engine: engine.admin.pause(TOPIC, GROUP, paused=True),
        lambda engine: engine.dead_letters.redrive(TOPIC, GROUP),
        lambda engine: engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops"),
        lambda engine: engine.admin.dead(TOPIC, GROUP),
        lambda engine: engine.dead_letters.count(TOPIC, GROUP),
        lambda engine: engine.dead_letters.discard(TOPIC, GROUP, by="ops", why="wrong"),
        lambda engine: engine.dead_letters.edit(TOPIC, GROUP, {"a": EDIT}, operation=OPERATION),
        lambda engine: engine.check_ready(),
    ],
    ids=["publish", "pull", "ack", "nack", "extend", "cancel", "declare", "seek", "pause", "redrive", "stop", "dead",
         "count", "discard", "edit", "ready"],
)  # fmt: skip
def test_a_closed_engine_refuses(engine: Engine, call: Callable[[Engine], object]) -> None:
    make_dead(engine, "a")
    engine.close()
    engine.close()

    with pytest.raises(StorageFailed, match="closed"):
        call(engine)


def test_everything_is_there_over_many_small_segments(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(segment_bytes=4096)
    ids = [f"m{number:03}" for number in range(300)]
    for start in range(0, 300, 10):
        publish(engine, *ids[start : start + 10])
    taken = [pull_one(engine) for _ in range(100)]
    for one in taken:
        engine.settler.ack([one.receipt])
    assert len(message_segments(folder)) > 3
    assert len(action_segments(folder)) >= 3

    engine = open_engine(segment_bytes=4096)

    assert engine.settler.ack([one.receipt for one in taken]) == ["already_acked"] * 100
    assert [one.id for one in pull(engine, max_messages=1_000)] == ids[100:]


@pytest.mark.parametrize("log", ["messages", "actions"])
def test_a_torn_tail_of_either_log_is_recovered_at_every_byte(
    open_engine: type_of_open, folder: Path, log: str
) -> None:
    engine = open_engine()
    publish(engine, "a")
    publish(engine, "b")
    receipts = [one.receipt for one in pull(engine)]
    sizes = {name: [size_of(folder, name)] for name in ("messages", "actions")}
    publish(engine, "c")
    engine.settler.ack([receipts[0]])
    for name, found in sizes.items():
        found.append(size_of(folder, name))
    engine.close()
    whole = only_segment(folder, log).read_bytes()

    for size in range(*sizes[log]):
        restore(folder, log, whole, size)
        engine = open_engine()
        torn = "stored" if log == "messages" else "duplicate"
        first = "already_acked" if log == "messages" else "acked"
        assert publish(engine, "a", "b", "c") == ["duplicate", "duplicate", torn], size
        assert engine.settler.ack(receipts) == [first, "acked"], size
        assert pull_ids(engine) == ["c"], size
        engine.close()
        for name in ("messages", "actions"):
            restore(folder, name, whole if name == log else None, sizes[name][1])


def test_a_flipped_bit_found_on_opening_costs_its_message_alone_and_is_told(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine()
    publish(engine, "a", "damaged", "c")
    damage(folder, b"damaged")

    engine = open_engine()

    assert engine.log_figures()["quarantined_bytes"] > 0
    assert drained(engine) == ["a", "c"]
    [letter], _ = engine.admin.dead(TOPIC, GROUP)
    assert "damaged" in letter.reason
    assert publish(engine, "a", "c", "d") == ["duplicate", "duplicate", "stored"]
    assert pull_ids(engine) == ["d"]


@pytest.mark.parametrize("both", [False, True], ids=["one copy", "both copies"])
def test_a_damaged_action_costs_nothing_by_one_copy_and_itself_alone_by_both(
    open_engine: type_of_open, folder: Path, both: bool
) -> None:
    engine = open_engine()
    publish(engine, "a", "b", "c")
    for delivery in pull(engine):
        engine.settler.ack([delivery.receipt])
    engine.close()
    [segment] = action_segments(folder)
    settled = [stored for stored in stored_actions(segment) if isinstance(stored.action, journal.Settled)]
    for stored in (settled[0], settled[-1]):
        damage_action(segment, stored, both=both)

    engine = open_engine()

    assert engine.log_figures()["quarantined_bytes"] > 0
    assert engine.admin.group_figures(TOPIC, GROUP)["in_flight"] == (2 if both else 0)
    engine.admin.seek(TOPIC, GROUP, to_offset=0)
    assert pull_ids(engine) == ["a", "b", "c"]


def test_a_damaged_record_becomes_a_dead_letter_and_the_others_flow(engine: Engine, folder: Path) -> None:
    publish(engine, "before", "damaged", "after")
    damage(folder, b"damaged")

    assert drained(engine) == ["before", "after"]

    [letter], _ = engine.admin.dead(TOPIC, GROUP)
    assert "damaged" in letter.reason
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 0, "it cannot be sent again: its bytes are gone"
    assert engine.admin.group_figures(TOPIC, GROUP)["dead"] == 1


def test_a_damaged_record_at_the_head_costs_a_small_pull_nothing(engine: Engine, folder: Path) -> None:
    publish(engine, "damaged-1", "damaged-2", "after")
    damage(folder, b"damaged-1")
    damage(folder, b"damaged-2")

    assert pull_one(engine).id == "after"


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_disk_that_fills_up_beside_a_damaged_record_loses_nothing(
    open_engine: type_of_open, folder: Path, clock: ManualClock, writes: int
) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage)
    declare(engine)
    publish(engine, "before", "damaged", "after")
    damage(folder, b"damaged")
    left = iter(range(writes))

    def before(call: str) -> None:
        if call == "write" and next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.before = before
    with pytest.raises(StorageFailed):
        drained(engine)
    size = size_of(folder, "messages")
    storage.mend()
    engine.close()
    flip(folder, b"eamaged", b"damaged")  # opening proves every record, so this one is mended for it
    assert size_of(folder, "messages") == size

    engine = open_engine()

    got = {one.id for one in pull(engine)} | {one.id for one in engine.admin.dead(TOPIC, GROUP)[0]}
    clock.advance(HOUR_MS)
    got |= {one.id for one in pull(engine)}
    assert got - {"", "damaged"} == {"before", "after"}


# -- duplicates ----------------------------------------------------------------------------------------------------


def test_a_repeated_id_is_a_duplicate_in_one_batch_in_a_later_one_and_after_a_restart(
    open_engine: type_of_open,
) -> None:
    engine = open_engine()

    assert publish(engine, "a", "b", "a") == ["stored", "stored", "duplicate"]
    assert publish(engine, "b", "c") == ["duplicate", "stored"]
    engine = open_engine()
    assert publish(engine, "a", "b", "c", "d") == ["duplicate"] * 3 + ["stored"]

    assert pull_ids(engine) == ["a", "b", "c", "d"]


def test_an_id_is_forgotten_when_its_window_is_full(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=3)
    publish(engine, "a", "b", "c", "d")

    assert publish(engine, "d", "c", "b") == ["duplicate"] * 3
    assert publish(engine, "a") == ["stored"]


def test_an_id_that_is_still_scheduled_is_a_duplicate_however_long_ago_it_came(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(dedup_messages_max=2)
    publish(engine, "later", deliver_at_ms=clock.now_ms() + 1_000)
    publish(engine, "a", "b", "c")

    assert publish(engine, "later", deliver_at_ms=clock.now_ms() + 2_000) == ["duplicate"]

    clock.advance(1_000)
    assert pull_ids(engine) == ["a", "b", "c", "later"]
    clock.advance(1_000)
    assert pull_ids(engine) == []


def test_too_many_topics_are_rejected_and_known_ones_still_taken(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(topics_max=2)
    later_ms = clock.now_ms() + 1_000

    results = engine.publisher.publish(
        [message(f"m{number}", topic=f"t{number}", deliver_at_ms=later_ms if number % 2 else None)
         for number in range(4)]
    )  # fmt: skip

    assert [one.status for one in results] == ["stored", "stored", "rejected", "rejected"]
    assert "topics_max" in (results[2].error or "")
    assert publish(engine, "more", topic="t0") == ["stored"]


# -- settling ------------------------------------------------------------------------------------------------------


def test_a_late_ack_counts_until_the_message_is_handed_out_again_and_is_stale_after(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    first_a, first_b = pull(engine, invisible_ms=100)
    clock.advance(100)

    assert engine.settler.ack([first_a.receipt]) == ["acked"]
    second_b = pull_one(engine)
    assert (second_b.id, second_b.attempt) == ("b", 1)  # the other one may have ended the consumer
    assert engine.settler.ack([first_b.receipt]) == ["stale"]

    engine = open_engine()
    assert engine.settler.ack([first_a.receipt, first_b.receipt, second_b.receipt]) == [
        "already_acked",
        "stale",
        "acked",
    ]
    clock.advance(HOUR_MS)
    assert pull_ids(engine) == []


def test_receipts_of_one_request_are_each_told_apart(engine: Engine) -> None:
    publish(engine, "a", "b")
    a, b = pull(engine)
    never = f"{TOPIC}/{GROUP}/2.1.0"
    elsewhere = f"{TOPIC}/other/0.1.0"

    statuses = engine.settler.ack([a.receipt, "nonsense", a.receipt, never, elsewhere, b.receipt])

    assert statuses == ["acked", "unknown", "already_acked", "unknown", "unknown", "acked"]
    assert engine.settler.nack([a.receipt, "nonsense", never, elsewhere]) == ["stale"] * 4
    assert engine.settler.extend([a.receipt, "nonsense", never, elsewhere], invisible_ms=10) == ["stale"] * 4


def test_one_slow_message_does_not_stop_its_group(engine: Engine) -> None:
    publish(engine, *(f"m{number}" for number in range(300)))
    slow = pull_one(engine, invisible_ms=HOUR_MS)

    for _ in range(3):
        deliveries = pull(engine)
        assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)

    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0
    assert engine.settler.ack([slow.receipt]) == ["acked"]


def test_a_nack_that_counts_backs_off_longer_each_time(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "a")

    for attempt, delay_ms in enumerate((100, 200, 400, 800, 1_000, 1_000), 1):
        delivery = pull_one(engine)
        assert delivery.attempt == attempt
        assert engine.settler.nack([delivery.receipt]) == ["requeued"]
        clock.advance(delay_ms - 1)
        assert pull_ids(engine) == []
        clock.advance(1)


def test_a_nack_that_does_not_count_gives_back_at_once_and_uses_no_attempt(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine, max_attempts=1)
    publish(engine, "a")

    for _ in range(3):
        delivery = pull_one(engine)
        assert delivery.attempt == 1
        assert engine.settler.nack([delivery.receipt], counts=False) == ["requeued"]
        engine = open_engine()

    assert pull_one(engine).attempt == 1


def test_the_last_nack_that_counts_makes_a_dead_letter_with_its_reason_in_one_step(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine, max_attempts=2)
    publish(engine, "a", "b")
    engine.settler.nack([one.receipt for one in pull(engine)], delay_ms=0, reason="first")
    receipts = [one.receipt for one in pull(engine)]

    assert engine.settler.nack([receipts[0], receipts[0]], reason="no such order") == ["dead", "stale"]

    engine = open_engine()
    [letter], cursor = engine.admin.dead(TOPIC, GROUP)
    assert (letter.id, letter.attempts, letter.reason, cursor) == ("a", 2, "no such order", None)
    assert engine.settler.ack(receipts) == ["stale", "acked"]


def test_expiry_after_the_last_attempt_makes_a_dead_letter(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    declare(engine, max_attempts=2)
    publish(engine, "a")
    for _ in range(2):
        pull_one(engine, invisible_ms=10)
        clock.advance(10)

    assert pull_ids(engine) == []

    engine = open_engine()
    [letter], _ = engine.admin.dead(TOPIC, GROUP)
    assert (letter.id, letter.attempts) == ("a", 2)
    assert "invisible time" in letter.reason


def test_a_death_at_the_head_costs_a_small_pull_nothing(engine: Engine, clock: ManualClock) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "doomed")
    pull_one(engine, invisible_ms=10)
    publish(engine, "next")
    clock.advance(10)

    assert pull_one(engine).id == "next"


def test_a_death_does_not_let_fresh_messages_pass_one_that_is_visible_again(engine: Engine, clock: ManualClock) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "doomed", "again")
    pull_one(engine, invisible_ms=10)
    again = pull_one(engine)
    engine.settler.nack([again.receipt], delay_ms=10, counts=False)
    publish(engine, "fresh")
    clock.advance(10)

    assert [pull_one(engine).id for _ in range(2)] == ["again", "fresh"]


@pytest.mark.parametrize("retry_size", [10, 900])
@pytest.mark.parametrize("fresh_size", [10, 900])
def test_large_bodies_of_retries_or_fresh_messages_do_not_keep_the_others_out_of_every_pull(
    open_engine: type_of_open, clock: ManualClock, retry_size: int, fresh_size: int
) -> None:
    engine = open_engine(pull_bytes_max=1_000)
    engine.publisher.publish([Message(id=f"retry-{at}", topic=TOPIC, body=bytes(retry_size)) for at in range(6)])
    for _ in range(6):
        engine.settler.nack([pull_one(engine).receipt], delay_ms=60_000)
    engine.publisher.publish([Message(id=f"fresh-{at}", topic=TOPIC, body=bytes(fresh_size)) for at in range(6)])
    clock.advance(60_000)

    first_two = [delivery.id for _ in range(2) for delivery in engine.puller.pull(TOPIC, GROUP, max_messages=4)]

    assert {one.partition("-")[0] for one in first_two} == {"retry", "fresh"}


def test_a_dead_letter_is_redriven_once_into_a_new_life(open_engine: type_of_open) -> None:
    engine = open_engine()
    [dead_a, dead_b] = make_dead(engine, "a", "b")

    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["a", "a", "nobody"]) == 1
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["a"]) == 0

    engine = open_engine()
    again = pull_one(engine)
    assert (again.id, again.attempt) == ("a", 1)
    assert engine.settler.ack([dead_a.receipt, dead_b.receipt, again.receipt]) == ["stale", "stale", "acked"]
    assert [one.id for one in engine.admin.dead(TOPIC, GROUP)[0]] == ["b"]
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 1


def test_a_message_whose_last_attempt_ran_out_is_redriven_with_the_dead(engine: Engine, clock: ManualClock) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "a")
    pull_one(engine, invisible_ms=10)
    clock.advance(10)

    assert engine.dead_letters.redrive(TOPIC, GROUP) == 1

    assert pull_one(engine).attempt == 1


def test_an_extension_counts_from_now_and_survives_a_restart(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    publish(engine, "a")
    delivery = pull_one(engine, invisible_ms=100)
    clock.advance(50)

    assert engine.settler.extend([delivery.receipt], invisible_ms=100) == ["extended"]

    engine = open_engine()
    clock.advance(99)
    assert pull_ids(engine) == []
    clock.advance(1)
    assert pull_ids(engine) == ["a"]


@pytest.mark.parametrize(
    "bounds",
    [{"invisible_ms": 0}, {"invisible_ms": -1}, {"invisible_ms": 10**12}, {"max_messages": 0}, {"max_messages": 10**6},
     {"wait_ms": -1}],
)  # fmt: skip
def test_a_pull_out_of_bounds_is_refused(engine: Engine, bounds: dict[str, int]) -> None:
    publish(engine, "a")

    with pytest.raises(InvalidMessage, match=next(iter(bounds))):
        engine.puller.pull(TOPIC, GROUP, **bounds)

    assert pull_ids(engine) == ["a"]


def test_an_extension_or_a_nack_out_of_bounds_is_refused(engine: Engine) -> None:
    publish(engine, "a")
    delivery = pull_one(engine)

    with pytest.raises(InvalidMessage, match="invisible_ms"):
        engine.settler.extend([delivery.receipt], invisible_ms=0)
    with pytest.raises(InvalidMessage, match="delay_ms"):
        engine.settler.nack([delivery.receipt], delay_ms=-1)
    with pytest.raises(InvalidMessage, match="delay_ms"):
        engine.settler.nack([delivery.receipt], delay_ms=DELAY_MAX_MS + 1)

    assert engine.settler.ack([delivery.receipt]) == ["acked"]


# -- groups --------------------------------------------------------------------------------------------------------


def test_every_group_gets_every_message_and_a_new_one_starts_at_the_earliest(engine: Engine) -> None:
    publish(engine, "a", "b")

    for group in ("g1", "g2", "g3"):
        assert [one.id for one in engine.puller.pull(TOPIC, group)] == ["a", "b"]

    assert engine.admin.groups(TOPIC) == ["g1", "g2", "g3"]


def test_a_group_may_start_at_the_latest_or_at_a_time(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "a")
    clock.advance(1_000)
    publish(engine, "b")
    engine.admin.declare_group(TOPIC, "latest", GroupConfig(start="latest"))
    engine.admin.declare_group(TOPIC, "at", GroupConfig(start="at", start_at_ms=clock.now_ms()))
    publish(engine, "c")

    assert [one.id for one in engine.puller.pull(TOPIC, "latest")] == ["c"]
    assert [one.id for one in engine.puller.pull(TOPIC, "at")] == ["b", "c"]


def test_the_timer_tells_of_what_is_visible_now_and_then_where_nobody_fetches_it(
    engine: Engine, clock: ManualClock
) -> None:
    publish(engine, "a")
    declare(engine)
    engine.settler.nack([engine.puller.pull(TOPIC, GROUP)[0].receipt], delay_ms=20)
    engine.wakeups.subscribe(TOPIC, GROUP, lambda: None)

    assert engine.timer.next_wake_ms(clock.now_ms()) == 20
    clock.advance(20)
    assert engine.timer.next_wake_ms(clock.now_ms() - 1) == 0
    assert engine.timer.next_wake_ms(clock.now_ms()) == WOKEN_AGAIN_MS


def test_no_group_begins_behind_what_a_power_cut_may_take(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, "a")
    declare(engine)
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.context.messages, "commit", lambda end=None: None
        )  # its publisher still waits for the sync
        publish(engine, "b")

        engine.admin.declare_group(TOPIC, "latest", GroupConfig(start="latest"))
        engine.admin.seek(TOPIC, GROUP, to_offset=2)

        positions = [engine.admin.group_figures(TOPIC, name)["position"] for name in ("latest", GROUP)]
    assert positions == [1, 1]
    engine.admin.seek(TOPIC, GROUP, to_offset=2)
    assert pull_ids(engine) == []


def test_declaring_again_changes_settings_and_keeps_the_position(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    pull_one(engine)

    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=7, start="latest"))

    engine = open_engine()
    assert engine.admin.group_config(TOPIC, GROUP).max_attempts == 7
    assert pull_ids(engine) == ["b"]


def test_what_a_groups_filter_does_not_take_counts_as_consumed_for_it_alone(engine: Engine) -> None:
    declare(engine)
    engine.publisher.publish(
        [Message(id=f"m{number}", topic=TOPIC, body=b"x", headers={"kind": str(number % 3)}) for number in range(9)]
    )
    group = engine.context.state.group(TOPIC, GROUP)
    assert group is not None
    group.accepts = lambda headers: headers["kind"] == "1"

    assert [one.id for one in pull(engine, max_messages=2)] == ["m1", "m4"]
    assert pull_ids(engine) == ["m7"]
    assert pull_ids(engine) == []
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0
    assert len(engine.puller.pull(TOPIC, "other")) == 9


def test_a_group_that_reads_from_the_disk_keeps_nobody_else_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine, *(f"m{number}" for number in range(5)))
    reading, go_on = threading.Event(), threading.Event()
    read = engine.context.messages.read

    def slow_span(offset: int, size_bytes: int) -> bytes:
        if threading.current_thread().name.startswith("slow"):
            reading.set()
            assert go_on.wait(120)
        return read(offset, size_bytes)

    monkeypatch.setattr(engine.context.messages, "read", slow_span)
    with ThreadPoolExecutor(1, "slow") as pool:
        slow = pool.submit(engine.puller.pull, TOPIC, "slow")
        assert reading.wait(120)

        publish(engine, "more")
        [first, *_] = pull(engine)
        assert engine.settler.ack([first.receipt]) == ["acked"]

        go_on.set()
        assert [one.id for one in slow.result(120)] == [f"m{number}" for number in range(5)]


def test_what_is_settled_or_moved_while_a_pull_reads_it_is_not_handed_out(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine, "a", "b", "c")
    held = pull(engine, invisible_ms=10)
    engine.settler.nack([delivery.receipt for delivery in held], delay_ms=0)
    held = pull(engine)
    engine.settler.nack([held[0].receipt, held[2].receipt], delay_ms=0)
    read, meanwhile = engine.context.messages.read, [lambda: engine.settler.ack([held[1].receipt])]

    def span(offset: int, size_bytes: int) -> bytes:
        while meanwhile:
            assert meanwhile.pop()() == ["acked"]
        return read(offset, size_bytes)

    monkeypatch.setattr(engine.context.messages, "read", span)

    assert pull_ids(engine) == ["a", "c"]
    assert engine.admin.group_figures(TOPIC, GROUP)["in_flight"] == 2


def test_what_is_acknowledged_late_while_a_pull_reads_it_is_not_handed_out_again(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine, "a", "b")
    held = pull(engine, invisible_ms=10)
    clock.advance(20)
    read, meanwhile = engine.context.messages.read, [lambda: engine.settler.ack([held[0].receipt])]

    def span(offset: int, size_bytes: int) -> bytes:
        while meanwhile:
            assert meanwhile.pop()() == ["acked"]
        return read(offset, size_bytes)

    monkeypatch.setattr(engine.context.messages, "read", span)

    assert [*pull_ids(engine), *pull_ids(engine)] == ["b"]
    assert meanwhile == []


def test_receipts_that_follow_each_other_are_settled_as_one_run(engine: Engine) -> None:
    publish(engine, *(f"m{number}" for number in range(100)))
    deliveries = pull(engine)
    before = engine.context.actions.end

    receipts = [one.receipt for one in deliveries]
    assert engine.settler.ack(receipts[10:90]) == ["acked"] * 80
    assert engine.settler.ack(receipts) == ["acked"] * 10 + ["already_acked"] * 80 + ["acked"] * 10

    assert engine.context.actions.end - before < 1_000
    assert engine.admin.group_figures(TOPIC, GROUP)["in_flight"] == 0


def test_five_hundred_consumers_share_a_group_without_a_word_between_them(engine: Engine) -> None:
    publish(engine, *(f"m{number}" for number in range(1_000)))

    with ThreadPoolExecutor(50) as pool:
        taken = list(pool.map(lambda _: pull(engine, max_messages=2, invisible_ms=HOUR_MS), range(500)))

    ids = [one.id for each in taken for one in each]
    assert len(ids) == len(set(ids)) == 1_000
    assert all(len(each) == 2 for each in taken)


def test_a_hundred_groups_store_a_message_once(engine: Engine, folder: Path) -> None:
    publish(engine, *(f"m{number}" for number in range(50)))
    size = size_of(folder, "messages")

    for number in range(100):
        assert len(engine.puller.pull(TOPIC, f"g{number}")) == 50

    assert size_of(folder, "messages") == size


def test_a_seek_by_offset_replays_and_makes_old_receipts_stale(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b", "c")
    old = pull(engine)
    engine.settler.ack([old[0].receipt])

    engine.admin.seek(TOPIC, GROUP, to_offset=1)

    engine = open_engine()
    assert engine.settler.ack([one.receipt for one in old]) == ["stale"] * 3
    new = pull(engine)
    assert [one.id for one in new] == ["b", "c"]
    assert engine.settler.ack([one.receipt for one in old]) == ["stale"] * 3
    assert engine.settler.ack([one.receipt for one in new]) == ["acked"] * 2


def test_a_seek_by_time_goes_to_what_came_then_and_one_ahead_of_all_is_the_end(
    engine: Engine, clock: ManualClock
) -> None:
    publish(engine, "a")
    clock.advance(1_000)
    since_ms = clock.now_ms()
    publish(engine, "b")
    [old_a, old_b] = pull(engine)

    engine.admin.seek(TOPIC, GROUP, to_ms=since_ms)
    assert pull_ids(engine) == ["b"]
    engine.admin.seek(TOPIC, GROUP, to_ms=0)
    assert pull_ids(engine) == ["a", "b"]
    with pytest.raises(InvalidMessage, match="2 is where the next message comes"):
        engine.admin.seek(TOPIC, GROUP, to_offset=3)
    engine.admin.seek(TOPIC, GROUP, to_ms=clock.now_ms() + 10**9)
    assert pull_ids(engine) == []

    assert engine.settler.ack([old_a.receipt, old_b.receipt]) == ["stale", "stale"]
    publish(engine, "c")
    assert pull_ids(engine) == ["c"]


@pytest.mark.parametrize("where", [{}, {"to_ms": 1, "to_offset": 1}, {"to_offset": -1}])
def test_a_seek_to_nowhere_is_refused(engine: Engine, where: dict[str, int]) -> None:
    publish(engine, "a")
    pull_one(engine)

    with pytest.raises(InvalidMessage, match="seek"):
        engine.admin.seek(TOPIC, GROUP, **where)


def test_a_paused_group_gets_nothing_but_may_settle_what_it_holds(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    held = pull_one(engine)
    engine.admin.pause(TOPIC, GROUP, paused=True)

    engine = open_engine()
    assert pull_ids(engine) == []
    assert [one.id for one in engine.puller.pull(TOPIC, "other")] == ["a", "b"]
    assert engine.settler.ack([held.receipt]) == ["acked"]
    engine.admin.pause(TOPIC, GROUP, paused=False)
    assert pull_ids(engine) == ["b"]


def test_dead_letters_are_paged_and_keep_what_they_were(engine: Engine) -> None:
    make_dead(engine, *"abcde")

    pages, cursor = [], None
    for _ in range(3):
        page, cursor = engine.admin.dead(TOPIC, GROUP, limit=2, after=cursor)
        pages.append([one.id for one in page])

    assert pages == [["a", "b"], ["c", "d"], ["e"]]
    assert cursor is None


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_ms", [0, 1, 500, 999])
def test_a_due_message_is_never_a_millisecond_early_and_not_late(
    engine: Engine, clock: ManualClock, part_ms: int
) -> None:
    due_ms = clock.now_ms() + 10_000 + part_ms
    publish(engine, "a", deliver_at_ms=due_ms)

    clock.advance(due_ms - clock.now_ms() - 1)
    assert pull_ids(engine) == []

    clock.advance(1)
    [delivery] = pull(engine)
    assert delivery.deliver_at_ms == due_ms == clock.now_ms()


def test_a_message_due_in_the_past_or_now_is_delivered_at_once(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "past", deliver_at_ms=1)
    publish(engine, "now", deliver_at_ms=clock.now_ms())

    assert pull_ids(engine) == ["past", "now"]


def test_due_messages_come_in_order_of_their_due_times(engine: Engine, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    for delay_ms in (500, 100, 300, 100, 200):
        publish(engine, f"m{delay_ms}-{engine.admin.topic_figures(TOPIC)['scheduled'] if engine.admin.topics() else 0}",
                deliver_at_ms=now_ms + delay_ms)  # fmt: skip

    clock.advance(1_000)

    assert pull_ids(engine) == ["m100-1", "m100-3", "m200-4", "m300-2", "m500-0"]


@pytest.mark.parametrize("step", [timedelta(hours=5), timedelta(hours=-5)], ids=["ahead", "back"])
def test_a_step_of_the_wall_clock_loses_nothing_and_fires_nothing_early_by_the_new_clock(
    open_engine: type_of_open, clock: ManualClock, step: timedelta
) -> None:
    engine = open_engine()
    now_ms = clock.now_ms()
    for hours in (1, 4, 6, 9):
        publish(engine, f"in-{hours}h", deliver_at_ms=now_ms + hours * HOUR_MS)
    step_ms = int(step.total_seconds() * 1000)

    clock.step_wall(step_ms)

    for _ in range(16):
        for delivery in pull(engine):
            assert delivery.deliver_at_ms is not None
            assert clock.now_ms() >= delivery.deliver_at_ms
            assert engine.settler.ack([delivery.receipt]) == ["acked"]
        due = sum(now_ms + hours * HOUR_MS <= clock.now_ms() for hours in (1, 4, 6, 9))
        figures = engine.admin.topic_figures(TOPIC)
        assert (figures["stored"], figures["scheduled"]) == (due, 4 - due)
        clock.advance(HOUR_MS)
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_what_fell_due_before_the_wall_clock_stepped_back_waits_for_the_new_clock(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    due_ms = clock.now_ms() + 1_000
    publish(engine, "due-1", "due-2", deliver_at_ms=due_ms)
    publish(engine, "now")
    clock.advance(1_000)
    engine.publisher.cancel([])  # what is due has taken its place in the topic

    clock.step_wall(-HOUR_MS)

    engine = open_engine()
    publish(engine, "after")
    assert drained(engine) == ["now", "after"]
    engine = open_engine()
    clock.advance(HOUR_MS - 1)
    assert not {"due-1", "due-2"} & set(drained(engine))
    clock.advance(1)
    due = [one for one in pull(engine) if one.id.startswith("due")]
    assert [(one.id, one.attempt) for one in due] == [("due-1", 1), ("due-2", 1)]
    assert engine.settler.ack([one.receipt for one in due]) == ["acked", "acked"]


def test_what_fell_due_while_the_broker_was_down_is_delivered_at_once_and_once(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    now_ms = clock.now_ms()
    publish(engine, "later", deliver_at_ms=now_ms + 2 * HOUR_MS)
    publish(engine, "soon", deliver_at_ms=now_ms + HOUR_MS)
    publish(engine, "far", deliver_at_ms=now_ms + 400 * 24 * HOUR_MS)
    engine.close()
    clock.advance(3 * HOUR_MS)

    engine = open_engine()

    assert pull_ids(engine) == ["soon", "later"]
    engine = open_engine()
    assert pull_ids(engine) == []
    assert {"stored": 2, "scheduled": 1}.items() <= engine.admin.topic_figures(TOPIC).items()


def test_an_expiry_that_is_put_off_by_a_step_backwards_is_one_in_the_history(
    engine: Engine, clock: ManualClock
) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    publish(engine, "m", deliver_at_ms=clock.now_ms() + 1)
    clock.advance(1)
    [first] = pull(engine)
    clock.step_wall(-3_600_000)
    engine.settler.extend([first.receipt], invisible_ms=1_000, begun=True)
    clock.advance(1_000)
    assert pull(engine) == [], "it is early by the clock that stepped back"

    clock.advance(3_600_000)
    [second] = pull(engine)
    engine.settler.nack([second.receipt], reason="boom")

    [letter], _ = engine.admin.dead(TOPIC, GROUP)
    assert letter.history == (("invisible time ran out", 1), ("boom", 1))


def test_a_delay_of_731_days_by_a_clock_an_hour_ahead_is_kept_over_a_restart_and_a_longer_one_rejected(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    longest_ms = clock.now_ms() + DELAY_MAX_MS + CLOCK_DIFFERENCE_MS_MAX

    assert publish(engine, "longest", deliver_at_ms=longest_ms) == ["stored"]
    [refused] = engine.publisher.publish([message("beyond", deliver_at_ms=longest_ms + 1)])

    assert (refused.status, refused.error) == ("rejected", "a delay may be at most 731 days")
    engine = open_engine()
    clock.advance(DELAY_MAX_MS + CLOCK_DIFFERENCE_MS_MAX - 1)
    assert pull_ids(engine) == []
    clock.advance(1)
    assert pull_ids(engine) == ["longest"]


def test_more_due_messages_than_one_batch_fire_in_order(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(fire_batch_max=10)
    now_ms = clock.now_ms()
    engine.publisher.publish([message(f"m{number:03}", deliver_at_ms=now_ms + 1_000 - number) for number in range(105)])
    clock.advance(HOUR_MS)

    ids = drained(engine)

    assert ids == [f"m{number:03}" for number in reversed(range(105))]


def test_the_schedule_is_counted_and_found(engine: Engine, clock: ManualClock) -> None:
    day_ms = 24 * HOUR_MS
    start_ms = clock.now_ms() // day_ms * day_ms + day_ms
    publish(engine, "a", "b", deliver_at_ms=start_ms + 1)
    publish(engine, "c", deliver_at_ms=start_ms + day_ms)

    assert engine.publisher.scheduled(TOPIC, bucket="day") == [(start_ms, 2), (start_ms + day_ms, 1)]
    assert engine.publisher.scheduled(from_ms=start_ms + 2) == [(start_ms + day_ms, 1)]
    assert engine.publisher.scheduled("another") == []
    assert engine.publisher.scheduled_message("c") == {"id": "c", "topic": TOPIC, "deliver_at_ms": start_ms + day_ms}
    assert engine.publisher.scheduled_message("nobody") is None


# -- cancel --------------------------------------------------------------------------------------------------------


def test_a_canceled_message_is_never_delivered_whatever_restarts(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    publish(engine, "gone", "kept", deliver_at_ms=clock.now_ms() + 1_000)

    assert engine.publisher.cancel(["gone", "gone"]) == ["canceled", "canceled"]
    engine = open_engine()
    assert engine.publisher.cancel(["gone"]) == ["canceled"]
    assert publish(engine, "gone") == ["duplicate"]

    clock.advance(1_000)
    assert pull_ids(engine) == ["kept"]
    engine = open_engine()
    assert engine.publisher.cancel(["gone", "kept"]) == ["canceled", "too_late"]
    assert engine.admin.topic_figures(TOPIC)["scheduled"] == 0


def test_a_cancel_of_what_is_due_or_was_never_scheduled_is_too_late(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "now")
    publish(engine, "due", deliver_at_ms=clock.now_ms() + 10)
    clock.advance(10)

    assert engine.publisher.cancel(["now", "due"]) == ["too_late", "too_late"]

    assert sorted(pull_ids(engine)) == ["due", "now"]


def test_a_cancel_that_came_before_its_publish_wins(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    assert engine.publisher.cancel(["now", "later"]) == ["unknown", "unknown"]
    engine = open_engine()

    publish(engine, "now", "other")
    publish(engine, "later", deliver_at_ms=clock.now_ms() + 1_000)

    assert engine.publisher.cancel(["now", "later"]) == ["canceled", "canceled"]
    engine = open_engine()
    clock.advance(2_000)
    assert pull_ids(engine) == ["other"]


def test_a_cancel_is_idempotent_however_long_ago_its_message_came(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(dedup_messages_max=2)
    publish(engine, "later", deliver_at_ms=clock.now_ms() + 1_000)
    publish(engine, "a", "b", "c")

    assert engine.publisher.cancel(["later"]) == ["canceled"]
    assert engine.publisher.cancel(["later"]) == ["canceled"]
    engine = open_engine(dedup_messages_max=2)
    assert engine.publisher.cancel(["later"]) == ["canceled"]


def test_a_cancel_that_is_no_longer_remembered_is_not_applied_to_a_later_message_of_the_same_id(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(cancel_tombstones_max=2)
    engine.publisher.cancel(["again"])
    engine.publisher.cancel(["x", "y"])
    assert publish(engine, "again", deliver_at_ms=clock.now_ms() + 1_000) == ["stored"]

    engine = open_engine(cancel_tombstones_max=2)

    assert engine.admin.topic_figures(TOPIC)["scheduled"] == 1
    clock.advance(1_000)
    assert pull_ids(engine) == ["again"]


def test_a_delivery_number_is_never_given_again_though_a_power_cut_took_the_hand_out_away(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine()
    publish(engine, "a")
    size = size_of(folder, "actions")
    before = pull_one(engine)
    engine.close()
    restore(folder, "actions", None, size)

    engine = open_engine()
    after = pull_one(engine)

    assert after.id == before.id
    assert engine.settler.ack([before.receipt, after.receipt]) == ["stale", "acked"]


def test_a_page_of_hand_outs_that_a_power_cut_took_away_leaves_the_others(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, "a", "b", "c")
    start = size_of(folder, "actions")
    pull_one(engine)
    end = size_of(folder, "actions")
    [held_b] = engine.puller.pull(TOPIC, GROUP, max_messages=1, invisible_ms=HOUR_MS)
    engine.close()
    segment = only_segment(folder, "actions")
    data = segment.read_bytes()
    segment.write_bytes(data[:start] + bytes(end - start) + data[end:])

    engine = open_engine()

    assert engine.settler.ack([held_b.receipt]) == ["acked"]
    clock.advance(HOUR_MS)
    engine.admin.seek(TOPIC, GROUP, to_offset=0)
    assert pull_ids(engine) == ["a", "b", "c"]


# -- waiting -------------------------------------------------------------------------------------------------------


class WatchedClock(ManualClock):
    """Sets `pulling` when a consumer waits, and notes for how long the timer means to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.pulling = threading.Event()
        self.timer_waits = threading.Event()
        self.timer_waits_ms: list[int | None] = []

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        if threading.current_thread().name == "broker-timer":
            self.timer_waits_ms.append(timeout_ms)
            self.timer_waits.set()
        elif threading.current_thread().name != "broker-keeper":
            self.pulling.set()
        return super().wait(condition, timeout_ms)


@pytest.fixture
def clock() -> WatchedClock:
    """A clock that tells when a consumer waits."""
    return WatchedClock()


class Consumer:
    """A consumer that waits in another thread."""

    def __init__(self, pool: ThreadPoolExecutor, engine: Engine, clock: WatchedClock) -> None:
        self._clock = clock
        self._pull = pool.submit(engine.puller.pull, TOPIC, GROUP, wait_ms=WAIT_MS)
        assert clock.pulling.wait(120)

    def got(self, *, passing_ms: int = 0) -> list[str]:
        """What it was woken with, while `passing_ms` passes again and again."""
        for _ in range(1_200):
            self._clock.advance(passing_ms)
            try:
                return [one.id for one in self._pull.result(0.1)]
            except TimeoutError:
                continue
        raise TimeoutError("the consumer was not woken")


@pytest.fixture
def consume(engine: Engine, clock: WatchedClock) -> Callable[[], Consumer]:
    """Start a consumer, and return once it waits. Its thread ends with the test, or with the engine."""
    pool = ThreadPoolExecutor(1)
    return lambda: Consumer(pool, engine, clock)


def test_a_long_poll_wakes_on_a_publish(engine: Engine, consume: Callable[[], Consumer]) -> None:
    consumer = consume()

    publish(engine, "a")

    assert consumer.got() == ["a"]


def test_a_long_poll_wakes_when_a_message_falls_due(
    engine: Engine, consume: Callable[[], Consumer], clock: WatchedClock
) -> None:
    publish(engine, "a", deliver_at_ms=clock.now_ms() + 5_000)
    consumer = consume()

    assert consumer.got(passing_ms=1_000) == ["a"]


def test_a_long_poll_wakes_when_the_wall_clock_steps_over_a_due_time(
    engine: Engine, consume: Callable[[], Consumer], clock: WatchedClock
) -> None:
    publish(engine, "a", deliver_at_ms=clock.now_ms() + 5 * HOUR_MS)
    consumer = consume()

    clock.step_wall(5 * HOUR_MS)

    assert consumer.got(passing_ms=1_000) == ["a"]


def test_a_long_poll_wakes_when_an_invisible_time_runs_out(engine: Engine, consume: Callable[[], Consumer]) -> None:
    publish(engine, "a")
    pull_one(engine, invisible_ms=5_000)
    consumer = consume()

    assert consumer.got(passing_ms=1_000) == ["a"]


def test_a_long_poll_wakes_on_a_nack(engine: Engine, consume: Callable[[], Consumer]) -> None:
    publish(engine, "a")
    delivery = pull_one(engine, invisible_ms=HOUR_MS)
    consumer = consume()

    engine.settler.nack([delivery.receipt], delay_ms=0)

    assert consumer.got(passing_ms=1) == ["a"]


def test_a_long_poll_wakes_on_a_redrive(engine: Engine, consume: Callable[[], Consumer]) -> None:
    make_dead(engine, "a")
    consumer = consume()

    engine.dead_letters.redrive(TOPIC, GROUP)

    assert consumer.got() == ["a"]


def test_a_long_poll_wakes_on_a_seek(engine: Engine, consume: Callable[[], Consumer]) -> None:
    publish(engine, "a")
    engine.settler.ack([pull_one(engine).receipt])
    consumer = consume()

    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert consumer.got() == ["a"]


def test_a_long_poll_wakes_on_a_resume(engine: Engine, consume: Callable[[], Consumer]) -> None:
    publish(engine, "a")
    pull_one(engine)
    engine.admin.pause(TOPIC, GROUP, paused=True)
    publish(engine, "b")
    consumer = consume()

    engine.admin.pause(TOPIC, GROUP, paused=False)

    assert consumer.got() == ["b"]


def test_a_long_poll_ends_with_nothing_when_its_time_is_over(engine: Engine, consume: Callable[[], Consumer]) -> None:
    consumer = consume()

    assert consumer.got(passing_ms=WAIT_MS) == []


def test_a_long_poll_ends_when_the_engine_closes(engine: Engine, consume: Callable[[], Consumer]) -> None:
    consumer = consume()

    engine.close()

    with pytest.raises(StorageFailed, match="closed"):
        consumer.got()


def test_a_consumer_that_waits_does_not_make_the_timer_spin_for_a_paused_group(
    engine: Engine, consume: Callable[[], Consumer], clock: WatchedClock
) -> None:
    publish(engine, "a")
    pull_one(engine, invisible_ms=1_000)
    engine.admin.pause(TOPIC, GROUP, paused=True)
    consumer = consume()
    clock.advance(1_000)
    clock.timer_waits_ms.clear()

    for _ in range(300):
        if len(clock.timer_waits_ms) >= 3:
            break
        clock.timer_waits.clear()
        clock.advance(100)
        clock.timer_waits.wait(0.1)
    waits_ms = list(clock.timer_waits_ms)
    engine.admin.pause(TOPIC, GROUP, paused=False)

    assert consumer.got() == ["a"]
    assert set(waits_ms) == {1_000}


def test_a_disk_that_takes_nothing_does_not_make_the_timer_spin(open_engine: type_of_open, clock: WatchedClock) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage, clock_slice_ms=700)
    publish(engine, "a", deliver_at_ms=clock.now_ms() + 1_000)
    failed = threading.Event()
    storage.fail("write", errno.ENOSPC)
    fails = storage.before

    def before(call: str) -> None:
        if call == "write" and threading.current_thread().name == "broker-timer":
            failed.set()
        fails(call)

    storage.before = before
    for _ in range(1_200):
        clock.advance(700)
        if failed.wait(0.1):
            break
    assert failed.is_set()
    with pytest.raises(StorageFailed):
        engine.publisher.cancel(["b"])  # takes the engine's lock, so the timer waits by now

    assert 1 not in clock.timer_waits_ms
    storage.mend()
    assert pull_ids(engine) == ["a"]


def test_a_subscriber_is_told_until_it_unsubscribes(engine: Engine) -> None:
    told: Counter[str] = Counter()
    undo = engine.wakeups.subscribe(TOPIC, GROUP, lambda: told.update(["mine"]))
    engine.wakeups.subscribe(TOPIC, "other", lambda: told.update(["other's"]))
    publish(engine, "a")
    assert told["mine"] >= 1
    assert told["other's"] >= 1
    before = told["mine"]

    undo()
    undo()
    publish(engine, "b")

    assert told["mine"] == before


def test_many_consumers_get_each_message_once(engine: Engine) -> None:
    ids = [f"m{number}" for number in range(500)]
    stop = threading.Event()
    got: list[Future[list[str]]] = []

    def consume_all() -> list[str]:
        mine: list[str] = []
        while len(mine) < len(ids):
            deliveries = engine.puller.pull(TOPIC, GROUP, max_messages=7, invisible_ms=HOUR_MS)
            if not deliveries and stop.is_set():
                return mine
            mine += [one.id for one in deliveries]
            assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)
        return mine

    with ThreadPoolExecutor(6) as pool:
        got = [pool.submit(consume_all) for _ in range(3)]
        publishing = [pool.submit(publish, engine, *ids[start : start + 100]) for start in range(0, 500, 100)]
        for one in publishing:
            one.result(120)
        stop.set()
        taken = [one for each in got for one in each.result(120)]

    assert sorted(taken) == sorted(ids)


# -- on the disk ---------------------------------------------------------------------------------------------------


def only_segment(folder: Path, log: str) -> Path:
    [segment] = segments_of(folder, log)
    return segment


def size_of(folder: Path, log: str) -> int:
    """How long the only segment of a log is."""
    return only_segment(folder, log).stat().st_size


def restore(folder: Path, log: str, content: bytes | None, size: int) -> None:
    """Put a log's only segment back to what it was: these bytes, or its own first `size`."""
    segment = only_segment(folder, log)
    segment.write_bytes((content or segment.read_bytes())[:size])
    segment.with_suffix(".proven").unlink(missing_ok=True)  # its owner was killed


def damage(folder: Path, needle: bytes) -> None:
    """Flip a bit of a record that is on the disk already."""
    flip(folder, needle, bytes([needle[0] ^ 1]) + needle[1:])


def flip(folder: Path, old: bytes, new: bytes) -> None:
    """Put other bytes in the place of the first that are these, in the file as it stands."""
    [segment] = message_segments(folder)
    position = segment.read_bytes().index(old)
    with segment.open("r+b") as file:
        file.seek(position)
        file.write(new)


@pytest.mark.parametrize("failing", range(2))
def test_a_folder_is_free_again_where_an_open_gets_no_more_threads(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if len(started) == failing:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_some)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Engine.open(folder, clock=clock)

    assert [thread.name for thread in started if thread.is_alive()] == []
    Engine.open(folder, clock=clock).close()


def test_a_batch_that_no_block_of_the_log_can_hold_is_refused_with_its_limit(engine: Engine) -> None:
    batch = [Message(id=f"m{number}", topic=TOPIC, body=b"") for number in range(65_536)]

    with pytest.raises(InvalidMessage, match="at most 65,535 messages, not 65,536; publish it in several"):
        engine.publisher.publish(batch)

    assert len(engine.publisher.publish(batch[1:])) == 65_535
