"""How long a runner of consumers waits, and for what. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.consumers.ack_sender import COMPANY_MS
from outbox.consumers.broadcast_reader import RETRIES
from outbox_core.common.backoff import Backoff

PULL_WAIT_MS: Final = 5_000
ACK_DELAY_MS: Final = 100
PAUSES: Final = Backoff(initial_ms=200, multiplier=2, max_ms=30_000, jitter=0.5)
"""Between pulls while the broker, or the inbox's database, is out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTimes:
    """How long a runner waits where nothing has failed, and between the tries of a broadcast message.

    A pull waits `pull_wait_ms` at the broker for messages to come. A handled message waits `ack_delay_ms`, at most, for
    others to be acknowledged with it, while its batch goes on; an ack waits for company until nothing has come for
    `company_ms`, where messages come faster than acks are answered.
    """

    pull_wait_ms: int = PULL_WAIT_MS
    ack_delay_ms: int = ACK_DELAY_MS
    company_ms: int = COMPANY_MS
    broadcast_retries: Backoff = RETRIES
