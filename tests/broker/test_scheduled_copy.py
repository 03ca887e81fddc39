"""A record that falls due without being decoded is the one that would have been encoded."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from broker.scheduled_copy import NOT_STORED_YET_MS, fired_copy, to_be_fired
from messaging import journal

TIMES = st.one_of(st.integers(0, 1 << 33), st.integers(1 << 32, 1 << 62), st.just(0xCF))


@given(
    id_=st.text(min_size=1, max_size=40), key=st.none() | st.text(max_size=10), body=st.binary(max_size=40),
    headers=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    times=st.tuples(TIMES, st.none() | TIMES, TIMES), sequence=st.integers(0, 1 << 60),
)  # fmt: skip
def test_what_was_put_together_is_what_would_be_encoded(
    *, id_: str, key: str | None, body: bytes, headers: dict[str, str],
    times: tuple[int, int | None, int], sequence: int,
) -> None:  # fmt: skip
    created_at_ms, deliver_at_ms, now_ms = times
    record = journal.MessageRecord(
        sequence=None, id=id_, topic="t", key=key, headers=headers, body=body, created_at_ms=created_at_ms,
        stored_at_ms=NOT_STORED_YET_MS, deliver_at_ms=deliver_at_ms, copy=journal.FIRED_COPY,
    )  # fmt: skip

    copy = fired_copy(to_be_fired(record), sequence=sequence, stored_at_ms=now_ms)

    expected = msgspec.structs.replace(record, sequence=sequence, stored_at_ms=now_ms)
    assert journal.decode_message(copy) == expected
    assert copy == journal.encode_record(expected)
