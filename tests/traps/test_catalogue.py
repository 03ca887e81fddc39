"""The catalogue of traps names tests that exist, and every trap that is fallen into here is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "traps.md"
ROW = re.compile(r"^\| ([HLVXFR]\d+[a-z]?(?:, [HLVXFR]\d+)*) \|(.*)\|$", re.MULTILINE)
WITHOUT_A_TEST = {"X7", "R16"}  # facts of a deployment: a guide or a benchmark has them
LAST = {"H": 12, "L": 13, "V": 6, "X": 11, "F": 8, "R": 18}


def functions_of(folder: Path) -> set[str]:
    """The names of the test functions in a folder."""
    return {
        node.name
        for path in folder.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def named() -> set[str]:
    """The tests that the catalogue names."""
    return set(re.findall(r"`(test_\w+)`", CATALOGUE.read_text())) - {"test_naive"}  # the prefix


def test_every_test_that_the_catalogue_names_exists() -> None:
    missing = sorted(named() - functions_of(ROOT / "tests"))

    assert len(named()) > 100
    assert missing == []


def test_every_trap_that_is_fallen_into_is_in_the_catalogue() -> None:
    fallen_into = {name for name in functions_of(Path(__file__).parent) if name.startswith("test_naive")}

    assert sorted(fallen_into - named()) == []


def test_every_trap_has_its_line_and_each_line_a_test() -> None:
    rows = ROW.findall(CATALOGUE.read_text())
    numbers = {number for numbers, _ in rows for number in numbers.split(", ")}
    wanted = {f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)}
    untested = {number for numbers, rest in rows if "`test_" not in rest for number in numbers.split(", ")}

    assert sorted(wanted - numbers) == []
    assert untested == WITHOUT_A_TEST
