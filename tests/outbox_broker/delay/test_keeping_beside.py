"""While buckets are re-filed and the id index is merged, the schedule is used as ever. Not what is re-filed when."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.levels import BucketId
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    NOW_MS,
    Opened,
    drain,
    existing,
    flush,
    put,
    recorded,
    settle,
    timed,
)

WAIT_SECONDS = 120


class Beside(DiskStorage):
    """At each sync of a segment with this prefix, something is done in another thread, and waited for."""

    def __init__(self, prefix: str, do: Callable[[], None]) -> None:
        self.done = 0
        self._prefix = prefix
        self._do = do

    def sync(self, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith(self._prefix):
            done = Future[None]()
            Thread(target=lambda: done.set_result(self._do()), daemon=True).start()
            done.result(WAIT_SECONDS)  # TimeoutError where it waits for what waits for it
            self.done += 1
        super().sync(descriptor)


def with_a_bucket_to_refile(opened: Opened) -> tuple[BucketId, list[str]]:
    """A week's bucket of 40 messages, in two runs."""
    schedule = opened.open()
    ids = [f"m{number:02d}" for number in range(40)]
    for some in (ids[::2], ids[1::2]):
        put(schedule, NOW_MS, *(timed(one, NOW_MS + 30 * DAY_MS + int(one[1:])) for one in some))
        flush(schedule, NOW_MS)
    settle(schedule, NOW_MS)
    [bucket_id] = recorded(opened).buckets
    return bucket_id, ids


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_what_is_canceled_while_it_is_refiled_is_never_delivered_and_all_else_is_once(
    opened: Opened, *, is_restarted: bool
) -> None:
    bucket_id, ids = with_a_bucket_to_refile(opened)
    opened.drop()
    now_ms = bucket_id.expand_at_ms
    said: list[str] = []

    def use() -> None:
        schedule = existing(opened)
        if not said:
            said.extend(schedule.cancel(["m03", "m10", "nobody"], now_ms=now_ms))
            put(schedule, now_ms, timed("soon", now_ms + 1), timed("late", NOW_MS + 31 * DAY_MS))
            assert drain(schedule, now_ms + 1) == ["soon"]
            found = schedule.queries.find("m04")
            assert found is not None
            assert found.due_ms == NOW_MS + 30 * DAY_MS + 4

    schedule = opened.open(storage=Beside("l1d-", use))
    settle(schedule, now_ms)
    if is_restarted:
        schedule = opened.open()

    assert said == ["canceled", "canceled", "unknown"]
    assert bucket_id not in recorded(opened).buckets
    assert schedule.queries.count() == 39
    left = [one for one in ids if one not in {"m03", "m10"}]
    assert drain(schedule, NOW_MS + 40 * DAY_MS) == [*left, "late"]
    assert schedule.cancel(["m03", "m04"], now_ms=now_ms) == ["canceled", "too_late"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_bucket_whose_time_begins_while_it_is_refiled_fires_from_where_it_is_and_nothing_twice(
    opened: Opened, *, is_restarted: bool
) -> None:
    bucket_id, ids = with_a_bucket_to_refile(opened)
    opened.drop()
    came: list[str] = []

    def fire() -> None:
        if not came:
            came.extend(drain(existing(opened), NOW_MS + 30 * DAY_MS + 9))

    schedule = opened.open(storage=Beside("l1d-", fire))
    settle(schedule, bucket_id.expand_at_ms)
    if is_restarted:
        schedule = opened.open()

    assert came == ids[:10]
    assert drain(schedule, NOW_MS + 40 * DAY_MS) == ids[10:]
    settle(schedule, NOW_MS + 40 * DAY_MS)
    assert schedule.queries.figures()["buckets"] == 0


def test_a_run_that_is_found_damaged_while_its_bucket_is_refiled_loses_one_message_and_the_rest_fires_once(
    opened: Opened,
) -> None:
    bucket_id, ids = with_a_bucket_to_refile(opened)
    opened.drop()
    damaged: list[Path] = []

    def damage() -> None:
        if not damaged:
            [path] = opened.folder.glob("l1w-*")
            data = bytearray(path.read_bytes())
            data[data.index(b"payload of m07")] ^= 1
            path.write_bytes(data)
            damaged.append(path)
            came.extend(drain(existing(opened), NOW_MS + 30 * DAY_MS + 20))

    came: list[str] = []
    schedule = opened.open(storage=Beside("l1d-", damage))
    settle(schedule, bucket_id.expand_at_ms)

    came += drain(schedule, NOW_MS + 40 * DAY_MS)
    assert sorted(came) == sorted(one for one in ids if one != "m07")
    assert schedule.queries.figures()["quarantined_messages"] == 1


def test_while_the_id_index_is_merged_messages_are_taken_canceled_and_delivered(opened: Opened) -> None:
    schedule = opened.open()
    for number in range(5):
        put(schedule, NOW_MS, timed(f"m{number}", NOW_MS + DAY_MS + number))
        flush(schedule, NOW_MS)
    said: list[str] = []

    def use() -> None:
        said.extend(existing(opened).cancel(["m0", "m4", "nobody"], now_ms=NOW_MS))
        put(existing(opened), NOW_MS, timed("soon", NOW_MS + 1))
        assert drain(existing(opened), NOW_MS + 1) == ["soon"]

    storage = Beside("ids-", use)
    schedule = opened.open(storage=storage, index_merged_pieces_max=4, index_pieces_max=4)
    settle(schedule, NOW_MS)

    assert storage.done == 1
    assert said == ["canceled", "canceled", "unknown"]
    assert schedule.queries.figures()["id_index_pieces"] == 2
    assert schedule.cancel(["m1"], now_ms=NOW_MS) == ["canceled"]
    assert drain(schedule, NOW_MS + 2 * DAY_MS) == ["m2", "m3"]


def test_publishes_go_on_while_a_full_memory_is_flushed_and_wait_for_a_flush_at_twice_as_much(opened: Opened) -> None:
    clock = ManualClock(NOW_MS)
    accepted: list[str] = []

    def publish(*names: str) -> None:
        batch = [Message(id=name, topic="t", body=b"", deliver_at_ms=NOW_MS + DAY_MS) for name in names]
        accepted.extend(result.status for result in proxy.publish(batch))

    def publish_during_the_first_flush() -> None:
        if storage.done == 0:
            publish("during")

    storage = Beside("l1h-", publish_during_the_first_flush)
    target = EmbeddedBroker(f"embedded:{opened.folder.parent / 'target'}", clock=clock)
    proxy = opened.front(target, clock=clock, storage=storage, memory_messages_max=4)

    publish("a", "b", "c", "d", "e")
    publish("full")
    assert storage.done == 0, "a publish waited for a flush"
    assert proxy.service.keep() == 0
    assert storage.done == 1
    publish("f", "g", "h", "i", "j", "k", "l")
    assert storage.done == 1
    publish("late")
    assert storage.done == 2
    target.close()

    assert accepted == ["stored"] * 15
    assert proxy.log_figures()["scheduled"] == 15
