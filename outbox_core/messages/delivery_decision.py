"""What a broker's answer means for a message that somebody keeps for it: gone, tried again, or parked. Pure.

The same for rows of an outbox (the sender, and the compensator) and for scheduled messages of a delay service. After an
outage, which no message caused, the keeper stops, and tries the same again after a pause of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from outbox_core.common.backoff import Backoff
from outbox_core.messages.message import Message, PublishResult, PublishStatus

_NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The broker has the message (or had it already). `outcome` is the broker's status."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The message is due again after the delay. One that is not sent is never given up, after any number of retries:
    a count that parks turns an outage into thousands of parked rows (CAP parks after 50, and deletes after 15 days).

    `tried` is False if the message did not cause the failure (an outage of the broker): no attempt is counted. `error`
    is empty if nothing failed: the message was not given to the broker.
    """

    delay_ms: int
    error: str
    tried: bool


@dataclass(frozen=True, slots=True)
class Park:
    """The message can never be sent as it is: it is kept with the reason, for an operator."""

    error: str


class TopicStalls:
    """How often each topic was tried since it last took a message. Thread-safe; forgets the oldest of many topics.

    A full queue that is being emptied takes some of each batch, or none of one and some of the next: with the delays
    of its messages' own attempts, a burst above what it holds would wait for minutes while there is room each second.
    """

    def __init__(self, topics_max: int = 10_000) -> None:
        self._topics_max = topics_max
        self._lock = threading.Lock()
        self._stalls: dict[str, int] = {}

    def tried(self, answers: Iterable[tuple[Message, PublishResult]]) -> Mapping[str, int]:
        """Take the answers to a batch; returns, by topic, how often it was tried in vain, this time included."""
        took: dict[str, bool] = {}
        for message, result in answers:
            took[message.topic] = took.get(message.topic, False) or result.status.is_success
        with self._lock:
            stalls = {topic: 0 if moves else self._stalls.get(topic, 0) + 1 for topic, moves in took.items()}
            for topic, count in stalls.items():
                self._stalls.pop(topic, None)  # so that the oldest stays the first entry
                if count:
                    self._stalls[topic] = count
            while len(self._stalls) > self._topics_max:
                del self._stalls[next(iter(self._stalls))]
        return stalls


def decide(
    result: PublishResult, *, attempts: int, stalls: int, backoff: Backoff, jitter: float
) -> Acceptance | Retry | Park:
    """Returns what becomes of a message that was tried `attempts` times, this one included.

    `stalls`: how often its topic was tried in vain (TopicStalls): the delay grows with the smaller number of the two.
    `jitter`, 0 to 1, chooses within the backoff's spread; messages of one batch share it, so that they are settled
    together.
    """
    match result.status:
        case PublishStatus.STORED | PublishStatus.DUPLICATE:
            return Acceptance(result.status)
        case PublishStatus.REJECTED:
            return Park(f"rejected by the broker: {result.error or _NO_REASON}")
        case PublishStatus.DEFERRED:
            error = f"deferred by the broker: {result.error or _NO_REASON}"
            return retry(error, attempts=min(attempts, max(1, stalls)), backoff=backoff, jitter=jitter)
        case _:
            assert_never(result.status)


def retry(error: str, *, attempts: int, backoff: Backoff, jitter: float) -> Retry:
    """Returns the retry of a message that waits for an operator, or for room, by its own backoff."""
    delay_ms = int(backoff.delay_ms(attempts) * (1 - backoff.jitter * jitter))
    return Retry(max(1, delay_ms), error, tried=True)
