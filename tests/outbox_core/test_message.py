"""What a message may be: names, ids, keys, headers and bodies at their bounds, checked where a message is made."""

from __future__ import annotations

import copy
import json
import pickle
import re
import string
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core import DeadLetter, Delivery, GroupConfig, Message
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.ids import new_message_id, new_token
from outbox_core.messages.message import (
    JSON_CONTENT_TYPE,
    Record,
    check_deliver_at,
    check_group,
    check_headers,
    check_key,
    check_message_id,
    check_topic,
    encode_body,
)

NAME_ALPHABET = string.ascii_letters + string.digits + "._-"
names = st.text(NAME_ALPHABET, min_size=1, max_size=255).filter(lambda name: name not in {".", ".."})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


class Name(str, Enum):  # noqa: UP042 - as people name their topics: f"{Name.PAID}" is the member's name
    """A text that is formatted as another one."""

    PAID = "payment.completed"


def test_a_member_of_an_enum_is_the_text_that_it_equals_also_where_it_is_formatted() -> None:
    made = Message(id=Name.PAID, topic=Name.PAID, key=Name.PAID, body=b"")

    checked = [check(Name.PAID) for check in (check_topic, check_group, check_message_id)]
    assert {f"{one}" for one in (made.id, made.topic, made.key, *checked)} == {"payment.completed"}


@given(names)
def test_every_name_of_the_rule_is_a_topic_and_a_group(name: str) -> None:
    assert check_topic(name) == check_group(name) == name


@given(st.text())
def test_a_topic_is_taken_exactly_when_the_rule_says_so(name: str) -> None:
    allowed = re.fullmatch(r"[A-Za-z0-9._-]{1,255}", name, re.ASCII) is not None and name not in {".", ".."}

    try:
        check_topic(name)
        taken = True
    except InvalidMessage:
        taken = False

    assert taken == allowed


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a\n", "a b", "a\x00", "ä", "x" * 256, "٣", 7, None, b"topic"]
)
def test_names_that_could_be_paths_or_surprises_are_refused(name: Any) -> None:
    with pytest.raises(InvalidMessage, match="topic"):
        check_topic(name)
    with pytest.raises(InvalidMessage, match="consumer group"):
        check_group(name)


@pytest.mark.parametrize("message_id", ["", "a b", "a/b", "x" * 65, "é", "a\n", 7, None])
def test_message_ids_out_of_bounds_are_refused(message_id: Any) -> None:
    with pytest.raises(InvalidMessage, match="message id"):
        check_message_id(message_id)


@given(st.text(NAME_ALPHABET + ":", min_size=1, max_size=64))
def test_message_ids_in_bounds_are_taken(message_id: str) -> None:
    assert check_message_id(message_id) == message_id


def test_fresh_ids_are_valid_unique_and_ordered_by_time() -> None:
    ids = [new_message_id() for _ in range(10_000)]

    assert len(set(ids)) == 10_000
    assert [one[:12] for one in ids] == sorted(one[:12] for one in ids)
    assert all(re.fullmatch(r"[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}", one) for one in ids)
    assert all(check_message_id(one) for one in ids)


def test_tokens_never_come_again_and_fit_their_column() -> None:
    tokens = {new_token() for _ in range(10_000)}

    assert len(tokens) == 10_000
    assert {len(token) for token in tokens} == {32}


