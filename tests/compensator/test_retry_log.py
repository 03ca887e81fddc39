"""What the compensator logs of messages that the broker refuses for now."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from msgspec import structs

from compensator.work.poison_row_isolation import SentBatch
from compensator.work.retry_log import REPEAT_MS, TOPICS_MAX, RetryLog
from outbox.delivery.relay import Decision, RowSettlement
from outbox.store.row import OutboxRow, publish_row
from outbox_core import ManualClock, Message
from outbox_core.messages.delivery_decision import Acceptance, Retry

NO_QUEUE = Retry(1_000, "no queue", tried=True)

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


def row(topic: str, name: str, *, attempts: int) -> OutboxRow:
    """A row that was tried so often."""
    return structs.replace(publish_row(Message(id=name, topic=topic, body=b"the secret")), attempts=attempts)


def sent(*decided: tuple[OutboxRow, Decision]) -> SentBatch:
    """A batch with these decisions."""
    settlements = [RowSettlement(one.id, None, None, decision) for one, decision in decided]
    return SentBatch(rows=[one for one, _ in decided], token="t" * 32, settlements=settlements)


def test_each_topic_is_one_warning_with_the_row_tried_most_often(warnings: Warnings) -> None:
    log = RetryLog("shop.outbox", clock=ManualClock())

    log.write(
        sent(
            (row("trips", "t-1", attempts=2), NO_QUEUE),
            (row("trips", "t-2", attempts=9), Retry(256_000, "no queue named trips", tried=True)),
            (row("hotels", "h-1", attempts=3), NO_QUEUE),
            (row("flights", "f-1", attempts=1), Acceptance("stored")),
            (row("outage", "o-1", attempts=1), Retry(1_000, "the broker is down", tried=False)),
        )
    )

    found = warnings()
    names = ("source", "topic", "rows", "message_id", "attempts", "reason")
    assert [tuple(one[name] for name in names) for one in found] == [
        ("shop.outbox", "trips", 2, "t-2", 9, "no queue named trips"),
        ("shop.outbox", "hotels", 1, "h-1", 3, "no queue"),
    ]  # fmt: skip
    assert "the secret" not in str(found)


def test_a_topic_is_logged_again_after_a_minute(warnings: Warnings) -> None:
    clock = ManualClock()
    log = RetryLog("shop.outbox", clock=clock)
    batch = sent((row("trips", "t-1", attempts=2), NO_QUEUE))
    counts = []

    for passed_ms in (0, REPEAT_MS - 1, 1):
        clock.advance(passed_ms)
        log.write(batch)
        counts.append(len(warnings()))

    assert counts == [1, 0, 1]


def test_beyond_the_limit_the_topic_logged_longest_ago_is_forgotten(warnings: Warnings) -> None:
    log = RetryLog("shop.outbox", clock=ManualClock())
    for number in range(TOPICS_MAX + 1):
        log.write(sent((row(f"topic-{number}", "m", attempts=2), NO_QUEUE)))
    warnings()

    for number in (TOPICS_MAX, 0):
        log.write(sent((row(f"topic-{number}", "m", attempts=2), NO_QUEUE)))

    assert [one["topic"] for one in warnings()] == ["topic-0"]
