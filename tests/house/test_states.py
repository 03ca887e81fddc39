"""docs/states.md names functions and records that exist, and every record that changes a state."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

from outbox_core.journal import journal

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "states.md").read_text()
ROOMS = ("outbox", "outbox_broker", "outbox_core")
NO_STATES = {
    "Acked",  # what Settled was in older logs
    "Checkpoint",  # all states so far
    "Delivered",  # what Handed was in older logs
    "Opened",  # a start of the broker
}


def attributes() -> dict[str, set[str]]:
    """The attributes of each class of the code: methods, fields, and what a constructor assigns."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found[node.name]
            for inner in ast.walk(node):
                match inner:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        names.add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        names.add(name)
    return found


def test_every_function_that_the_page_names_exists() -> None:
    named = re.findall(r"`(\w+)\.(\w+)`", PAGE)
    known = attributes()

    assert [f"{owner}.{name}" for owner, name in named if name not in known.get(owner, set())] == []
    assert len(named) > 15


def test_the_page_names_every_record_that_changes_a_state_and_no_other() -> None:
    records = {action.__name__ for action in get_args(journal.Action)}
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE))

    assert records - NO_STATES - named == set()
    assert named - records - attributes().keys() == set()
