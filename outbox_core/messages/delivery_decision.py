"""What a broker's answer means for a message that somebody keeps for it: gone, tried again, or parked. Pure.

The same for rows of an outbox (the sender, and the compensator) and for scheduled messages of a delay service. After an
outage, which no message caused, the keeper stops, and tries the same again after a pause of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """The message is due again after the delay. One that is not sent is never given up, after any number of retries.

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


def decide(
    result: PublishResult, *, attempts: int, is_moving: bool, backoff: Backoff, jitter: float
) -> Acceptance | Retry | Park:
    """Returns what becomes of a message that was tried `attempts` times, this one included.

    `is_moving`: its topic took other messages at the same time, as a full queue does that is being emptied. Then the
    delay does not grow: a burst above what a queue holds would wait for minutes while there is room again each second.
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
            return retry(error, attempts=1 if is_moving else attempts, backoff=backoff, jitter=jitter)
        case _:
            assert_never(result.status)


def retry(error: str, *, attempts: int, backoff: Backoff, jitter: float) -> Retry:
    """Returns the retry of a message that waits for an operator, or for room, by its own backoff."""
    delay_ms = int(backoff.delay_ms(attempts) * (1 - backoff.jitter * jitter))
    return Retry(max(1, delay_ms), error, tried=True)


def moving_topics(results: Iterable[tuple[Message, PublishResult]]) -> set[str]:
    """Returns the topics that took a message."""
    return {message.topic for message, result in results if result.status.is_success}