@given(st.text())
def test_a_key_is_taken_exactly_when_it_has_1_to_1024_bytes_of_utf8(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = 0

    if 1 <= size <= limits.KEY_BYTES_MAX:
        assert check_key(key) == key
    else:
        with pytest.raises(InvalidMessage):
            check_key(key)


@pytest.mark.parametrize(("count", "taken"), [(1024, True), (1025, False)])
def test_a_keys_bound_is_counted_in_bytes(count: int, taken: bool) -> None:
    for key in ("k" * count, "ä" * (count // 2) + "k" * (count % 2)):
        if taken:
            assert check_key(key) == key
        else:
            with pytest.raises(InvalidMessage, match="1,025 bytes"):
                check_key(key)


header_names = st.text(string.ascii_letters + string.digits + "!#$%&'*+.^_`|~-", min_size=1, max_size=128)


@given(st.dictionaries(header_names, st.text(st.characters(codec="utf-8"), max_size=40), max_size=64))
def test_headers_in_bounds_are_taken(headers: dict[str, str]) -> None:
    assert check_headers(headers) == headers


@pytest.mark.parametrize(
    "headers",
    [
        {"": "x"},
        {"a b": "x"},
        {"a:": "x"},
        {"a\r\n": "x"},
        {"ä": "x"},
        {"x" * 129: "x"},
        {7: "x"},
        {"a": 7},
        {"a": None},
        {"a": "\udc80"},
        {str(number): "" for number in range(65)},
        {"a": "x" * (32 * 1024)},
        {"a": "ä" * (16 * 1024)},
    ],
    ids=lambda headers: str(headers)[:30],
)
def test_headers_out_of_bounds_are_refused(headers: dict[Any, Any]) -> None:
    with pytest.raises(InvalidMessage, match="header"):
        check_headers(headers)


def test_a_body_may_have_16_mib_and_not_a_byte_more() -> None:
    assert Message(id="m", topic="t", body=bytes(limits.BODY_BYTES_MAX)).body

    with pytest.raises(InvalidMessage, match="16,777,216"):
        Message(id="m", topic="t", body=bytes(limits.BODY_BYTES_MAX + 1))


@given(st.integers(-(10**15), 10**15))
def test_a_due_time_is_at_most_731_days_ahead_and_the_past_means_now(delay_ms: int) -> None:
    now_ms = 1_800_000_000_000

    if delay_ms <= limits.DELAY_MAX_MS:
        assert check_deliver_at(now_ms + delay_ms, now_ms=now_ms) == max(0, now_ms + delay_ms)
    else:
        with pytest.raises(InvalidMessage, match="731 days"):
            check_deliver_at(now_ms + delay_ms, now_ms=now_ms)


@given(st.binary())
def test_bytes_pass_through_unchanged_whatever_they_come_in(body: bytes) -> None:
    for form in (body, bytearray(body), memoryview(body)):
        assert encode_body(form) == (body, None)


@given(st.text(st.characters(codec="utf-8")))
def test_text_is_utf8_and_has_no_content_type_of_ours(body: str) -> None:
    assert encode_body(body) == (body.encode(), None)


@pytest.mark.slow
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values) | st.lists(json_values))
def test_anything_else_is_json_that_every_reader_understands(body: object) -> None:
    encoded, content_type = encode_body(body)

    assert json.loads(encoded) == body
    assert content_type == JSON_CONTENT_TYPE


def test_what_neither_utf8_nor_json_can_say_is_an_invalid_message() -> None:
    endless: list[object] = []
    endless.append(endless)

    for body in ("\ud800", {"a": "\udfff"}, object(), {"a": object()}, endless, lambda: None, {("a", "b"): 1}):
        with pytest.raises(InvalidMessage, match="cannot be written as"):
            encode_body(body)


def test_errors_never_show_more_than_the_beginning_of_what_was_wrong() -> None:
    with pytest.raises(InvalidMessage) as caught:
        check_topic("/" * 100_000)

    assert len(str(caught.value)) < 300


def test_a_delivery_decodes_json_and_says_which_message_is_not() -> None:
    def delivery(body: bytes) -> Delivery:
        return Delivery(receipt="r", attempt=1, message=Record(id="m-1", topic="t", body=body))

    assert delivery(b'{"a": 1}').json() == {"a": 1}
    with pytest.raises(InvalidMessage, match="m-1"):
        delivery(b"{").json()


@pytest.mark.parametrize(
    "settings",
    [
        {"start": "sometimes"},
        {"start": "at"},
        {"start": "latest", "start_at_ms": 5},
        {"max_attempts": 0},
        {"max_attempts": 1001},
        {"backoff_initial_ms": 0},
        {"backoff_initial_ms": 10, "backoff_max_ms": 9},
        {"backoff_multiplier": 0.5},
    ],
    ids=str,
)
def test_group_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        GroupConfig(**settings)


def test_messages_and_what_carries_them_can_be_pickled_copied_and_encoded_without_headers() -> None:
    message = Message(id="m", topic="t", body=b"b")
    delivery = Delivery(receipt="r", attempt=1, message=message)
    letter = DeadLetter(message=message, group="g", attempts=1, reason="no", dead_at_ms=1)

    for value in (message, delivery, letter):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)).headers == {}
