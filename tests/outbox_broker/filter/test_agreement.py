"""Naive, compiled and indexed evaluation give one answer; a rendered filter is read back as the same tree."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_broker.filter import FilterIndex, compile_condition, parse, render
from outbox_broker.filter.expression_tree import (
    TRUE,
    And,
    Comparison,
    ComparisonOperator,
    Header,
    Like,
    Node,
    Not,
    negated,
)
from outbox_broker.filter.partial_evaluation import as_condition, split
from outbox_broker.filter.partial_evaluation import given as known_value
from tests.outbox_broker.filter import generated, naive

TYPE_IS_A = Comparison(ComparisonOperator.EQ, Header("type"), "a")
steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(0, 7), generated.nodes), min_size=1, max_size=12
)
batches = st.lists(generated.headers_of_a_message, min_size=1, max_size=5)


@given(generated.nodes, generated.headers_of_a_message)
def test_compiled_filters_say_what_the_standards_tables_say(node: Node, headers: dict[str, str]) -> None:
    value = naive.value_of(node, headers)

    assert compile_condition(node)(headers) is (value is True)
    assert compile_condition(node, wanted=False)(headers) is (value is False)


@given(generated.nodes, generated.headers_of_a_message)
def test_what_is_left_of_a_filter_decides_as_the_whole_did(node: Node, headers: dict[str, str]) -> None:
    value = headers.get("type")
    parts = split(node, "type")
    expected = naive.value_of(node, headers) is True

    assert (naive.value_of(parts.by_value.get(value, parts.other), headers) is True) is expected
    assert (naive.value_of(known_value(node, "type", value), headers) is True) is expected
    assert (naive.value_of(as_condition(node), headers) is True) is expected


@pytest.mark.slow
@given(steps, batches)
@example([("add", 0, negated(TYPE_IS_A))], [{}, {"type": "a"}, {"type": "b"}])
@example([("add", number, negated(Comparison(ComparisonOperator.EQ, Header("type"), "ab"[number % 2])))
          for number in range(6)],
         [{}, {"type": "a"}, {"type": "c"}])  # fmt: skip
@example([("add", number, And((TYPE_IS_A, Comparison(ComparisonOperator.EQ, Header("region"), "ab"[number % 2]),
                               Comparison(ComparisonOperator.GT, Header("amount"), number)))) for number in range(8)],
         [{"type": "a", "region": "a", "amount": "3"}, {"type": "a", "amount": "9"}])  # fmt: skip
def test_the_index_finds_whom_naive_evaluation_finds_whatever_comes_and_goes(
    changes: list[tuple[str, int, Node]], batch: list[dict[str, str]]
) -> None:
    index: FilterIndex[int] = FilterIndex()
    wanted: dict[int, Node] = {}

    for action, key, node in changes:
        if action == "add":
            index.add(key, node)
            wanted[key] = node
        else:
            index.remove(key)
            wanted.pop(key, None)
        found = index.match_batch(batch)

        expected = [[key for key in wanted if naive.value_of(wanted[key], one) is True] for one in batch]
        assert [sorted(keys) for keys in found] == [sorted(keys) for keys in expected]
    assert len(index) == len(wanted)


@given(generated.nodes)
def test_a_rendered_filter_is_read_back_as_the_same_tree(node: Node) -> None:
    assert parse(render(node)) == node


@pytest.mark.parametrize(
    "texts",
    [
        ["type = region", "type <> region", "type > region", "type IN ('a', 'b') AND type = region", "type = type"],
        [f"n {operator} {bound}" for operator in ("<", "<=", ">", ">=") for bound in (1, 2, 2.5, 3)],
        [f"type = 'a' AND n {operator} {bound}" for operator in ("<", ">=") for bound in (1, 2, 3)],
        [f"n > {bound} AND region = '{region}' AND flag IS NULL" for bound in (1, 2) for region in ("a", "b", "c")],
        [f"region IN ('{region}', 2)" for region in "abcde"],
        [f"region IN ('{one}', '{two}') AND n = 2" for one in "abc" for two in "def"],
        [f"n = {bound}" for bound in ("1", "TRUE", "'1'", "1.0", "'TRUE'")],
        [f"NOT n {operator} 2" for operator in ("<", "<=", ">", ">=", "=", "<>")],
        ["type <> 'a'", "type <> 'b'", "NOT type IN ('a', 'b')", "NOT type = 'c' AND n > 1", "type IS NULL", "TRUE"],
        ["type = 'a' OR n = 2", "type = 'b' OR type IS NULL", "type IN ('a', 2)", "type LIKE 'a%' AND type <> 'ab'"],
    ],
)
def test_the_index_is_right_at_every_edge(texts: list[str]) -> None:
    nodes = [parse(text) for text in texts]
    index: FilterIndex[int] = FilterIndex()
    for key, node in enumerate(nodes):
        index.add(key, node)
    values = [None, "a", "b", "ab", "c", "1", "2", "2.0", "true"]
    numbers = [None, "0", "1", "1.0", "2", "2.5", "3", "4", "true", "x"]
    batch = [
        {name: value for name, value in {"type": kind, "region": region, "n": number}.items() if value is not None}
        for kind in values for region in values for number in numbers
    ]  # fmt: skip

    found = index.match_batch(batch)

    assert any(found)
    for headers, keys in zip(batch, found, strict=True):
        assert sorted(keys) == [key for key, node in enumerate(nodes) if naive.value_of(node, headers) is True]


@given(st.text("ab", max_size=8), st.text("ab%_", max_size=6))
@example("a", "%a%a%")
@example("aa", "%a%a%")
@example("a", "a%a")
@example("ab", "ab%b")
@example("ab", "a_%b")
@example("\n", "_")
@example("a\nb", "%_b")
def test_like_fits_what_its_definition_says(text: str, pattern: str) -> None:
    test = Like(Header("type"), pattern, None)

    assert compile_condition(test)({"type": text}) is naive.fits(text, pattern, None)


def test_an_index_that_was_emptied_holds_nothing() -> None:
    index: FilterIndex[int] = FilterIndex()
    for key, text in enumerate(["type = 'a'", "type <> 'a'", "region = 'x'", "type IN ('a', 'b') AND amount > 1"]):
        index.add(key, parse(text))
    assert index.match_batch([{"type": "a", "amount": "2"}]) == [[0, 3]]

    for key in range(4):
        index.remove(key)

    assert len(index) == 0
    assert index.match_batch([{"type": "a", "amount": "2"}]) == [[]]


def test_the_naive_judge_itself_knows_the_tables() -> None:
    unknown = Comparison(ComparisonOperator.EQ, Header("none"), "a")

    assert naive.value_of(Not(unknown), {}) is None
    assert naive.value_of(And((unknown, TRUE)), {}) is None
    assert naive.value_of(And((unknown, Not(TRUE))), {}) is False
