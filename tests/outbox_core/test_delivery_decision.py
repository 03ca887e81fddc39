"""What a broker's answer means for a message: the same for rows of an outbox and for scheduled messages."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outbox_core import Message, PublishResult, PublishStatus
from outbox_core.common.backoff import Backoff
from outbox_core.messages.delivery_decision import Acceptance, Park, Retry, TopicStalls, decide

BACKOFF = Backoff(initial_ms=1_000, max_ms=300_000, jitter=0.25)


def answer(status: PublishStatus, error: str | None = None) -> PublishResult:
    return PublishResult("m", status, error)


def decided(status: PublishStatus, *, attempts: int = 1, stalls: int = 1, jitter: float = 0.0) -> object:
    return decide(answer(status, "why"), attempts=attempts, stalls=stalls, backoff=BACKOFF, jitter=jitter)


@pytest.mark.parametrize("status", list(PublishStatus))
def test_each_status_has_its_decision(status: PublishStatus) -> None:
    decision = decided(status)

    expected = {
        PublishStatus.STORED: Acceptance("stored"),
        PublishStatus.DUPLICATE: Acceptance("duplicate"),
        PublishStatus.REJECTED: Park("rejected by the broker: why"),
        PublishStatus.DEFERRED: Retry(1_000, "deferred by the broker: why", tried=True),
    }
    assert decision == expected[status]


def test_delays_grow_with_attempts_on_a_topic_that_takes_nothing() -> None:
    delays = [decided(PublishStatus.DEFERRED, attempts=n, stalls=n) for n in range(1, 12)]

    milliseconds = [one.delay_ms for one in delays if isinstance(one, Retry)]
    assert milliseconds[:4] == [1_000, 2_000, 4_000, 8_000]
    assert milliseconds[-1] == 300_000
    assert all(first <= second for first, second in pairwise(milliseconds))


@pytest.mark.parametrize(("attempts", "stalls"), [(50, 0), (50, 1), (1, 50)])
def test_a_delay_is_the_first_one_for_a_first_try_and_on_a_topic_that_takes_others(attempts: int, stalls: int) -> None:
    decision = decided(PublishStatus.DEFERRED, attempts=attempts, stalls=stalls, jitter=1.0)

    assert decision == Retry(750, "deferred by the broker: why", tried=True)


def test_a_topic_stalls_until_it_takes_a_message_and_no_other_topic_with_it() -> None:
    stalls = TopicStalls()
    full, other = Message(id="m", topic="full", body=b""), Message(id="m", topic="other", body=b"")
    no, yes = answer(PublishStatus.DEFERRED), answer(PublishStatus.STORED)

    seen = [stalls.tried(answers) for answers in ([(full, no)], [(full, no), (other, no)], [(full, no), (full, yes)])]

    assert seen == [{"full": 1}, {"full": 2, "other": 1}, {"full": 0}]
    assert stalls.tried([(full, no), (other, no)]) == {"full": 1, "other": 2}


def test_the_oldest_of_many_stalled_topics_is_forgotten() -> None:
    stalls = TopicStalls(topics_max=2)

    for topic in "abca":
        counted = stalls.tried([(Message(id="m", topic=topic, body=b""), answer(PublishStatus.DEFERRED))])

    assert counted == {"a": 1}
