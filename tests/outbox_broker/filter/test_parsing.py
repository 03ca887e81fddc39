"""What can be said in a filter, what is refused, and that a refusal says where and how to mend it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.filter import FilterError, compile_condition, parse, render
from outbox_broker.filter.parser import (
    FILTER_CHARS_MAX,
    FILTER_DEPTH_MAX,
    FILTER_TESTS_MAX,
    IN_VALUES_MAX,
    LIKE_CHARS_MAX,
)
from outbox_core.common.errors import UsageError

ORDER = {"type": "order.paid", "amount": "120.50", "region": "eu", "vip": "TRUE", "content-type": "text/plain", "n": ""}


@pytest.mark.parametrize(
    "text",
    [
        "type = 'order.paid'",
        "'order.paid' = type",
        "type <> 'order.made'",
        "amount > 100 AND amount <= 120.5 AND 100 < amount",
        "amount BETWEEN 100 AND 121",
        "amount NOT BETWEEN 1 AND 2",
        "region IN ('us', 'eu')",
        "region NOT IN ('us', 'cn')",
        "amount IN (1, 120.5, 'x')",
        "type LIKE 'order.%'",
        "type LIKE 'order_p%d'",
        "type NOT LIKE 'trip.%'",
        "content-type LIKE 'text/%'",
        "region LIKE 'eu'",
        "missing IS NULL AND region IS NOT NULL AND n IS NOT NULL AND n = ''",
        "vip = TRUE AND vip <> FALSE AND TRUE",
        "NOT region = 'us'",
        "NOT (region = 'us' OR amount < 1)",
        "region = 'us' OR region = 'eu' AND amount > 1",
        "region >= 'ea' AND region < 'ev'",
        '"type" = \'order.paid\' and not "in" is not null',
        "1 = 1",
        "type=region or(type<>region)",
        "\t type\n=\r'order.paid' ",
    ],
)
def test_this_order_matches(text: str) -> None:
    assert compile_condition(parse(text))(ORDER)


@pytest.mark.parametrize(
    "text",
    [
        "missing = 'x'",
        "missing <> 'x'",
        "NOT missing = 'x'",
        "missing IN ('x')",
        "missing NOT IN ('x')",
        "missing NOT LIKE 'x%'",
        "missing NOT BETWEEN 1 AND 2",
        "region > 5",
        "NOT region > 5",
        "region <> 5",
        "region NOT IN ('x', 5)",
        "region = TRUE",
        "region <> TRUE",
        "n = 0",
        "region < amount",
        "NOT region < amount",
        "type = missing OR type <> missing",
        "TYPE = 'order.paid'",
        "type = 'ORDER.PAID'",
        "1 = 2",
    ],
)
def test_this_order_does_not_match(text: str) -> None:
    assert not compile_condition(parse(text))(ORDER)


@pytest.mark.parametrize(
    ("text", "position", "cure"),
    [
        ("", None, "leave it out"),
        (" \n", None, "leave it out"),
        ("type", 5, "a comparison expected"),
        ("type =", 7, "a text in single quotes"),
        ("type == 'a'", 7, "write = for equal"),
        ("type != 'a'", 6, "write <>"),
        ("type = 'a' && n = 1", 12, "write AND"),
        ("type = 'a' || n = 1", 12, "write OR"),
        ("type = 'a", 8, "not closed"),
        ("type = 'it's'", 13, "not closed"),
        ('"type = 1', 1, "not closed"),
        ('type = "order paid"', 8, "single quotes"),
        ("type = NULL", 8, "write IS NULL"),
        ("type IS 'a'", 9, "NULL expected"),
        ("type NOT 'a'", 10, "IN or BETWEEN or LIKE expected"),
        ("type IN ()", 10, "a text in single quotes"),
        ("type IN ('a', NULL)", 15, "IS NULL"),
        ("type IN (region)", 10, "texts and numbers only"),
        ("'a' IN ('a')", 1, "the name of a header"),
        ("5 LIKE '5'", 1, "the name of a header"),
        ("TRUE IS NULL", 1, "the name of a header"),
        ("type LIKE 5", 11, "a text in single quotes"),
        ("type LIKE 'a!b%' ESCAPE '!'", 11, "only before"),
        ("type LIKE 'a!' ESCAPE '!'", 11, "only before"),
        ("type LIKE 'a%' ESCAPE '!!'", 23, "one character"),
        ("vip < TRUE", 1, "= and <> only"),
        ("TRUE < FALSE", 1, "= and <> only"),
        ("1 = 'x'", 1, "different types"),
        ("1 = TRUE", 1, "different types"),
        ("n = 1e999", 5, "range of a double"),
        ("n = 5x", 5, "cannot stand here"),
        ("n + 1 = 2", 3, "no arithmetic"),
        ("n * 1 = 2", 3, "no arithmetic"),
        ("n = 1; n = 2", 6, "semicolon"),
        ("naïve = 1", 3, "double quotes"),
        ("(n = 1", 7, "closing parenthesis"),
        ("n = 1)", 6, "the end expected"),
        ("and = 1", 1, "a header"),
        ("n = 1 n = 2", 7, "AND or OR or the end expected"),
        ("n = '\ud800'", 6, "UTF-8"),
    ],
)
def test_a_refusal_says_where_and_how_to_mend_it(text: str, position: int | None, cure: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)

    assert cure in str(caught.value)
    assert caught.value.position == position
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("a = '" + "x" * FILTER_CHARS_MAX + "'", f"{FILTER_CHARS_MAX:,}"),
        ("(" * (FILTER_DEPTH_MAX + 1) + "a = 1" + ")" * (FILTER_DEPTH_MAX + 1), str(FILTER_DEPTH_MAX)),
        (" OR ".join(["a = 1"] * (FILTER_TESTS_MAX + 1)), str(FILTER_TESTS_MAX)),
        (f"a IN ({', '.join(map(str, range(IN_VALUES_MAX + 1)))})", f"{IN_VALUES_MAX:,}"),
        (f"a LIKE '{'x' * LIKE_CHARS_MAX}%'", str(LIKE_CHARS_MAX)),
        (f"a = {'1' * 65}", "64"),
        ('"' + "a" * 129 + '" = 1', "128"),
        ("(" * (FILTER_CHARS_MAX - 5) + "a = 1", str(FILTER_DEPTH_MAX)),
        ("NOT (" * 3_000 + "a = 1", str(FILTER_DEPTH_MAX)),
    ],
)
def test_whatever_is_too_large_is_refused_naming_the_bound(text: str, bound: str) -> None:
    with pytest.raises(FilterError, match=bound):
        parse(text)


def test_the_largest_that_is_allowed_is_read_compiled_and_rendered() -> None:
    values = ", ".join(f"'{number}'" for number in range(IN_VALUES_MAX))
    depth = FILTER_DEPTH_MAX - 1  # and the list
    deep = "(a = 1 OR b = 2 AND " * depth + f"c IN ({values})" + ")" * depth
    long = "NOT " * 1_001 + " OR ".join(f"a = {number}" for number in range(FILTER_TESTS_MAX))

    for text in (deep, long):
        node = parse(text)

        assert parse(render(node)) == node
        assert compile_condition(node)({"a": "1", "b": "2", "c": "5"})


@given(st.text())
def test_any_text_is_read_or_refused_and_nothing_else_happens(text: str) -> None:
    _read_or_refused(text)


@given(
    st.lists(
        st.sampled_from(
            ["type", '"in"', "'a'", "''", "1", "-1.5e3", "=", "<>", "<=", "AND", "or", "Not", "IN", "BETWEEN", "LIKE",
             "ESCAPE", "IS", "NULL", "TRUE", "(", ")", ",", "'a%'", "'!'", "'", '"', "--", "é"]
        ),
        max_size=12,
    ),
    st.sampled_from(["", " "]),
)  # fmt: skip
def test_any_run_of_words_is_read_or_refused(words: list[str], between: str) -> None:
    _read_or_refused(between.join(words))


def test_a_hostile_pattern_takes_no_longer_than_text_times_pattern() -> None:
    # A backtracking matcher would not come back in this universe's time.
    text = "a" * 32_000
    patterns = ["%a" * 120 + "%b", "%a_" * 80 + "%b%", "%" * 255 + "b", "_%" * 127 + "b", "%" + "_a" * 120 + "b%"]

    for pattern in patterns:
        assert not compile_condition(parse(f"h LIKE '{pattern}'"))({"h": text})


def test_a_header_with_more_digits_than_are_read_is_no_number() -> None:
    condition = compile_condition(parse("n > 0 OR n <= 0"))

    assert condition({"n": "9" * 64})
    assert not condition({"n": "9" * 32_000})


@pytest.mark.parametrize("text", ["1e999", "-1e999", "nan", "Infinity", "0x10", "1_0", " 1", "1 ", "٣", "", ".", "1e"])
def test_what_programs_do_not_agree_to_be_a_number_is_none(text: str) -> None:
    for condition in ("n > 0", "n <= 0", "NOT n > 0", "n IN (1, 2)", "n NOT IN (1, 2)", "n BETWEEN 0 AND 1"):
        assert not compile_condition(parse(condition))({"n": text})


def test_integers_are_exact_beyond_what_a_double_holds() -> None:
    condition = compile_condition(parse("id = 9007199254740993"))

    assert condition({"id": "9007199254740993"})
    assert not condition({"id": "9007199254740992"})


def _read_or_refused(text: str) -> None:
    try:
        node = parse(text)
    except FilterError as error:
        refusal = error
    else:
        assert parse(render(node)) == node
        return
    assert refusal.position is None or 1 <= refusal.position <= len(text) + 1
    assert str(refusal)
