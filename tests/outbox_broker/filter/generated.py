"""Expressions and headers at random, from pools so small that they meet."""

from __future__ import annotations

from hypothesis import strategies as st

from outbox_broker.filter.expression_tree import (
    FALSE,
    TRUE,
    Between,
    Comparison,
    ComparisonOperator,
    Header,
    In,
    IsNull,
    Like,
    Node,
    all_of,
    any_of,
    negated,
)
from outbox_broker.filter.like_pattern import pieces_of, plain_text

NAMES = ("type", "region", "n", "in", "x-y.z|")
COMMON = ("a", "b", "ab", "1", "01", "2", "3.5", "true", "False")
COMMON_NUMBERS = (1, 2, 3.5, 0)
TEXTS = ("", "a", "b", "ab", "aab", "a%b", "a_b", "it's", "true", "FALSE", "é", "漢字", "\n", "😀")
NUMBER_TEXTS = (
    "0", "-0", "1", "+1", "1.0", "01", "1.", ".5", "0.5", "5e-1", "-3", "1e2", "100", "9007199254740993",
    "9007199254740992.0", "1e999", "-1e999", "nan", "Infinity", "0x1", "1_0", " 1", "1 ", "--1", "", "٣", "1" * 64,
    "1" * 65, "1e", "e1", ".", "+",
)  # fmt: skip
NUMBERS = (0, 1, -3, 100, 0.5, 1.0, 1e2, 9007199254740993, 9007199254740992.0, -0.0)

common = st.sampled_from(COMMON)
odd = st.sampled_from(TEXTS) | st.sampled_from(NUMBER_TEXTS) | st.text(max_size=4)
texts = st.one_of(common, common, odd)
"""Mostly texts that are met again: an expression that nothing fits shows nothing."""

headers_of_a_message = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, texts))
headers = st.sampled_from(NAMES).map(Header)
common_numbers = st.sampled_from(COMMON_NUMBERS)
odd_numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
numbers = st.one_of(common_numbers, common_numbers, odd_numbers.filter(lambda number: len(repr(number)) <= 64))
equalities = st.sampled_from([ComparisonOperator.EQ, ComparisonOperator.NE])
patterns = st.text("ab%_", max_size=6) | st.text("ab%_é!", max_size=6)


def _fitting(pattern: str, escape: str | None) -> bool:
    try:
        return plain_text(pieces_of(pattern, escape)) is None
    except ValueError:
        return False


tests = st.one_of(
    st.builds(Comparison, equalities, st.just(Header("type")), texts),
    st.builds(Comparison, st.sampled_from(ComparisonOperator), headers, texts | numbers | headers),
    st.builds(Comparison, equalities, headers, st.booleans()),
    st.builds(Between, headers, texts, texts),
    st.builds(Between, headers, numbers, numbers),
    st.builds(In, headers, st.frozensets(texts, max_size=4), st.frozensets(numbers, max_size=3)).filter(
        lambda test: len(test.texts) + len(test.numbers) > 1
    ),
    st.tuples(headers, patterns, st.none() | st.just("!"))
    .filter(lambda parts: _fitting(parts[1], parts[2]))
    .map(lambda parts: Like(*parts)),
    st.builds(IsNull, headers),
)
nodes: st.SearchStrategy[Node] = st.recursive(
    tests | st.sampled_from([TRUE, FALSE]),
    lambda children: st.one_of(
        st.lists(children, min_size=2, max_size=4).map(all_of),
        st.lists(children, min_size=2, max_size=4).map(any_of),
        children.map(negated),
    ),
    max_leaves=12,
)
