"""The id index over merges: what is known after a restart, and what a damaged piece costs. Not its format."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest

from outbox_broker.schedule.delay_store import DelayStore
from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, Opened, flush, put, recorded, rewrite, settle, timed

FLUSH_MESSAGES = 10
DEDUP_MESSAGES = 20


@pytest.fixture(autouse=True)
def few_pieces(opened: Opened) -> None:
    """Merges come early."""
    opened.defaults = {"index_pieces_max": 8, "index_merged_pieces_max": 6}


def ids_of(number: int, *, count: int = FLUSH_MESSAGES) -> list[str]:
    return [f"m{number}-{at}" for at in range(count)]


def put_flush(schedule: DelayStore, number: int, *, count: int = FLUSH_MESSAGES) -> None:
    put(schedule, NOW_MS, *(timed(one, NOW_MS + DAY_MS) for one in ids_of(number, count=count)))
    flush(schedule, NOW_MS)


def resend(schedule: DelayStore, ids: list[str]) -> set[str]:
    return set(map(str, schedule.schedule([timed(one, NOW_MS + DAY_MS) for one in ids], now_ms=NOW_MS)))


def counts(opened: Opened) -> list[int]:
    """Ids in each piece, oldest first, as a restart would find them."""
    return [one.count for one in recorded(opened).index]


def test_after_a_merge_and_a_restart_the_newest_ids_are_known_to_be_repeats(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=DEDUP_MESSAGES)
    for number in range(9):
        put_flush(schedule, number)
    settle(schedule, NOW_MS)
    assert schedule.queries.figures()["id_index_pieces"] == 4
    flush(schedule, NOW_MS)  # from here on the merge counts

    schedule = opened.open()

    assert counts(opened) == [60, 10, 10, 10]
    assert resend(schedule, ids_of(8) + ids_of(7)) == {"duplicate"}
    assert resend(schedule, ids_of(0)) == {"stored"}, "long ago"
    assert schedule.cancel([ids_of(3)[0], ids_of(8)[0]], now_ms=NOW_MS) == ["canceled", "canceled"]


def test_a_piece_of_which_only_some_ids_are_among_the_newest_stays_apart_too(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=25)
    for number, count in enumerate([10, 10, 10, 10, 10, 10, 7, 10, 10]):
        put_flush(schedule, number, count=count)
    settle(schedule, NOW_MS)
    flush(schedule, NOW_MS)

    schedule = opened.open()

    assert counts(opened) == [60, 7, 10, 10]
    assert resend(schedule, ids_of(6, count=7) + ids_of(7) + ids_of(8)) == {"duplicate"}


def test_any_sizes_of_flushes_leave_the_newest_ids_known_after_a_restart_in_few_pieces(opened: Opened) -> None:
    seed = 20_261_121
    print(f"seed {seed}")
    random = Random(seed)
    schedule = opened.open(dedup_messages=100)
    came: list[str] = []

    for number in range(120):
        count = random.choice([1, 2, 5, 30, 90]) if number < 60 else 1
        put_flush(schedule, number, count=count)
        came += ids_of(number, count=count)
        settle(schedule, NOW_MS)
        assert schedule.queries.figures()["id_index_pieces"] <= 8
        if number % 10 == 9:
            flush(schedule, NOW_MS)
            schedule = opened.open()
            assert resend(schedule, came[-100:]) == {"duplicate"}, number
            assert sum(schedule.recent.may_know([one], ["t"]) for one in came) <= 5 * 100


def test_a_piece_that_grew_large_and_was_put_last_hides_no_newer_one(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=DEDUP_MESSAGES)
    put_flush(schedule, 0, count=100)
    for number in (1, 2):
        put_flush(schedule, number)
    state = recorded(opened)
    state.index.append(state.index.pop(0))  # as the version before did
    rewrite(opened, state)

    schedule = opened.open()

    assert counts(opened) == [10, 10, 100]
    assert resend(schedule, ids_of(1) + ids_of(2)) == {"duplicate"}


def test_the_checkpoint_before_a_damaged_one_finds_all_the_pieces_that_it_names(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = opened.open(dedup_messages=DEDUP_MESSAGES)
    for number in range(9):
        put_flush(schedule, number)
    settle(schedule, NOW_MS)
    flush(schedule, NOW_MS)  # from here on the merge counts
    schedule = opened.open()
    settle(schedule, NOW_MS)
    opened.drop()
    newest = max(opened.folder.glob("log-*.segment"))
    data = bytearray(newest.read_bytes())
    data[200] ^= 1
    newest.write_bytes(data)
    caplog.set_level(logging.WARNING)

    schedule = opened.open()
    settle(schedule, NOW_MS)

    said = [event_name(one) for one in caplog.records]
    assert "block_damaged" in said
    assert "id_index_damaged" not in said
    ids = [one for number in range(9) for one in ids_of(number)]
    assert resend(schedule, ids_of(8) + ids_of(7)) == {"duplicate"}
    assert schedule.cancel(ids, now_ms=NOW_MS) == ["canceled"] * 90
    for _ in range(2):
        flush(schedule, NOW_MS)
        settle(schedule, NOW_MS)
    assert len(list(opened.folder.glob("ids-*.segment"))) == schedule.queries.figures()["id_index_pieces"]


@pytest.mark.parametrize("place", ["block", "fences", "header", "all"])
def test_a_damaged_piece_is_told_once_and_made_anew_of_what_stands_in_buckets(
    opened: Opened, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    schedule = opened.open(dedup_messages=DEDUP_MESSAGES)
    for number in range(10):
        put_flush(schedule, number)
    opened.drop()
    path = opened.folder / "ids-000000000003.segment"
    damage(path, place)
    caplog.set_level(logging.WARNING)

    schedule = opened.open()
    settle(schedule, NOW_MS)

    said = [event_name(one) for one in caplog.records]
    assert said.count("id_index_damaged") == said.count("id_index_rebuilt") == (place != "header")
    assert said.count("segment_head_damaged") == (place in {"header", "all"})
    ids = [one for number in range(10) for one in ids_of(number)]
    assert all(schedule.queries.find(one) for one in ids)
    assert schedule.cancel(ids[20:40], now_ms=NOW_MS) == ["canceled"] * 20
    for _ in range(2):  # the checkpoint before the newest names it
        flush(schedule, NOW_MS)
        settle(schedule, NOW_MS)
    assert path.exists() is False
    caplog.clear()
    schedule = opened.open()
    settle(schedule, NOW_MS)
    assert [one for one in ids if schedule.queries.find(one)] == ids[:20] + ids[40:]
    assert schedule.queries.count() == 80
    assert not caplog.records


def test_while_a_piece_is_damaged_a_cancel_is_refused_rather_than_answered_wrongly(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=1)
    put_flush(schedule, 1)
    put_flush(schedule, 2)
    opened.drop()
    damage(opened.folder / "ids-000000000001.segment", "block")
    schedule = opened.open()
    [wanted, other] = [ids_of(number)[0] for number in (1, 2)]

    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"ids-000000000001.*try again"):
            schedule.cancel([wanted], now_ms=NOW_MS)
    put(schedule, NOW_MS, timed("in-memory", NOW_MS + DAY_MS))
    with pytest.raises(StorageFailed, match=r"ids-000000000001.*try again"):  # a bucket may have its first copy
        schedule.cancel(["in-memory"], now_ms=NOW_MS)
    settle(schedule, NOW_MS)

    found = schedule.cancel([wanted, other, "in-memory", "unborn"], now_ms=NOW_MS)
    assert found == ["canceled", "canceled", "canceled", "unknown"]


def test_ids_whose_newest_piece_is_damaged_are_known_to_be_repeats_while_they_wait(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=DEDUP_MESSAGES)
    for number in range(4):
        put_flush(schedule, number)
    opened.drop()
    damage(opened.folder / "ids-000000000004.segment", "block")

    schedule = opened.open()

    assert resend(schedule, ids_of(3)) == {"duplicate"}


def damage(path: Path, place: str) -> None:
    """Flip a bit of a piece of the id index, or all of them."""
    data = bytearray(path.read_bytes())
    places = {"block": [40 + 44 + 16 + 5], "fences": [-3], "header": [9], "all": range(len(data))}[place]
    for at in places:
        data[at] ^= 1
    path.write_bytes(data)
