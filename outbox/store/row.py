"""A row of the message table as a value, and the conversion between rows and messages. No SQL."""

from __future__ import annotations

import hashlib

import msgspec

from outbox.store.schema import RowKind
from outbox.store.table_placement import MessageTable
from outbox_core.common.errors import DECODE_ERRORS, InvalidMessage
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import Message

CANCEL_TOPIC = "-"
_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the broker, as a row of the message table. A cancel's body is the id of the canceled message."""

    id: str
    kind: RowKind
    topic: str
    body: bytes
    body_sha256: str
    key: str | None = None
    headers_json: str | None = None
    deliver_at_ms: int | None = None
    delay_ms: int | None = None
    """A delay that counts from the INSERT, by the database's clock; `deliver_at_ms` is then set when the row is
    written.
    """
    is_timed: bool = False
    """The message table holds the message until `deliver_at_ms`, not the broker; of a cancel: it withdraws such a row.
    Known only of rows that are being written.
    """
    deliver_in_us: int | None = None
    """Until `deliver_at_ms`, by the database's clock at the time when the row was read."""
    created_at_us: int = 0
    attempts: int = 0
    order_key: str | None = None
    order_seq: int | None = None
    table: MessageTable | None = None
    """The message table of the row; None: the one that is not split."""
    table_number: int = 0
    """The number of its table among those of its Outbox. Known only of rows that are being written: where their tables
    are is known by a connection alone.
    """

    def message(self) -> Message:
        """Returns the message for the broker. Raises InvalidMessage if the row was not written by this code."""
        try:
            headers = _decode_headers(self.headers_json) if self.headers_json else {}
        except DECODE_ERRORS as error:
            raise InvalidMessage(f"the headers of row {self.id} are not a JSON object of strings: {error}") from error
        return Message(
            id=self.id,
            topic=self.topic,
            body=self.body,
            key=self.key,
            headers=headers,
            created_at_ms=self.created_at_us // 1000,
            deliver_at_ms=self.deliver_at_ms,
        )

    def check_body(self) -> None:
        """Raise InvalidMessage if the body is not the published one: a driver or a person has changed it."""
        if hashlib.sha256(self.body).hexdigest() != self.body_sha256:
            raise InvalidMessage(f"the body of row {self.id} does not have the SHA-256 that body_sha256 says")

    @property
    def cancels(self) -> str:
        """Returns the id of the message that this row cancels."""
        return self.body.decode("ascii", "replace")


def publish_row(
    message: Message,
    *,
    table_number: int = 0,
    order_key: str | None = None,
    delay_ms: int | None = None,
    is_timed: bool = False,
) -> OutboxRow:
    """Returns the row that publishes a message."""
    return OutboxRow(
        id=message.id,
        kind=RowKind.PUBLISH,
        topic=message.topic,
        body=message.body,
        body_sha256=hashlib.sha256(message.body).hexdigest(),
        key=message.key,
        headers_json=_encode_headers(dict(message.headers)).decode() if message.headers else None,
        deliver_at_ms=message.deliver_at_ms,
        delay_ms=delay_ms,
        is_timed=is_timed,
        created_at_us=message.created_at_ms * 1000,
        order_key=order_key,
        table_number=table_number,
    )


def cancel_row(message_id: str, *, table_number: int = 0, is_timed: bool = False) -> OutboxRow:
    """Returns the row that cancels a scheduled message."""
    body = message_id.encode()
    return OutboxRow(
        id=new_message_id(),
        kind=RowKind.CANCEL,
        topic=CANCEL_TOPIC,
        is_timed=is_timed,
        body=body,
        body_sha256=hashlib.sha256(body).hexdigest(),
        table_number=table_number,
    )
