"""An answer put together from pieces is the one that an encoder writes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.http.content_negotiation import encode_uniform_results

ascii_texts = st.text(st.characters(max_codepoint=127), max_size=80)


@given(st.lists(ascii_texts, max_size=40))
def test_it_reads_as_what_an_encoder_writes_entry_by_entry(texts: list[str]) -> None:
    packed = encode_uniform_results("id", texts, {"status": "stored", "error": None})

    assert packed is not None
    assert msgspec.msgpack.decode(packed) == {
        "results": [{"id": one, "status": "stored", "error": None} for one in texts]
    }


@given(st.lists(st.text(), max_size=10), st.text(st.characters(min_codepoint=128), min_size=1, max_size=300))
def test_texts_that_are_not_ascii_are_left_to_the_encoder(texts: list[str], odd: str) -> None:
    assert encode_uniform_results("receipt", [*texts, odd], {"status": "acked"}) is None


def test_long_texts_are_told_up_to_255_characters() -> None:
    for size in (0, 31, 32, 255):
        packed = encode_uniform_results("receipt", ["r" * size], {"status": "acked"})
        assert packed is not None
        assert msgspec.msgpack.decode(packed) == {"results": [{"receipt": "r" * size, "status": "acked"}]}

    assert encode_uniform_results("receipt", ["r" * 256], {"status": "acked"}) is None
