"""What a pass does with the broker's answers: poison is parked alone, an outage costs nothing, nobody is held up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
from sqlalchemy import delete, select, update

from broker_adapter.embedded import EmbeddedBroker
from outbox.store.row import cancel_row, publish_row
from outbox_core import CancelStatus, ManualClock, Message, SystemClock
from outbox_core.common.errors import (
    BrokerError,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    InvalidMessage,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

HOUR_US = 3_600_000_000
MINUTE_MS = 60_000


def raising(error: BrokerError, *, when: Callable[[Message], bool]) -> Callable[[Sequence[Message]], None]:
    """A rule that refuses batches in which any message is meant."""

    def rule(batch: Sequence[Message]) -> None:
        if any(when(message) for message in batch):
            raise error

    return rule


def test_a_pass_goes_on_until_nothing_is_due(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    ids = sqlite_shop.add_due(250)

    report = sqlite_shop.scan(broker, batch_rows=100).run()

    assert (report.batches, report.claimed, report.accepted) == (3, 250, 250)
    assert broker.ids == ids
    assert sqlite_shop.rows() == []


def test_a_rejected_row_is_parked_with_the_reason_and_holds_up_nobody(shop: Shop, broker: RecordingBroker) -> None:
    ids = shop.add_due(10)
    broker.rejects[ids[0]] = "too strange"

    report = shop.scan(broker, batch_rows=3).run()

    [parked] = shop.rows()
    assert (parked["id"], parked["state"], parked["token"]) == (ids[0], "parked", None)
    assert "too strange" in parked["last_error"]
    assert (report.accepted, report.parked) == (9, 1)
    assert shop.scan(broker).run().claimed == 0, "a parked row was taken up again"


def test_a_deferred_row_waits_by_its_own_backoff_and_holds_up_nobody(shop: Shop, broker: RecordingBroker) -> None:
    ids = shop.add_due(10)
    broker.defers[ids[0]] = "no queue named trips"

    report = shop.scan(broker, batch_rows=3).run()

    [waiting] = shop.rows()
    assert (waiting["id"], waiting["state"], waiting["token"], waiting["attempts"]) == (ids[0], "pending", None, 2)
    assert "no queue named trips" in waiting["last_error"]
    assert (report.accepted, report.retried, report.parked) == (9, 1, 0)
    broker.defers.clear()
    shop.end_delays()
    assert shop.scan(broker).run().accepted == 1


def test_a_reason_that_is_no_utf_8_is_written_escaped(shop: Shop, broker: RecordingBroker) -> None:
    rejected, deferred = shop.add_due(2)
    broker.rejects[rejected] = "strange \ud800"
    broker.defers[deferred] = "no queue named \udcff"

    report = shop.scan(broker).run()

    assert (report.retried, report.parked) == (1, 1)
    errors = {row["id"]: row["last_error"] for row in shop.rows()}
    assert errors[rejected].endswith(r"strange \ud800")
    assert errors[deferred].endswith(r"no queue named \udcff")


@pytest.mark.parametrize("place", [0, 77, 199])
def test_a_row_that_has_its_whole_batch_refused_is_found_and_parked_alone(sqlite_shop: Shop, place: int) -> None:
    ids = sqlite_shop.add_due(200)
    broker = RecordingBroker(raising(BrokerRefused("one is bad"), when=lambda message: message.id == ids[place]))

    report = sqlite_shop.scan(broker).run()

    [parked] = sqlite_shop.rows()
    assert (parked["id"], parked["state"]) == (ids[place], "parked")
    assert (report.accepted, report.parked) == (199, 1)
    assert broker.ids == [one for one in ids if one != ids[place]]
    assert len(broker.batches) <= 17  # halving: twice the logarithm of 200, and the whole


@pytest.mark.parametrize(
    "broken", [{"headers": "{"}, {"topic": "../etc"}, {"kind": "cancel", "body": b"\xff"}], ids="-".join
)
def test_a_row_that_cannot_be_a_message_is_parked_and_holds_up_nobody(
    shop: Shop, broker: RecordingBroker, broken: dict[str, object]
) -> None:
    ids = shop.add_due(5)
    message = shop.tables.message
    with shop.engine.begin() as connection:
        connection.execute(update(message).where(message.c.id == ids[2]).values(**broken))

    report = shop.scan(broker).run()

    [parked] = shop.rows()
    assert (parked["id"], parked["state"]) == (ids[2], "parked")
    assert parked["last_error"]
    assert (report.accepted, report.parked) == (4, 1)


def test_a_broker_that_calls_a_message_invalid_gets_it_parked(sqlite_shop: Shop) -> None:
    ids = sqlite_shop.add_due(8)

    def rule(batch: Sequence[Message]) -> None:
        if any(message.id == ids[5] for message in batch):
            raise InvalidMessage("not for me")

    report = sqlite_shop.scan(RecordingBroker(rule)).run()

    [parked] = sqlite_shop.rows()
    assert (parked["id"], parked["state"]) == (ids[5], "parked")
    assert (report.accepted, report.parked) == (7, 1)


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("no answer"), StorageFailed("disk full")], ids=lambda it: type(it).__name__
)
def test_an_outage_ends_the_pass_parks_nothing_and_burns_no_attempts(shop: Shop, error: BrokerError) -> None:
    shop.add_due(30)
    broker = RecordingBroker(raising(error, when=lambda _: True))

    report = shop.scan(broker, batch_rows=10).run()

    rows = shop.rows()
    assert report.outage is error
    assert len(broker.batches) == 1
    assert {row["state"] for row in rows} == {"pending"}
    assert {row["attempts"] for row in rows} == {1}, "the outage was counted as an attempt of the rows"
    assert len([row for row in rows if row["last_error"] == str(error)]) == 10


def test_after_many_outages_everything_is_sent(sqlite_shop: Shop) -> None:
    ids = sqlite_shop.add_due(10)
    broker = RecordingBroker(raising(BrokerUnavailable("no answer"), when=lambda _: True))

    for _ in range(60):
        sqlite_shop.scan(broker).run()
        sqlite_shop.end_leases()
    broker.rule = None
    sqlite_shop.scan(broker).run()

    assert sorted(broker.ids) == ids
    assert sqlite_shop.rows() == []


def test_a_throttled_batch_is_due_when_the_broker_says(sqlite_shop: Shop) -> None:
    sqlite_shop.add_due(1)
    slow_down = BrokerThrottled("slow down", retry_after_ms=30_000_000)

    sqlite_shop.scan(RecordingBroker(raising(slow_down, when=lambda _: True))).run()

    [row] = sqlite_shop.rows()
    wait_us = row["due_at_us"] - row["created_at_us"]
    assert 30_000_000_000 <= wait_us <= 40_000_000_000
    assert row["token"] is None


def test_a_topic_without_permission_waits_and_holds_up_no_other(shop: Shop) -> None:
    forbidden, allowed = (shop.add_due(3, prefix=name, topic=name) for name in ("forbidden", "allowed"))
    broker = RecordingBroker(raising(NotAuthorized("no role"), when=lambda message: message.topic == "forbidden"))

    report = shop.scan(broker).run()

    rows = shop.rows()
    assert sorted(broker.ids) == allowed
    assert [row["id"] for row in rows] == forbidden
    assert {(row["state"], row["last_error"]) for row in rows} == {("pending", "deferred by the broker: no role")}
    assert (report.accepted, report.retried, report.parked, report.outage) == (3, 3, 0, None)


def test_an_outage_in_the_middle_of_a_parted_batch_puts_the_rest_off(sqlite_shop: Shop) -> None:
    ids = sqlite_shop.add_due(8)

    def rule(batch: Sequence[Message]) -> None:
        if len(batch) == 8:
            raise BrokerRefused("one is bad")
        if any(message.id == ids[6] for message in batch):
            raise BrokerUnavailable("and now I am gone")

    broker = RecordingBroker(rule)

    report = sqlite_shop.scan(broker).run()

    assert broker.ids == ids[:4]
    assert [row["id"] for row in sqlite_shop.rows()] == ids[4:]
    assert {row["state"] for row in sqlite_shop.rows()} == {"pending"}
    assert (report.accepted, report.retried, report.parked) == (4, 4, 0)


def test_a_cancel_follows_its_message_and_its_answer_is_kept(shop: Shop, embedded: EmbeddedBroker) -> None:
    tomorrow_ms = SystemClock().now_ms() + 86_400_000
    scheduled = publish_row(Message(id="m-1", topic="topic", body=b"", deliver_at_ms=tomorrow_ms))
    rows = [cancel_row("m-1"), scheduled, cancel_row("never-published")]
    with shop.engine.begin() as connection:
        shop.store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)

    report = shop.scan(embedded).run()

    archive = shop.tables.archive
    with shop.engine.connect() as connection:
        outcomes = {row.id: row.outcome for row in connection.execute(select(archive.c.id, archive.c.outcome))}
    assert report.accepted == 3
    assert outcomes == {rows[0].id: CancelStatus.CANCELED, "m-1": "stored", rows[2].id: CancelStatus.UNKNOWN}


def test_a_cancel_that_the_broker_cannot_do_is_parked(sqlite_shop: Shop) -> None:
    class NoCancel(RecordingBroker):
        def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
            raise NotSupported("this broker cannot cancel")

    with sqlite_shop.engine.begin() as connection:
        sqlite_shop.store.insert(connection, [cancel_row("m-1")], token="d" * 32, lease_us=-HOUR_US)

    report = sqlite_shop.scan(NoCancel()).run()

    [row] = sqlite_shop.rows()
    assert (report.parked, row["state"]) == (1, "parked")
    assert "cannot cancel" in row["last_error"]


def test_a_commit_of_more_messages_than_a_broker_takes_at_once_is_sent_all_the_same(
    sqlite_shop: Shop, embedded: EmbeddedBroker
) -> None:
    box = sqlite_shop.box(embedded)

    @box.transactional
    def pay(_session: object) -> None:
        for number in range(2_500):
            box.publish("topic", str(number))

    pay()

    assert box.close(timeout_ms=120_000)
    assert sqlite_shop.rows() == []
    assert embedded.admin.figures("topic")["stored"] == 2_500


def test_logs_name_the_rows_and_never_show_bodies(
    sqlite_shop: Shop, broker: RecordingBroker, caplog: pytest.LogCaptureFixture
) -> None:
    secret = publish_row(Message(id="m-1", topic="topic", body=b"the secret", headers={"token": "the secret"}))
    with sqlite_shop.engine.begin() as connection:
        sqlite_shop.store.insert(connection, [secret], token="d" * 32, lease_us=-HOUR_US)
    broker.rejects["m-1"] = "too strange"

    with caplog.at_level(logging.DEBUG):
        sqlite_shop.scan(broker).run()

    shown = [str(vars(record)) for record in caplog.records]
    assert any("messages_parked" in one and "m-1" in one for one in shown)
    assert not any("the secret" in one for one in shown)


# -- what is logged of messages that the broker refuses for now ------------------------------------------------------

Warnings = Callable[[], list[dict[str, object]]]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    """Returns the fields of the warnings since the last call."""
    caplog.set_level(logging.WARNING)

    def read() -> list[dict[str, object]]:
        found = [vars(record) for record in caplog.records if record.getMessage().startswith("messages_retried")]
        caplog.clear()
        return found

    return read


def test_each_topic_is_one_warning_with_the_row_tried_most_often(
    sqlite_shop: Shop, broker: RecordingBroker, warnings: Warnings
) -> None:
    often, seldom = sqlite_shop.add_due(2, prefix="t", topic="trips")
    [hotel, accepted] = sqlite_shop.add_due(2, prefix="h", topic="hotels")
    message = sqlite_shop.tables.message
    with sqlite_shop.engine.begin() as connection:
        connection.execute(update(message).where(message.c.id == often).values(attempts=8))
    broker.defers = {often: "no queue named trips", seldom: "no queue", hotel: "no queue"}

    sqlite_shop.scan(broker).run()

    names = ("source", "topic", "rows", "message_id", "attempts", "reason")
    assert sorted(tuple(one[name] for name in names) for one in warnings()) == [
        ("scanned", "hotels", 1, hotel, 2, "deferred by the broker: no queue"),
        ("scanned", "trips", 2, often, 9, "deferred by the broker: no queue named trips"),
    ]
    assert broker.ids == [accepted]


def test_an_outage_is_no_warning_of_its_rows(sqlite_shop: Shop, warnings: Warnings) -> None:
    sqlite_shop.add_due(3)

    sqlite_shop.scan(RecordingBroker(raising(BrokerUnavailable("down"), when=lambda _: True))).run()

    assert warnings() == []


def test_a_topic_is_logged_again_after_a_minute(
    sqlite_shop: Shop, broker: RecordingBroker, warnings: Warnings, clock: ManualClock
) -> None:
    [row_id] = sqlite_shop.add_due(1)
    broker.defers[row_id] = "no queue"
    scan, counts = sqlite_shop.scan(broker, clock=clock), []

    for passed_ms in (0, MINUTE_MS - 1, 1):
        clock.advance(passed_ms)
        sqlite_shop.end_delays()
        scan.run()
        counts.append(len(warnings()))

    assert counts == [1, 0, 1]


def test_beyond_the_limit_the_topic_logged_longest_ago_is_forgotten(
    sqlite_shop: Shop, broker: RecordingBroker, warnings: Warnings, clock: ManualClock
) -> None:
    scan = sqlite_shop.scan(broker, clock=clock)
    rows = [publish_row(Message(id=f"m-{number:04d}", topic=f"topic-{number}", body=b"")) for number in range(1_001)]
    with sqlite_shop.engine.begin() as connection:
        sqlite_shop.store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
    broker.defers = {row.id: "no queue" for row in rows}
    scan.run()
    first_of_all = len(warnings())

    message = sqlite_shop.tables.message
    with sqlite_shop.engine.begin() as connection:
        connection.execute(delete(message).where(message.c.id.not_in(["m-0000", "m-1000"])))
    sqlite_shop.end_delays()
    scan.run()

    assert first_of_all == 1_001
    assert [one["topic"] for one in warnings()] == ["topic-0"]
