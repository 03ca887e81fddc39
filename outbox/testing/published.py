"""The messages that a test published, for its assertions. The module capture records them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, overload

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, InvalidMessage
from outbox_core.messages.message import CONTENT_TYPE, Message, encode_body

MESSAGES_MAX: Final = 100_000
WAIT_SECONDS: Final = 10.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, eq=False)
class PublishedMessage:
    """One message that a transaction committed. It equals `(topic, body)` and `(topic, body, key)`."""

    message: Message

    @property
    def id(self) -> str:
        """Returns the message's id."""
        return self.message.id

    @property
    def topic(self) -> str:
        """Returns the topic."""
        return self.message.topic

    @property
    def key(self) -> str | None:
        """Returns the key, if any."""
        return self.message.key

    @property
    def headers(self) -> Mapping[str, str]:
        """Returns all headers, also those that the SDK added."""
        return self.message.headers

    @property
    def body(self) -> Any:
        """Returns the body, decoded if its content type is JSON, else as bytes."""
        content_type = next((value for name, value in self.headers.items() if name.lower() == CONTENT_TYPE), "")
        if not content_type.partition(";")[0].strip().lower().endswith("json"):
            return self.message.body
        try:
            return msgspec.json.decode(self.message.body)
        except DECODE_ERRORS:  # the content type is wrong
            return self.message.body

    @property
    def deliver_at(self) -> datetime | None:
        """Returns the due time in UTC; None means immediately."""
        due_ms = self.message.deliver_at_ms
        return None if due_ms is None else _EPOCH + timedelta(milliseconds=due_ms)

    def __eq__(self, other: object) -> bool:
        match other:
            case PublishedMessage():
                return self.message == other.message
            case (topic, body):
                return bool(self.topic == topic) and self._has_body(body)
            case (topic, body, key):
                return bool(self.topic == topic and self.key == key) and self._has_body(body)
            case _:
                return NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        shown_parts = [repr(self.topic), repr(self.body)]
        if self.key is not None:
            shown_parts.append(f"key={self.key!r}")
        if self.deliver_at is not None:
            shown_parts.append(f"deliver_at={self.deliver_at.isoformat()}")
        return f"<published {', '.join(shown_parts)}>"

    def _has_body(self, expected: object) -> bool:
        """Returns whether the body is equal to this value, or to its encoding by publish()."""
        body = self.body
        if bool(body == expected):
            return True
        try:
            encoded, content_type = encode_body(expected)
        except InvalidMessage:
            return False
        return bool(body == (encoded if content_type is None else msgspec.json.decode(encoded)))


class PublishedMessages(Sequence[PublishedMessage]):
    """The messages committed so far, in the order of their commits; it grows while the test runs.

    Compare it with a list: `assert published == [("payment.completed", {"order_id": 7})]`.
    """

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __init__(self, messages: Iterable[PublishedMessage] = ()) -> None:
        self._messages = list(messages)
        self._canceled: list[str] = []
        self._overflowed = False
        self._changed = threading.Condition()

    def on(self, topic: str) -> PublishedMessages:
        """Returns the current messages of a topic."""
        return PublishedMessages(message for message in self._seen() if message.topic == topic)

    def one(self, topic: str | None = None, *, key: str | None = None) -> PublishedMessage:
        """Returns the only message (of this topic and key, if given). AssertionError if there is none, or more."""
        matching = [
            message
            for message in self._seen()
            if (topic is None or message.topic == topic) and (key is None or message.key == key)
        ]
        if len(matching) == 1:
            return matching[0]
        expected_text = " ".join(["one message", *([] if topic is None else [f"on {topic}"])])
        expected_text += "" if key is None else f" with the key {key!r}"
        raise AssertionError(
            f"{expected_text} was expected, {len(matching)} were published; all that was published: {self!r}"
        )

    def wait_for(
        self, topic: str | None = None, *, count: int = 1, timeout_seconds: float = WAIT_SECONDS
    ) -> list[PublishedMessage]:
        """Wait for `count` messages, of a topic or of all, from a thread that the test cannot join; returns them."""

        def matching() -> list[PublishedMessage]:
            return [message for message in self._seen() if topic is None or message.topic == topic]

        with self._changed:
            if not self._changed.wait_for(lambda: len(matching()) >= count, timeout_seconds):
                raise AssertionError(f"{count} were expected on {topic or 'any topic'}; published was: {self!r}")
            return matching()

    def bodies(self, topic: str | None = None) -> list[Any]:
        """Returns the bodies, of a topic or of all, decoded if they are JSON, else as bytes."""
        return [message.body for message in self._seen() if topic is None or message.topic == topic]

    @property
    def topics(self) -> list[str]:
        """Returns the topic of each message, in order."""
        return [message.topic for message in self._seen()]

    @property
    def canceled(self) -> list[str]:
        """Returns the ids that committed transactions have canceled, in order."""
        return list(self._canceled)

    def clear(self) -> None:
        """Remove the messages published so far, for instance by the test's set-up."""
        self._messages.clear()
        self._canceled.clear()

    @overload
    def __getitem__(self, index: int) -> PublishedMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[PublishedMessage]: ...
    def __getitem__(self, index: int | slice) -> PublishedMessage | list[PublishedMessage]:
        return self._seen()[index]

    def __len__(self) -> int:
        return len(self._seen())

    def __iter__(self) -> Iterator[PublishedMessage]:
        return iter(list(self._seen()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        messages = list(self._seen())
        return len(messages) == len(other) and all(
            message == expected for message, expected in zip(messages, other, strict=True)
        )

    def __repr__(self) -> str:
        return repr(self._messages)

    # -- called by capture -------------------------------------------------------------------------------------------

    def add(self, message: Message) -> None:
        """Record a published message. Never raises: it is called after a commit."""
        with self._changed:
            if len(self._messages) < MESSAGES_MAX:
                self._messages.append(PublishedMessage(message))
            else:
                self._overflowed = True
            self._changed.notify_all()

    def add_cancel(self, message_id: str) -> None:
        """Record a cancel."""
        if len(self._canceled) < MESSAGES_MAX:
            self._canceled.append(message_id)
        else:
            self._overflowed = True

    def _seen(self) -> list[PublishedMessage]:
        if self._overflowed:
            raise AssertionError(f"more than {MESSAGES_MAX:,} messages were published: clear() now and then")
        return self._messages
