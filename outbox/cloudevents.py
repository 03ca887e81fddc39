"""CloudEvents 1.0, binary mode: a message's headers have the event's attributes, its body is the data. No other mode.

The rules are those of the CloudEvents HTTP protocol binding, 1.0.2: an attribute `x` is the header `ce-x`, with a
percent-encoded value; `datacontenttype` is the header `content-type`, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from outbox_core.common.errors import ConfigurationError, InvalidMessage
from outbox_core.messages.message import CONTENT_TYPE, Delivery

SPECVERSION: Final = "1.0"
PREFIX: Final = "ce-"
REQUIRED: Final = ("id", "source", "specversion", "type")
TRACE: Final = ("traceparent", "tracestate")

# Outside the printable ASCII range, and the three characters that the quoting of headers affects.
_TO_ENCODE = re.compile(r'[^\x21-\x7e]|["%]')
_NONCHARACTERS: Final = "".join(chr(plane * 0x10000 + last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
_FORBIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_NONCHARACTERS}]")
_NAME = re.compile(r"[a-z0-9]{1,64}")
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvents:
    """Makes a CloudEvent of each message of an Outbox: Outbox(..., cloudevents=CloudEvents(source="/shop")).

    `source` names the producer, a URI-reference; with the message's id it identifies the event. The type is
    `type_prefix` and the topic, like `com.example.payment.completed`. A user's own `ce-` header takes precedence.
    """

    source: str
    type_prefix: str = ""

    def __post_init__(self) -> None:
        if not _URI_REFERENCE.fullmatch(self.source):
            raise ConfigurationError(
                f"source must be a URI-reference, like /shop or https://example.com/shop: {self.source!r}"
            )
        if not is_string(self.type_prefix):
            raise ConfigurationError("type_prefix has a control character, which no CloudEvents attribute may have")

    def headers(
        self,
        *,
        message_id: str,
        topic: str,
        key: str | None,
        created_at_ms: int,
        deliver_at_ms: int | None = None,
        headers: Mapping[str, str],
    ) -> dict[str, str]:
        """Returns the message's headers with the event's attributes added. `headers`: the user's, the content type and
        the trace's context. Raises InvalidMessage for a key that cannot be an event's subject.
        """
        attributes = {
            "specversion": SPECVERSION,
            "id": message_id,
            "source": self.source,
            "type": self.type_prefix + topic,
            "time": rfc3339(created_at_ms),
        }
        if key is not None:
            if not is_string(key):
                raise InvalidMessage("the key has a control character: it cannot be a CloudEvents subject")
            attributes["subject"] = key
        if deliver_at_ms is not None:
            attributes["deliverat"] = rfc3339(deliver_at_ms)
        attributes.update({name: headers[name] for name in TRACE if name in headers})
        present = {name.lower() for name in headers}
        made = {
            PREFIX + name: encode(attribute) for name, attribute in attributes.items() if PREFIX + name not in present
        }
        return {**headers, **made}


def read(delivery: Delivery) -> dict[str, Any]:
    """Returns the event of a delivery: its attributes by name, and `data`, decoded if it is JSON, else bytes.

    Raises InvalidMessage if it is not a CloudEvent of version 1.0 in binary mode.
    """
    event: dict[str, Any] = {}
    for header, value in delivery.headers.items():
        name = header.lower()
        if name == CONTENT_TYPE:
            event["datacontenttype"] = value
        elif name.startswith(PREFIX):
            event[_attribute(name, delivery)] = _decoded(value, name, delivery)
    missing = [name for name in REQUIRED if not event.get(name)]
    if missing:
        raise InvalidMessage(f"message {delivery.id} is no CloudEvent: it has no {', '.join(missing)}")
    if event["specversion"] != SPECVERSION:
        raise InvalidMessage(f"message {delivery.id} is a CloudEvent of version {event['specversion']!r}, not 1.0")
    event["data"] = delivery.json() if _is_json(event.get("datacontenttype", "")) else delivery.body
    return event


def encode(value: str) -> str:
    """Encodes an attribute's value for a header: percent-encoded UTF-8, upper-case, only where required."""
    return _TO_ENCODE.sub(lambda matched: "".join(f"%{byte:02X}" for byte in matched[0].encode()), value)


def decode(value: str) -> str:
    """Decodes an attribute's value from a header. Raises ValueError if it is not percent-encoded UTF-8.

    Values in double quotes, of older versions of the protocol, are unquoted first.
    """
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    if _BROKEN_ESCAPE.search(value):
        raise ValueError("a % that begins no escape")
    return unquote_to_bytes(value).decode()


def is_string(value: str) -> bool:
    """Returns whether this is a String of CloudEvents: no control character, lone surrogate or noncharacter."""
    return _FORBIDDEN.search(value) is None


def rfc3339(at_ms: int) -> str:
    """Formats a time, milliseconds since the Unix epoch, as a Timestamp of CloudEvents."""
    seconds, ms = divmod(at_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _attribute(header: str, delivery: Delivery) -> str:
    name = header.removeprefix(PREFIX)
    if not _NAME.fullmatch(name) or name in {"data", "datacontenttype"}:
        raise InvalidMessage(f"message {delivery.id} is no CloudEvent: {header} names no attribute")
    return name


def _decoded(value: str, header: str, delivery: Delivery) -> str:
    try:
        decoded = decode(value)
    except ValueError as error:
        raise InvalidMessage(
            f"message {delivery.id} is no CloudEvent: {header} is not percent-encoded UTF-8"
        ) from error
    if not is_string(decoded):
        raise InvalidMessage(f"message {delivery.id} is no CloudEvent: {header} has a forbidden character")
    return decoded


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")
