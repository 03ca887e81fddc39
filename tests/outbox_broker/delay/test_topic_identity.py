"""One id on several topics: each is a message of its own to the schedule, wherever it stands, and across restarts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.recent_cancels import CANCEL_MEMORY_MS, CANCEL_RENEWED_MS, Cancel, RememberedCancels
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    HOUR_MS,
    NOW_MS,
    SECOND_MS,
    Opened,
    flush,
    ids_of_one_hash,
    put,
    settle,
    timed,
)

LIM, VIC = ("lim.*",), ("vic.*",)
NUMBERS = itertools.count()
Step = Callable[[Opened, DelayStore], DelayStore]


def stay(_opened: Opened, schedule: DelayStore) -> DelayStore:
    return schedule


def flushed(_opened: Opened, schedule: DelayStore) -> DelayStore:
    flush(schedule, NOW_MS)
    return schedule


def killed(opened: Opened, schedule: DelayStore) -> DelayStore:
    flush(schedule, NOW_MS)
    return opened.open()


def killed_unflushed(opened: Opened, _schedule: DelayStore) -> DelayStore:
    return opened.open()


def merged(opened: Opened, schedule: DelayStore) -> DelayStore:
    flush(schedule, NOW_MS)
    for _ in range(5):
        put(schedule, NOW_MS, timed(f"other-{next(NUMBERS)}", NOW_MS + DAY_MS, topic="others"))
        flush(schedule, NOW_MS)
    settle(schedule, NOW_MS)
    flush(schedule, NOW_MS)
    return opened.open()


def mended(opened: Opened, schedule: DelayStore) -> DelayStore:
    flush(schedule, NOW_MS)
    opened.drop()
    (piece,) = opened.folder.glob("ids-*.segment")
    data = bytearray(piece.read_bytes())
    data[24 + 16 + 5] ^= 1
    piece.write_bytes(data)
    schedule = opened.open()
    settle(schedule, NOW_MS)
    return schedule


STEPS = [stay, flushed, killed, killed_unflushed, merged, mended]


@pytest.fixture(autouse=True)
def few_pieces(opened: Opened) -> None:
    """Merges come early."""
    opened.defaults = {"index_pieces_max": 3, "index_merged_pieces_max": 2}


@pytest.fixture
def schedule(opened: Opened) -> DelayStore:
    return opened.open(dedup_messages=1_000)


def said(schedule: DelayStore, topic: str, *, message_id: str = "same", due_ms: int = NOW_MS + HOUR_MS) -> str:
    return str(schedule.schedule([timed(message_id, due_ms, topic=topic)], now_ms=NOW_MS)[0])


def fired(schedule: DelayStore, now_ms: int) -> list[tuple[str, str]]:
    places: list[tuple[str, str]] = []
    while (batch := schedule.due(now_ms)) is not None:
        places += [(one.topic, one.id) for one in batch.messages]
        schedule.fired(batch.number)
    return places


@pytest.mark.parametrize("step", STEPS)
def test_the_same_id_on_two_topics_is_two_messages_and_a_repeat_on_either_is_one(
    opened: Opened, schedule: DelayStore, step: Step
) -> None:
    assert [said(schedule, topic) for topic in ("lim.a", "vic.a")] == ["stored", "stored"]

    schedule = step(opened, schedule)

    assert [said(schedule, topic) for topic in ("lim.a", "vic.a")] == ["duplicate", "duplicate"]
    assert said(schedule, "vic.b") == "stored"
    assert sorted(one for one in fired(schedule, NOW_MS + HOUR_MS) if one[1] == "same") == [
        ("lim.a", "same"), ("vic.a", "same"), ("vic.b", "same"),
    ]  # fmt: skip


def test_ids_of_two_topics_in_many_blocks_are_each_known_on_their_own_topic_after_a_restart(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=1_000)
    topics = {f"m{number}": "lim.a" if number % 3 else "vic.a" for number in range(300)}
    one_topic = {f"n{number}": "vic.a" for number in range(300)}
    for some in (topics, one_topic):
        put(schedule, NOW_MS, *(timed(one, NOW_MS + HOUR_MS, topic=topic) for one, topic in some.items()))
        flush(schedule, NOW_MS)

    schedule = opened.open()

    known = topics | one_topic
    assert {said(schedule, topic, message_id=one) for one, topic in known.items()} == {"duplicate"}
    others = {one: "lim.a" if topic == "vic.a" else "vic.a" for one, topic in known.items()}
    assert {said(schedule, topic, message_id=one) for one, topic in others.items()} == {"stored"}


def test_one_batch_may_have_an_id_on_several_topics_and_on_one_of_them_twice(schedule: DelayStore) -> None:
    batch = [timed("same", NOW_MS + HOUR_MS, topic=topic) for topic in ("lim.a", "vic.a", "lim.a")]

    assert schedule.schedule(batch, now_ms=NOW_MS) == ["stored", "stored", "duplicate"]
    assert schedule.queries.topics() == {"lim.a": 1, "vic.a": 1}


@pytest.mark.parametrize("step", STEPS)
def test_a_cancel_stops_what_is_in_its_scope_and_nothing_else(opened: Opened, schedule: DelayStore, step: Step) -> None:
    for topic in ("lim.a", "lim.b", "vic.a"):
        assert said(schedule, topic) == "stored"
    schedule = step(opened, schedule)

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("other.*",)) == ["unknown"]
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=LIM) == ["canceled"]
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=LIM) == ["canceled"]

    schedule = step(opened, schedule) if step is not mended else schedule
    assert [said(schedule, topic) for topic in ("lim.a", "lim.b", "vic.a")] == ["duplicate"] * 3
    assert [one for one in fired(schedule, NOW_MS + HOUR_MS) if one[1] == "same"] == [("vic.a", "same")]


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_cancel_of_all_topics_stops_one_in_memory_and_one_in_a_bucket_alike(
    opened: Opened, schedule: DelayStore, step: Step
) -> None:
    assert said(schedule, "lim.a") == "stored"
    schedule = step(opened, schedule)
    assert said(schedule, "vic.a") == "stored"

    assert schedule.cancel(["same"], now_ms=NOW_MS) == ["canceled"]

    assert [one for one in fired(schedule, NOW_MS + HOUR_MS) if one[1] == "same"] == []
    assert schedule.queries.find("same") is None


@pytest.mark.parametrize("step", [stay, flushed, killed, killed_unflushed])
def test_what_fired_is_too_late_within_its_scope_and_unknown_elsewhere(
    opened: Opened, schedule: DelayStore, step: Step
) -> None:
    assert said(schedule, "vic.a", due_ms=NOW_MS + SECOND_MS) == "stored"
    assert fired(schedule, NOW_MS + SECOND_MS) == [("vic.a", "same")]
    schedule = step(opened, schedule)

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=LIM) == ["unknown"]
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("vic.a",)) == ["too_late"]
    assert schedule.cancel(["same"], now_ms=NOW_MS) == ["too_late"]
    assert said(schedule, "vic.a") == "duplicate"
    assert said(schedule, "lim.a") == "stored", "it is dead"
    assert fired(schedule, NOW_MS + HOUR_MS) == []


@pytest.mark.parametrize("step", [stay, flushed, killed, killed_unflushed])
def test_what_fired_is_too_late_for_a_pattern_of_a_topic_on_which_something_waits(
    opened: Opened, schedule: DelayStore, step: Step
) -> None:
    assert said(schedule, "vic.a", message_id="other") == "stored"
    assert said(schedule, "vic.a", due_ms=NOW_MS + SECOND_MS) == "stored"
    assert fired(schedule, NOW_MS + SECOND_MS) == [("vic.a", "same")]
    schedule = step(opened, schedule)

    assert schedule.cancel(["same", "never"], now_ms=NOW_MS, scope=VIC) == ["too_late", "unknown"]
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("vic.b*",)) == ["unknown"]


def test_the_names_of_topics_without_messages_are_forgotten_with_a_flush_where_they_are_many(opened: Opened) -> None:
    schedule = opened.open(topic_names_max=10)
    put(schedule, NOW_MS, timed("waits", NOW_MS + DAY_MS, topic="kept"))
    for number in range(30):
        put(schedule, NOW_MS, timed(f"m{number}", NOW_MS, topic=f"invented.{number}"))
        schedule.cancel([f"m{number}"], now_ms=NOW_MS)
    assert schedule.queries.figures()["topic_names"] == 31

    flush(schedule, NOW_MS)

    assert schedule.queries.figures()["topic_names"] == 1
    assert schedule.queries.topics() == {"kept": 1}


def test_what_fired_long_ago_is_too_late_although_anothers_of_its_id_has_just_fired(schedule: DelayStore) -> None:
    for number, topic in enumerate(("vic.a", "lim.a"), 1):
        flush(schedule, NOW_MS)
        said(schedule, topic, due_ms=NOW_MS + number * SECOND_MS)
        assert fired(schedule, NOW_MS + number * SECOND_MS) == [(topic, "same")]

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("vic.a",)) == ["too_late"]
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("vic.b",)) == ["unknown"]


def test_an_id_with_the_hash_of_another_topics_is_no_repeat_of_it_after_a_restart(
    opened: Opened, schedule: DelayStore
) -> None:
    same, made, other = ids_of_one_hash(3)
    assert said(schedule, "lim.a", message_id=made) == "stored"
    flush(schedule, NOW_MS)

    schedule = opened.open()

    assert said(schedule, "vic.a", message_id=same) == "stored"
    assert said(schedule, "lim.a", message_id=other) == "duplicate", "of its own topic nothing else can be told"
    assert schedule.cancel([same], now_ms=NOW_MS, scope=VIC) == ["canceled"]
    assert fired(schedule, NOW_MS + HOUR_MS) == [("lim.a", made)]


def test_a_message_of_one_topic_that_waits_is_canceled_although_that_of_another_has_fired(schedule: DelayStore) -> None:
    said(schedule, "vic.a", due_ms=NOW_MS + SECOND_MS)
    said(schedule, "vic.b")
    assert fired(schedule, NOW_MS + SECOND_MS) == [("vic.a", "same")]
    flush(schedule, NOW_MS)

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=VIC) == ["canceled"]
    assert fired(schedule, NOW_MS + HOUR_MS) == []


@pytest.mark.parametrize("step", [stay, flushed, killed, killed_unflushed])
def test_a_cancel_that_came_first_stops_what_comes_within_its_scope_once_each(
    opened: Opened, schedule: DelayStore, step: Step
) -> None:
    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=LIM) == ["unknown"]
    schedule = step(opened, schedule)

    assert [said(schedule, topic) for topic in ("lim.a", "lim.a", "lim.b", "vic.a")] == [
        "stored", "duplicate", "stored", "stored",
    ]  # fmt: skip
    schedule = step(opened, schedule)

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=LIM) == ["canceled"]
    assert [said(schedule, topic) for topic in ("lim.a", "lim.b", "lim.c")] == ["duplicate", "duplicate", "stored"]
    assert schedule.queries.topics() == {"vic.a": 1}
    assert fired(schedule, NOW_MS + HOUR_MS) == [("vic.a", "same")]


def test_a_hand_out_that_was_not_settled_comes_again_with_both_topics_of_an_id(
    opened: Opened, schedule: DelayStore
) -> None:
    for topic in ("lim.a", "vic.a"):
        said(schedule, topic, due_ms=NOW_MS + SECOND_MS)
    batch = schedule.due(NOW_MS + SECOND_MS)
    assert batch is not None

    schedule = opened.open()

    assert schedule.due(NOW_MS + SECOND_MS) == batch
    assert sorted(batch.topics) == ["lim.a", "vic.a"]
    assert [said(schedule, topic) for topic in ("lim.a", "vic.a")] == ["duplicate", "duplicate"]


def test_what_is_refused_and_tried_again_is_told_from_that_of_another_topic(
    opened: Opened, schedule: DelayStore
) -> None:
    for topic in ("lim.a", "vic.a"):
        said(schedule, topic, due_ms=NOW_MS + SECOND_MS)
    batch = schedule.due(NOW_MS + SECOND_MS)
    assert batch is not None
    schedule.fired(batch.number, again=[timed("same", NOW_MS + HOUR_MS, topic="vic.a")])
    flush(schedule, NOW_MS)

    schedule = opened.open()

    assert schedule.cancel(["same"], now_ms=NOW_MS, scope=("lim.a",)) == ["too_late"]
    assert fired(schedule, NOW_MS + HOUR_MS) == [("vic.a", "same")]


def test_the_message_that_is_found_is_the_first_to_be_due_of_those_in_the_scope(schedule: DelayStore) -> None:
    for hours, topic in enumerate(("vic.z", "lim.b", "lim.a"), 1):
        said(schedule, topic, due_ms=NOW_MS + hours * HOUR_MS)
        flush(schedule, NOW_MS)
    said(schedule, "lim.c", due_ms=NOW_MS + 4 * HOUR_MS)

    found = [schedule.queries.find("same", scope) for scope in (None, LIM, ("lim.c",), ("none",))]

    assert [one and one.topic for one in found] == ["vic.z", "lim.b", "lim.c", None]


def test_a_cancel_that_is_repeated_after_a_week_waits_for_its_message_for_another_week(opened: Opened) -> None:
    later_ms = NOW_MS + CANCEL_MEMORY_MS + HOUR_MS
    schedule = opened.open()
    schedule.cancel(["same"], now_ms=NOW_MS)

    assert schedule.cancel(["same", "other"], now_ms=later_ms) == ["unknown", "unknown"]
    schedule.commit()
    schedule = opened.open()

    sent_ms = later_ms + CANCEL_MEMORY_MS - HOUR_MS
    message = timed("same", sent_ms + HOUR_MS, topic="vic.a")
    schedule.schedule([message], now_ms=sent_ms)
    assert fired(schedule, sent_ms + DAY_MS) == []


def test_a_cancel_of_a_stopped_message_that_is_repeated_after_a_week_holds_for_another_week(opened: Opened) -> None:
    later_ms = NOW_MS + CANCEL_MEMORY_MS + HOUR_MS
    schedule = opened.open()
    put(schedule, NOW_MS, timed("same", NOW_MS + DAY_MS, topic="vic.a"))
    schedule.cancel(["same"], now_ms=NOW_MS)

    assert schedule.cancel(["same", "other"], now_ms=later_ms) == ["canceled", "unknown"]
    schedule.commit()
    schedule = opened.open()

    sent_ms = later_ms + CANCEL_MEMORY_MS - HOUR_MS
    schedule.schedule([timed("same", sent_ms + HOUR_MS, topic="vic.a")], now_ms=sent_ms)
    assert fired(schedule, sent_ms + DAY_MS) == []


def test_a_cancel_that_is_repeated_soon_is_written_down_once(opened: Opened) -> None:
    schedule = opened.open()
    schedule.cancel(["same"], now_ms=NOW_MS)
    before = schedule.queries.figures()["log_bytes"]

    schedule.cancel(["same"], now_ms=NOW_MS + CANCEL_RENEWED_MS)
    assert schedule.queries.figures()["log_bytes"] == before

    schedule.cancel(["same"], now_ms=NOW_MS + CANCEL_RENEWED_MS + 1)
    assert schedule.queries.figures()["log_bytes"] > before


def test_a_flood_of_cancels_of_one_scope_pushes_out_its_own_and_nobody_elses() -> None:
    cancels = RememberedCancels(10)
    cancels.add([Cancel(f"quiet-{number}", 1, None, VIC) for number in range(4)], at_ms=1)

    for number in range(100):
        cancels.add([Cancel(f"flood-{number}", 2, None, LIM)], at_ms=2)

    assert len(cancels) == 10
    assert all(cancels.will_stop("vic.a", f"quiet-{number}") for number in range(4))
    assert [one for one in range(100) if cancels.will_stop("lim.a", f"flood-{one}")] == list(range(94, 100))
    again = RememberedCancels(10)
    again.restore(cancels.stored())
    assert again.stored() == cancels.stored()
