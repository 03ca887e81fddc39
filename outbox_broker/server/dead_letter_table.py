"""Prints dead letters as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox_core.runtime.terminal_text import escaped, utc_text

NO_ID: Final = "(damaged)"
PIPED_WIDTH: Final = 1_000
"""Output to a file or another program uses one line per entry of a history."""


def print_dead(letters: Sequence[Mapping[str, Any]], *, following: str | None) -> None:
    """Print a page of dead letters, and the option for the next one."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    if not letters:
        console.print("no dead letters", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "attempts", "when", "reason", "how they went"):
        table.add_column(
            name, overflow="fold", no_wrap=name == "id", justify="right" if name == "attempts" else "left"
        )  # ids are copied
    for letter in letters:
        table.add_row(
            Text(escaped(letter["id"]) or NO_ID), str(letter["attempts"]), utc_text(letter["dead_at_ms"]),
            Text(escaped(letter["reason"])), Text(_history(letter["history"])),
        )  # fmt: skip
    console.print(table)
    if following is not None:
        console.print(f"more: --after {escaped(following)}", markup=False, highlight=False)


def _history(failures: Sequence[Mapping[str, Any]]) -> str:
    """Returns a history as text: number of attempts and reason, one line per group of equal consecutive failures."""
    return "\n".join(f"{failure['attempts']} x {escaped(failure['reason'])}" for failure in failures)
