"""Composer: makes a Message from the arguments of publish(). No transaction, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec.structs import replace

from outbox.cloudevents import CloudEvents
from outbox.telemetry import Telemetry
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import (
    CONTENT_TYPE,
    ORDERED_HEADER,
    Message,
    check_deliver_at,
    check_mapping,
    encode_body,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Composer:
    """Validates and encodes, and adds id, time, content type and the headers of traces and CloudEvents. Thread-safe."""

    def __init__(
        self, *, body_bytes_max: int, clock: Clock | None, telemetry: Telemetry, cloudevents: CloudEvents | None
    ) -> None:
        self._body_bytes_max = min(body_bytes_max, limits.BODY_BYTES_MAX)
        self._clock = clock or SystemClock()
        self._telemetry = telemetry
        self._cloudevents = cloudevents

    def compose(
        self,
        topic: str,
        body: object,
        *,
        key: str | None,
        headers: Mapping[str, str] | None,
        message_id: str | None,
        deliver_at: datetime | None,
        delay: timedelta | None,
        is_ordered: bool = False,
    ) -> Message:
        """Returns the message; of an ordered topic with the header that tells consumers so.

        A `delay` counts by this host's clock. Raises InvalidMessage with the reason."""
        encoded, content_type = encode_body(body)
        if len(encoded) > self._body_bytes_max:
            raise InvalidMessage(
                f"the body has {len(encoded):,} bytes, more than the {self._body_bytes_max:,} that body_bytes_max "
                "allows; store it elsewhere and publish a reference"
            )
        if headers is not None:
            check_mapping(headers)
        named = dict(headers) if headers else {}
        if content_type is not None and not any(name.lower() == CONTENT_TYPE for name in named):
            named[CONTENT_TYPE] = content_type
        if is_ordered and len(named) < limits.HEADERS_MAX:
            named.setdefault(ORDERED_HEADER, "key")
        message = Message(
            id=message_id if message_id is not None else new_message_id(),
            topic=topic,
            body=encoded,
            key=key,
            headers=named or {},
            created_at_ms=self._clock.now_ms(),
            deliver_at_ms=self._deliver_at_ms(deliver_at, delay),
        )
        return self._stamped(message, named)

    def _stamped(self, message: Message, headers: dict[str, str]) -> Message:
        """Returns the message with the headers of its trace and of its CloudEvent, if any."""
        headers_before = len(headers)
        self._telemetry.stamp(headers, topic=message.topic, message_id=message.id)
        if self._cloudevents is not None:
            headers = self._cloudevents.headers(
                message_id=message.id, topic=message.topic, key=message.key, headers=headers,
                created_at_ms=message.created_at_ms, deliver_at_ms=message.deliver_at_ms,
            )  # fmt: skip
        return message if len(headers) == headers_before else replace(message, headers=headers)

    def _deliver_at_ms(self, deliver_at: datetime | None, delay: timedelta | None) -> int | None:
        now_ms = self._clock.now_ms()
        match deliver_at, delay:
            case None, None:
                return None
            case None, timedelta():
                due_ms = now_ms + delay_ms(delay)
            case datetime(), None:
                if deliver_at.utcoffset() is None:
                    raise InvalidMessage(
                        "deliver_at is a naive datetime, which names no moment; give it a time zone: "
                        "datetime.now(timezone.utc) + ..."
                    )
                # Rounded up: a message may be a millisecond late, never early.
                due_ms = -((_EPOCH - deliver_at) // timedelta(milliseconds=1))
            case _, None:
                raise InvalidMessage(f"deliver_at must be a datetime with a time zone, not {type(deliver_at).__name__}")
            case None, _:
                raise InvalidMessage(f"delay must be a timedelta, not {type(delay).__name__}")
            case _:
                raise InvalidMessage("give deliver_at or delay, not both")
        return check_deliver_at(due_ms, now_ms=now_ms)


def delay_ms(delay: timedelta) -> int:
    """Returns a delay in milliseconds, rounded up: a message may be a millisecond late, never early."""
    whole_ms, rest = divmod(delay, timedelta(milliseconds=1))
    return whole_ms + bool(rest)
