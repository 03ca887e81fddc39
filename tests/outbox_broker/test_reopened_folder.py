"""A data folder in which every kind of record stands is opened again, and everything in it is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core import Delivery, GroupConfig, ManualClock, Message
from tests.outbox_broker.action_log import actions_of, checkpoints
from tests.outbox_broker.message_log import footers_of

BEGUN_MS: Final = 1_800_000_000_000
DAY_MS: Final = 24 * 3_600_000
TOPIC, DELETED = "orders", "deleted"
BILLING, ORDERED, AUDIT, GONE = "billing", "ordered", "audit", "gone"
WRITTEN = [f"m{number}" for number in range(60)]


def message(message_id: str, *, topic: str = TOPIC, due_ms: int | None = None) -> Message:
    """A message whose key, header and body follow from its id."""
    key, headers = f"k{len(message_id)}", {"type": "paid", "id": message_id}
    body = message_id.encode() * 20
    return Message(
        id=message_id, topic=topic, key=key, headers=headers, body=body, deliver_at_ms=due_ms, created_at_ms=BEGUN_MS
    )


def publish(engine: Engine, *messages: Message) -> None:
    """Publish messages that are new."""
    assert [one.status for one in engine.publisher.publish(messages)] == ["stored"] * len(messages)


def fill(engine: Engine, clock: ManualClock) -> None:
    """What a log of the broker can say, once at least, but for damage and full disks. Ends ten seconds later."""
    _schedule(engine, clock)
    engine.admin.declare_group(
        TOPIC, BILLING, GroupConfig(max_attempts=2, backoff_initial_ms=DAY_MS, backoff_max_ms=DAY_MS)
    )
    engine.admin.declare_group(TOPIC, ORDERED, GroupConfig(ordered=True, filter="type = 'paid'"))
    for first in range(0, 60, 10):
        publish(engine, *(message(f"m{number}") for number in range(first, first + 10)))
    _consume(engine)
    _delete(engine)
    assert len(_audit(engine)) == 60
    clock.advance(10_000)
    assert _audit(engine) == ["soon"]
    assert [one.id for one in engine.puller.pull(TOPIC, ORDERED, max_messages=1)] == ["m0"]


def _schedule(engine: Engine, clock: ManualClock) -> None:
    """s0 to s5 are due in a day, of which s1 is canceled before and s2 after they are in a bucket; `soon` falls due."""
    publish(engine, *(message(f"s{number}", due_ms=BEGUN_MS + DAY_MS) for number in range(5)))
    assert engine.publisher.cancel(["s1", "early"]) == ["canceled", "unknown"]
    engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)
    assert engine.publisher.cancel(["s2"]) == ["canceled"]
    publish(engine, message("s5", due_ms=BEGUN_MS + DAY_MS), message("soon", due_ms=BEGUN_MS + 10_000))


def _consume(engine: Engine) -> None:
    """Of m0 to m11: even ones below 8 acked, m1 dead by a nack and redriven, m3 and m5 dead; m7 extended, the others
    in flight.
    """
    found = {one.id: one for one in engine.puller.pull(TOPIC, BILLING, max_messages=12, invisible_ms=30_000)}
    engine.settler.ack(_receipts(found, "m0", "m2", "m4", "m6"))
    engine.settler.nack(_receipts(found, "m1", "m3", "m5"), delay_ms=0, reason="refused")
    again = {one.id: one for one in engine.puller.pull(TOPIC, BILLING, max_messages=6)}  # half of it are fresh ones
    engine.settler.nack(_receipts(again, "m1", "m3", "m5"), reason="refused again")
    engine.settler.nack(_receipts(again, "m12", "m13", "m14"), delay_ms=0, counts=False)
    assert engine.dead_letters.redrive(TOPIC, BILLING, ids=["m1"]) == 1
    engine.settler.nack(_receipts(found, "m8"), reason="later")
    engine.settler.extend(_receipts(found, "m7"), invisible_ms=3_600_000)
    engine.admin.pause(TOPIC, BILLING, paused=True)
    engine.admin.pause(TOPIC, BILLING, paused=False)


def _audit(engine: Engine) -> list[str]:
    """Ack all that is ready, each by itself: so that the action log comes to a checkpoint."""
    ids: list[str] = []
    while found := engine.puller.pull(TOPIC, AUDIT, max_messages=1):
        ids += [one.id for one in found]
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"]
    return ids


def _receipts(deliveries: dict[str, Delivery], *ids: str) -> list[str]:
    return [deliveries[one].receipt for one in ids]


def _delete(engine: Engine) -> None:
    """A group; and a topic, of which another one is made."""
    engine.admin.declare_group(TOPIC, GONE, GroupConfig())
    engine.admin.seek(TOPIC, GONE, to_offset=5)
    engine.deletion.delete_group(TOPIC, GONE)
    publish(engine, message("d0", topic=DELETED), message("d1", topic=DELETED, due_ms=BEGUN_MS + DAY_MS))
    engine.deletion.delete_topic(DELETED, force=True)
    publish(engine, message("d2", topic=DELETED))


@pytest.fixture
def clock() -> ManualClock:
    """At the moment at which the folder is begun."""
    return ManualClock(BEGUN_MS)


@pytest.fixture
def folder(tmp_path: Path, clock: ManualClock) -> Path:
    """The data folder; its clock is where the writing ended."""
    folder = tmp_path / "broker"
    engine = Engine.open(folder, clock=clock, options=EngineOptions(segment_bytes=4096))
    try:
        fill(engine, clock)
        engine.writer.write_checkpoint()
    finally:
        engine.close()
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


def test_the_folder_has_each_kind_of_file_and_of_record(folder: Path) -> None:
    assert checkpoints(folder)
    assert {type(action).__name__ for action in actions_of(folder)} == {
        "Canceled", "Declared", "DeletedGroup", "DeletedTopic", "Died", "Extended", "Filed", "Fired",
        "Handed", "Opened", "Paused", "Redriven", "Requeued", "Settled", "Sought",
    }  # fmt: skip
    assert {path.suffix for path in folder.rglob("*.*") if path.name != ".lock"} == {".segment", ".proven"}
    assert footers_of(folder)


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
    assert engine.dead_letters.redrive(TOPIC, BILLING) == 2
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
