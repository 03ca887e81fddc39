"""Metrics: what happened is what is counted, under names by convention, with labels that are bounded."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outbox import Telemetry
from outbox.store.row import OutboxRow, cancel_row, publish_row
from outbox.telemetry import NO_TRACING, SendAttempt, SendPath
from outbox.telemetry.metrics import COMMITS_KEPT_MAX, OutboxMetrics, reason_of
from outbox_core import ManualClock, Message, PublishResult, PublishStatus
from outbox_core.common.errors import (
    BrokerCordoned,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    InvalidMessage,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from outbox_core.runtime.logs import event_name
from tests.outbox.watched_broker import delivery


def message(number: int = 1, topic: str = "orders", *, created_at_ms: int = 0) -> Message:
    return Message(id=f"m-{number}", topic=topic, body=b"", created_at_ms=created_at_ms)


def rows(*messages: Message) -> list[OutboxRow]:
    return [publish_row(one) for one in messages]


def value(metrics: OutboxMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def sent(metrics: OutboxMetrics, *messages: Message, path: SendPath = SendPath.INLINE, **options: Any) -> None:
    statuses = options.get("statuses", [PublishStatus.STORED] * len(messages))
    results = [PublishResult(one.id, status) for one, status in zip(messages, statuses, strict=True)]
    metrics.sent(messages, SendAttempt(path=path, results=results, error=options.get("error")), path=path, seconds=0.5)


def test_messages_are_counted_as_enqueued_when_they_are_committed_and_cancels_are_not() -> None:
    metrics = OutboxMetrics()

    metrics.committed([*rows(message(1), message(2), message(3, "bills")), cancel_row("m-9")])

    assert value(metrics, "outbox_messages_enqueued_total", topic="orders") == 2
    assert value(metrics, "outbox_messages_enqueued_total", topic="bills") == 1
    assert value(metrics, "outbox_messages_enqueued_total", topic="-") is None


def test_each_offer_to_the_broker_is_an_attempt_and_what_it_takes_is_acknowledged_by_its_path() -> None:
    metrics = OutboxMetrics()

    sent(metrics, message(1), message(2), error=BrokerUnavailable("down"))
    sent(metrics, message(1), message(2), statuses=[PublishStatus.STORED, PublishStatus.REJECTED])
    sent(metrics, message(3), path=SendPath.COMPENSATOR, statuses=[PublishStatus.DUPLICATE])

    assert value(metrics, "outbox_send_attempts_total", topic="orders") == 5
    assert value(metrics, "outbox_send_failures_total", topic="orders", reason="unavailable") == 2
    assert value(metrics, "outbox_send_failures_total", topic="orders", reason="rejected") == 1
    assert value(metrics, "outbox_messages_acknowledged_total", topic="orders", path="inline") == 1
    assert value(metrics, "outbox_messages_acknowledged_total", topic="orders", path="compensator") == 1
    assert value(metrics, "outbox_send_duration_seconds_count", topic="orders") == 3
    assert value(metrics, "outbox_send_duration_seconds_sum", topic="orders") == 1.5


def test_commit_to_ack_runs_from_the_commit_where_it_was_seen_and_from_publish_elsewhere(clock: ManualClock) -> None:
    metrics = OutboxMetrics(clock=clock)
    published_at_ms = clock.now_ms() - 60_000

    metrics.committed(rows(message(1, created_at_ms=published_at_ms)))
    clock.advance(250)
    sent(metrics, message(1, created_at_ms=published_at_ms))
    here = value(metrics, "outbox_commit_to_ack_seconds_sum", topic="orders")
    sent(metrics, message(2, created_at_ms=published_at_ms), path=SendPath.COMPENSATOR)

    assert here == 0.25
    assert value(metrics, "outbox_commit_to_ack_seconds_sum", topic="orders") == 0.25 + 60.25


def test_a_wall_clock_that_stepped_back_makes_no_negative_time(clock: ManualClock) -> None:
    metrics = OutboxMetrics(clock=clock)
    clock.step_wall(-3_600_000)

    sent(metrics, message(1, created_at_ms=clock.now_ms() + 3_600_000))

    assert value(metrics, "outbox_commit_to_ack_seconds_sum", topic="orders") == 0


def test_moments_of_commit_are_remembered_for_so_many_messages_and_no_more(clock: ManualClock) -> None:
    metrics = OutboxMetrics(clock=clock)
    published_at_ms = clock.now_ms() - 60_000

    metrics.committed(rows(*(message(number) for number in range(COMMITS_KEPT_MAX + 7))))
    for number in range(10):
        metrics.committed(rows(message(-number - 1)))
    clock.advance(250)
    taken_s = []
    for number in (-1, 17, 16):  # the newest, the oldest that is remembered, and the newest that is not
        before = value(metrics, "outbox_commit_to_ack_seconds_sum", topic="orders") or 0
        sent(metrics, message(number, created_at_ms=published_at_ms))
        taken_s.append((value(metrics, "outbox_commit_to_ack_seconds_sum", topic="orders") or 0) - before)

    assert taken_s == [0.25, 0.25, 60.25]


def test_topics_beyond_the_bound_are_counted_together() -> None:
    metrics = OutboxMetrics(topics_max=2)

    for number, topic in enumerate(["a", "b", "c", "d", "a"]):
        metrics.committed(rows(message(number, topic)))

    counted = [value(metrics, "outbox_messages_enqueued_total", topic=topic) for topic in ("a", "b", "c", "other")]
    assert counted == [2, 1, None, 2]


def test_the_queues_of_all_senders_are_summed_when_they_are_asked() -> None:
    metrics = OutboxMetrics()
    lengths = [3, 4]
    for position in (0, 1):
        metrics.watch_queue(lambda position=position: lengths[position])

    before = value(metrics, "outbox_sender_queue_rows")
    lengths[0] = 0
    metrics.dropped(5)

    assert (before, value(metrics, "outbox_sender_queue_rows")) == (7, 4)
    assert value(metrics, "outbox_sender_dropped_rows_total") == 5


def test_a_consumers_deliveries_are_counted_by_what_became_of_them() -> None:
    metrics = OutboxMetrics()
    telemetry = Telemetry(metrics=metrics, tracing=NO_TRACING)

    telemetry.received("orders", "g", deliveries=[delivery(1), delivery(2)], started_at_ns=0)
    for outcome in ("handled", "failed", "handled"):
        with telemetry.handling(delivery(), group="g") as handling:
            handling.outcome = outcome
    telemetry.counted("receipt_lost", "orders", "g", by=3)

    labels = {"topic": "orders", "group": "g"}
    assert value(metrics, "outbox_consumer_messages_received_total", **labels) == 2
    assert value(metrics, "outbox_consumer_messages_handled_total", **labels, outcome="handled") == 2
    assert value(metrics, "outbox_consumer_messages_handled_total", **labels, outcome="failed") == 1
    assert value(metrics, "outbox_consumer_handle_duration_seconds_count", **labels) == 3
    assert value(metrics, "outbox_consumer_events_total", **labels, event="receipt_lost") == 3


def test_two_objects_share_nothing_and_one_may_use_a_registry_of_the_users() -> None:
    registry = CollectorRegistry()
    first, second = OutboxMetrics(), OutboxMetrics(registry=registry)

    first.committed(rows(message()))

    assert second.registry is registry
    assert value(second, "outbox_messages_enqueued_total", topic="orders") is None
    assert b"outbox_sender_queue_rows 0.0" in generate_latest(registry)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BrokerCordoned("", retry_after_ms=1), "cordoned"),
        (BrokerThrottled("", retry_after_ms=1), "throttled"),
        (BrokerUnavailable(""), "unavailable"),
        (NotAuthorized(""), "not_authorized"),
        (NotSupported(""), "not_supported"),
        (BrokerRefused(""), "refused"),
        (StorageFailed(""), "storage_failed"),
        (InvalidMessage(""), "invalid"),
        (RuntimeError("text"), "defect"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_every_error_has_a_reason_of_few_words(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


class Broken:
    """Metrics with a defect in everything they do."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"a defect in {name}")

        return fail


def test_metrics_that_fail_fail_nothing_and_say_so_once_each(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(metrics=Broken(), tracing=NO_TRACING)

    for _ in range(3):
        telemetry.committed(rows(message()))
        telemetry.dropped(1)
        telemetry.watch_queue(lambda: 1)
        telemetry.counted("x", "orders", "g")
        telemetry.received("orders", "g", deliveries=[delivery()], started_at_ns=0)
        with telemetry.sending([message()], path=SendPath.INLINE):
            pass
        with telemetry.handling(delivery(), group="g"):
            pass

    told = [event_name(record) for record in caplog.records if record.name.startswith("outbox.telemetry")]
    assert told == ["telemetry_failed"] * 7
