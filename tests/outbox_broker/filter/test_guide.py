"""docs/guides/filters.md says what filters do: its examples and its limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outbox_broker.filter import compile_condition, compiler, parse, parser

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "filters.md").read_text()
EXAMPLES = re.findall(r"^\| `(.+)` \| `(\{.+\})` \| (yes|no) \|$", GUIDE, re.MULTILINE)
FORMS = [text for row in re.findall(r"^\| [^|]+ \| (`.*`.*) \|$", GUIDE.partition("## Types")[0], re.MULTILINE)
         for text in re.findall(r"`([^`]{5,})`", row)]  # fmt: skip


@pytest.mark.parametrize(("text", "headers", "taken"), EXAMPLES)
def test_an_example_of_the_guide_is_true(text: str, headers: str, taken: str) -> None:
    assert compile_condition(parse(text))(json.loads(headers)) is (taken == "yes")


@pytest.mark.parametrize("text", FORMS)
def test_every_form_of_the_guide_is_read(text: str) -> None:
    parse(text)


def test_there_are_examples_and_forms() -> None:
    assert len(EXAMPLES) >= 14
    assert len(FORMS) >= 14


@pytest.mark.parametrize(
    ("what", "bound"),
    [
        ("characters of a filter", parser.FILTER_CHARS_MAX),
        ("comparisons in it", parser.FILTER_TESTS_MAX),
        ("nesting of parentheses", parser.FILTER_DEPTH_MAX),
        ("values in an `IN`", parser.IN_VALUES_MAX),
        ("characters of a `LIKE` pattern", parser.LIKE_CHARS_MAX),
        ("characters of a number", compiler.NUMBER_CHARS_MAX),
    ],
)
def test_a_limit_of_the_guide_is_the_codes(what: str, bound: int) -> None:
    assert f"| {what} | {bound:,} |" in GUIDE
