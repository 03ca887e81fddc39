"""A broker that cannot delay, with the process of a delay service in front of it: on a real server of the engine.

A test module of an engine imports all of these tests and has a fixture `engine`: an EngineUnderTest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import DUE_HEADER, CancelStatus, PublishStatus
from tests.broker_adapter.publishing.engine_under_test import EngineUnderTest
from tests.broker_adapter.publishing.publisher_conformance import STORED, message, with_option
from tests.broker_adapter.servers import ServerProcess, delay_process

DIRECT = 10
SCHEDULED = 90
FAR = DIRECT + SCHEDULED
FIRST_MS = 1_000
FIRST_BEHIND_KILL_MS = 4_000
"""What is under way to the target when the service is killed comes twice where the target does not drop repeats."""
STEP_MS = 40
HOUR_MS = 3_600_000
TWO_YEARS_MS = 730 * 24 * HOUR_MS


@dataclass(frozen=True, slots=True)
class Delayed:
    """The engine's broker with a delay service, which a test may kill and start again."""

    broker: Broker
    service: ServerProcess


@pytest.fixture
def delayed(engine: EngineUnderTest, open_broker: Callable[[str], Broker], tmp_path: Path) -> Iterator[Delayed]:
    """The service publishes to the engine's server, too; a URL names both."""
    service = delay_process(tmp_path / "delay", target_url=engine.url)
    service.start()
    url = with_option(engine.url, f"delay={quote(service.url, safe='')}")
    yield Delayed(open_broker(url), service)
    service.kill()


def test_what_has_no_due_time_reaches_the_target_though_the_delay_service_is_dead(
    engine: EngineUnderTest, delayed: Delayed, made_topic: str
) -> None:
    delayed.service.kill()
    immediate = [message(made_topic, number) for number in range(3)]

    results = delayed.broker.publish(immediate)
    for due_ms in (1, _now_ms() + HOUR_MS):
        with pytest.raises(BrokerUnavailable):
            delayed.broker.publish([message(made_topic, 3, deliver_at_ms=due_ms)])

    assert {one.status for one in results} == {PublishStatus.STORED}
    assert [one.id for one in engine.read(made_topic, count=3)] == [one.id for one in immediate]


def test_what_was_canceled_does_not_come_when_it_is_published_after_its_due_time(
    engine: EngineUnderTest, delayed: Delayed, made_topic: str
) -> None:
    canceled, other = message(made_topic, 0, deliver_at_ms=1), message(made_topic, 1, deliver_at_ms=1)
    assert delayed.broker.cancel([canceled.id]) == [CancelStatus.UNKNOWN]

    results = delayed.broker.publish([canceled, other])

    assert {one.status for one in results} == {PublishStatus.STORED}
    assert [one.id for one in engine.read(made_topic, count=1)] == [other.id]


@pytest.mark.slow
def test_the_scheduled_come_when_due_and_once_and_cancels_tell_the_truth_though_the_service_is_killed(
    engine: EngineUnderTest, delayed: Delayed, made_topic: str
) -> None:
    begin_ms = _now_ms()
    due_ms = {number: begin_ms + FIRST_BEHIND_KILL_MS + number * STEP_MS for number in range(DIRECT, FAR)}
    due_ms[FAR] = begin_ms + TWO_YEARS_MS
    batch = [message(made_topic, number, deliver_at_ms=due_ms.get(number)) for number in range(FAR + 1)]
    number_of = {one.id: number for number, one in enumerate(batch)}

    def cancel(numbers: range) -> dict[int, CancelStatus]:
        return {number: status for number in numbers for status in delayed.broker.cancel([batch[number].id])}

    results = delayed.broker.publish(batch)
    answers = cancel(range(FAR - 2, DIRECT, -5))
    delayed.service.kill()
    delayed.service.start()
    answers |= cancel(range(DIRECT + 1, FAR - 1, 5))
    canceled = {number for number, status in answers.items() if status is CancelStatus.CANCELED}
    expected = [number for number in range(FAR) if number not in canceled]
    read = engine.read(made_topic, count=len(expected))
    came = {number_of[one.id]: one for one in read}

    assert [one.id for one in results if one.status in STORED] == [one.id for one in batch]
    assert set(answers.values()) <= {CancelStatus.CANCELED, CancelStatus.TOO_LATE}
    assert sorted(number_of[one.id] for one in read) == expected, "canceled is never, all else is once"
    for number, one in came.items():
        asked_ms = due_ms.get(number)
        assert one.headers.get(DUE_HEADER) == (None if asked_ms is None else str(asked_ms))
        assert (one.body, one.stored_at_ms is None) == (batch[number].body, False)
        assert asked_ms is None or (one.stored_at_ms or 0) >= asked_ms, "never early"
    assert delayed.broker.cancel([batch[FAR].id, batch[FAR - 1].id, "nobody"]) == [
        CancelStatus.CANCELED,
        CancelStatus.TOO_LATE,
        CancelStatus.UNKNOWN,
    ]
    assert delayed.broker.cancel([batch[0].id]) == [CancelStatus.UNKNOWN], "it never waited"


@pytest.mark.slow
def test_a_message_that_is_published_again_comes_once(
    engine: EngineUnderTest, delayed: Delayed, made_topic: str
) -> None:
    one = message(made_topic, 0, deliver_at_ms=_now_ms() + FIRST_MS)

    statuses = [result.status for _ in range(3) for result in delayed.broker.publish([one])]

    assert set(statuses) <= STORED
    assert [read.id for read in engine.read(made_topic, count=1)] == [one.id]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
