"""A data folder of a given format is opened, and everything in it is found: see make_broker_folder."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.messages.message import GroupConfig, Message
from tests.golden.make_broker_folder import (
    ARCHIVE,
    AUDIT,
    BEGUN_MS,
    BILLING,
    DAY_MS,
    DELETED,
    ORDERED,
    TOPIC,
    fill,
    message,
)

WRITTEN = [f"m{number}" for number in range(60)]


def from_archive(folder: Path, clock: ManualClock) -> None:
    """The folder as it was written once."""
    clock.advance(10_000)
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have no filters
        archive.extractall(folder.parent)


def from_code(folder: Path, clock: ManualClock) -> None:
    """The folder as it is written today."""
    engine = Engine.open(folder, clock=clock, options=EngineOptions(segment_bytes=4096))
    try:
        fill(engine, clock)
    finally:
        engine.close()


@pytest.fixture
def clock() -> ManualClock:
    """At the moment at which the folder is begun."""
    return ManualClock(BEGUN_MS)


@pytest.fixture(params=[from_archive, from_code])
def folder(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Path:
    """The data folder; its clock is where the writing ended."""
    folder = tmp_path / "broker"
    request.param(folder, clock)
    return folder


@pytest.fixture
def engine(folder: Path, clock: ManualClock) -> Iterator[Engine]:
    """An engine on it."""
    engine = Engine.open(folder, clock=clock)
    yield engine
    engine.close()


def pulled(engine: Engine, group: str, *, topic: str = TOPIC) -> list[str]:
    """All that is ready, acked; each has the key, the header and the body that it was published with."""
    ids: list[str] = []
    while found := engine.puller.pull(topic, group, max_messages=1_000):
        for one in found:
            as_published = message(one.id)
            assert (one.key, one.headers, one.body) == (as_published.key, as_published.headers, as_published.body)
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"] * len(found)
        ids += [one.id for one in found]
    return ids


def test_the_archive_has_each_kind_of_file_and_of_record(tmp_path: Path) -> None:
    from_archive(tmp_path / "broker", ManualClock(BEGUN_MS))

    payloads = [
        one.payload
        for path in journal.segment_paths(tmp_path / "broker" / "actions")
        for one in journal.read_segment(path)[1]
    ]
    kinds = {type(journal.decode_action(one)).__name__ for one in payloads}
    assert kinds == {
        "Canceled", "Checkpoint", "Declared", "DeletedGroup", "DeletedTopic", "Died", "Extended", "Filed", "Fired",
        "Handed", "Opened", "Paused", "Redriven", "Requeued", "Settled", "Sought",
    }  # fmt: skip
    assert {path.suffix for path in (tmp_path / "broker").rglob("*.*")} == {".log", ".index", ".delay"}


def test_each_message_is_there_for_a_new_group(engine: Engine) -> None:
    assert pulled(engine, "new") == [*WRITTEN, "soon"]


def test_each_message_is_known_and_not_stored_twice(engine: Engine) -> None:
    again = [message(one) for one in (*WRITTEN, "soon", "s0", "s1", "s2", "s5")]

    assert [one.status for one in engine.publisher.publish(again)] == ["duplicate"] * len(again)


def test_each_group_goes_on_where_it_was(engine: Engine, clock: ManualClock) -> None:
    assert engine.admin.groups(TOPIC) == [AUDIT, BILLING, ORDERED]
    assert engine.admin.group_config(TOPIC, BILLING) == GroupConfig(
        max_attempts=2, backoff_initial_ms=DAY_MS, backoff_max_ms=DAY_MS
    )
    assert engine.admin.group_config(TOPIC, ORDERED) == GroupConfig(ordered=True, filter="type = 'paid'")
    figures = engine.admin.group_figures(TOPIC, BILLING)
    assert (figures["in_flight"], figures["dead"], figures["position"]) == (4, 2, 15)
    assert pulled(engine, AUDIT) == []
    assert sorted(pulled(engine, BILLING)) == sorted(["m1", *WRITTEN[12:], "soon"])

    clock.advance(30_000)
    assert pulled(engine, BILLING) == ["m9", "m10", "m11"], "their invisible time is over"
    clock.advance(3_600_000)
    assert pulled(engine, BILLING) == ["m7"], "its invisible time was extended"
    clock.advance(DAY_MS)
    assert pulled(engine, BILLING)[0] == "m8", "it was given back for a day"


def test_dead_letters_have_their_reasons_and_can_be_redriven(engine: Engine) -> None:
    letters, _ = engine.admin.dead(TOPIC, BILLING)

    assert [(one.id, one.attempts, one.reason) for one in letters] == [
        ("m3", 2, "refused again"), ("m5", 2, "refused again"),
    ]  # fmt: skip
    assert engine.admin.redrive(TOPIC, BILLING) == 2
    assert {"m3", "m5"} <= set(pulled(engine, BILLING))


def test_an_ordered_group_hands_out_the_next_of_a_key_after_the_one_in_flight(
    engine: Engine, clock: ManualClock
) -> None:
    first = [one.id for one in engine.puller.pull(TOPIC, ORDERED)]
    assert first == ["m10", "soon"], "m0 to m9 have one key, of which m0 is in flight"
    clock.advance(30_000)
    came = pulled(engine, ORDERED)
    assert [one for one in came if len(one) == 2] == WRITTEN[:10]
    assert [one for one in came if len(one) == 3] == WRITTEN[10:]
    assert len(came) == len(WRITTEN) + 1


def test_what_is_scheduled_falls_due_and_what_was_canceled_does_not(engine: Engine, clock: ManualClock) -> None:
    assert engine.publisher.scheduled(TOPIC, bucket="day") == [((BEGUN_MS + DAY_MS) // DAY_MS * DAY_MS, 4)]
    assert engine.publisher.cancel(["s1", "s2", "s3", "soon"]) == ["canceled", "canceled", "canceled", "too_late"]
    engine.publisher.publish([message("early")])  # which was canceled before it came

    clock.advance(DAY_MS)
    assert pulled(engine, AUDIT) == ["s0", "s4", "s5"]


def test_a_deleted_topic_stays_deleted_and_the_one_made_since_goes_on_behind_it(
    engine: Engine, clock: ManualClock
) -> None:
    clock.advance(DAY_MS)
    assert pulled(engine, "any", topic=DELETED) == ["d2"]
    assert engine.reader.read(DELETED, start="earliest").offset == 1


def test_it_is_opened_again_after_more_was_written(engine: Engine, folder: Path, clock: ManualClock) -> None:
    engine.publisher.publish([Message(id="more", topic=TOPIC, body=b"more")])
    engine.close()

    again = Engine.open(folder, clock=clock)
    try:
        assert [one.id for one in again.puller.pull(TOPIC, AUDIT)] == ["more"]
        assert again.admin.group_figures(TOPIC, BILLING)["dead"] == 2
    finally:
        again.close()
