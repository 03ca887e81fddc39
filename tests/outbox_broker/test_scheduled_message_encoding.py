"""A record that falls due without being decoded is the one that would have been encoded."""

from __future__ import annotations

import hashlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.state.scheduled_message_encoding import (
    NOT_STORED_YET_MS,
    dispatched_records,
    encode_marker,
    encode_scheduled,
)
from outbox_core.journal import journal
from outbox_core.messages.message import Message

TIMES = st.one_of(st.integers(1, 1 << 33), st.integers(1 << 32, 1 << 62), st.just(0xCF))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    return Message(
        id=draw(st.text("ab-0", min_size=1, max_size=40)), topic="t", key=draw(st.none() | st.text("k", min_size=1)),
        headers=draw(st.dictionaries(st.text("h", min_size=1, max_size=5), st.text("v\u00e9", max_size=5), max_size=2)),
        body=draw(st.binary(max_size=40)), created_at_ms=draw(TIMES), deliver_at_ms=draw(st.none() | TIMES),
    )  # fmt: skip


@given(batch=st.lists(messages(), min_size=1, max_size=4), first=st.integers(0, 1 << 60), now_ms=TIMES)
def test_what_was_put_together_is_what_would_be_encoded(*, batch: list[Message], first: int, now_ms: int) -> None:
    kept = [encode_scheduled(one, now_ms=now_ms) for one in batch]

    copies = dispatched_records(kept, first_sequence=first, stored_at_ms=now_ms)

    for number, (message, payload, copy) in enumerate(zip(batch, kept, copies, strict=True)):
        record = record_of(message, body=message.body, stored_at_ms=now_ms, copy=journal.FIRED_COPY)
        before = msgspec.structs.replace(record, stored_at_ms=NOT_STORED_YET_MS)
        assert payload == journal.encode_record(before)
        assert copy == journal.encode_record(msgspec.structs.replace(record, sequence=first + number))


def test_what_was_kept_in_another_shape_is_decoded_and_encoded() -> None:
    message = Message(id="a", topic="t", body=b"b", created_at_ms=5, deliver_at_ms=9)
    usual = encode_scheduled(message, now_ms=1 << 41)
    odd = b"\xdc\x00\x0a" + usual[1:]  # the same, its length written in another way

    assert dispatched_records([usual, odd], first_sequence=7, stored_at_ms=1 << 41) == [
        *dispatched_records([usual], first_sequence=7, stored_at_ms=1 << 41),
        *dispatched_records([usual], first_sequence=8, stored_at_ms=1 << 41),
    ]


@given(message=messages(), now_ms=TIMES)
def test_a_note_is_the_message_with_a_hash_for_its_body(message: Message, now_ms: int) -> None:
    bare = msgspec.structs.replace(message, headers={})

    note = encode_marker(message, now_ms=now_ms)

    digest = hashlib.sha256(message.body).digest()
    assert note == journal.encode_record(record_of(bare, body=digest, stored_at_ms=now_ms, copy=journal.SCHEDULED))


def record_of(message: Message, *, body: bytes, stored_at_ms: int, copy: journal.Copy) -> journal.MessageRecord:
    return journal.MessageRecord(
        sequence=None, id=message.id, topic=message.topic, key=message.key, headers=dict(message.headers), body=body,
        created_at_ms=message.created_at_ms, stored_at_ms=stored_at_ms, deliver_at_ms=message.deliver_at_ms, copy=copy,
    )  # fmt: skip
