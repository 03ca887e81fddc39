"""Help pages of all commands, as a terminal of 80 columns shows them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator

import pytest

from outbox_core.runtime import command


def page(*path: str) -> str:
    """The help page of a command or a group of commands."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        command.main([*path, "--help"])
    assert ended.value.code == 0
    return shown.getvalue()


def pages(*path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The pages of a group and of all that is in it."""
    text = page(*path)
    yield path, text
    _, _, listed = text.partition("\nCommands:\n")
    for name in re.findall(r"^  ([a-z-]+)", listed, re.MULTILINE):
        yield from pages(*path, name)


def test_every_command_has_an_example_and_a_line_that_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    found = dict(pages())

    assert len(found) > 25
    cut = [
        line
        for text in found.values()
        for line in text.splitlines()
        if line.endswith("...") and not line.startswith("Usage: ")
    ]
    assert cut == [], "a command's first sentence is too long for the list that it stands in"
    leaves = [path for path, text in found.items() if "\nCommands:\n" not in text]
    assert [path for path in leaves if "Example" not in found[path]] == []
    usages = {path: found[path].splitlines()[0] for path in leaves}
    assert [path for path, usage in usages.items() if usage.endswith("COMMAND [ARGS]...")] == []
