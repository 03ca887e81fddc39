"""A message that a broker publishes again and again, at the times of a cron expression in a time zone. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.message import Message, check_recurring

RECURRING_HEADER: Final = "outbox-recurring"
"""On what a recurring message published: its name."""
RECURRING_AT_HEADER: Final = "outbox-recurring-at"
"""On the same: the time of the occurrence, RFC 3339 in UTC; `created_at_ms` is when it was published."""
RECURRING_ID: Final = r"recurring-[0-9a-f]{16}-[0-9]+-[0-9]+"
"""A pattern of the ids that occurrence_id() makes."""


class RecurringMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What is published, and when: `cron` has five fields, of minute, hour, day, month and weekday, in the zone `tz`.

    `catch_up`: of the occurrences that passed while it could not be published, this many are, the newest ones.
    """

    topic: str
    cron: str
    tz: str = "UTC"
    key: str | None = None
    headers: Mapping[str, str] = {}
    body: bytes = b""
    catch_up: int = 1

    def check(self, name: str) -> None:
        """Raise InvalidMessage that names the limit, if its name or what it publishes exceeds one; not for its times,
        which only a broker can tell.
        """
        check_recurring(name)
        if not 1 <= self.catch_up <= limits.RECURRING_CATCH_UP_MAX:
            raise InvalidMessage(f"catch_up must be from 1 to {limits.RECURRING_CATCH_UP_MAX}")
        if len(self.body) > limits.RECURRING_BODY_BYTES_MAX:
            raise InvalidMessage(
                f"the body has {len(self.body):,} bytes, more than the {limits.RECURRING_BODY_BYTES_MAX:,} that a "
                "recurring message may have; store it elsewhere and publish a reference"
            )
        reserved = {RECURRING_HEADER, RECURRING_AT_HEADER} & {header.lower() for header in self.headers}
        if reserved:
            raise InvalidMessage(f"the broker sets the header {min(reserved)} itself")
        self.occurrence(name, generation=1, at_ms=0, now_ms=0)

    def occurrence(self, name: str, *, generation: int, at_ms: int, now_ms: int) -> Message:
        """Returns the message of the occurrence at a time. Raises InvalidMessage."""
        at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return Message(
            id=occurrence_id(name, generation=generation, at_ms=at_ms), topic=self.topic, key=self.key, body=self.body,
            headers={**self.headers, RECURRING_HEADER: name, RECURRING_AT_HEADER: at}, created_at_ms=now_ms,
        )  # fmt: skip


def occurrence_id(name: str, *, generation: int, at_ms: int) -> str:
    """Returns the id of an occurrence's message: the same for a repeat, another one after the recurring message was
    deleted and added again. A name may be longer than an id.
    """
    return f"recurring-{hashlib.sha256(name.encode()).hexdigest()[:16]}-{generation}-{at_ms // 1000}"
