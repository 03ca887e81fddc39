"""How dead letters are shown to people: a table. Not how they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox_core.runtime.terminal_text import moment, plain

NO_ID: Final = "(damaged)"
PIPED_WIDTH: Final = 1_000
"""What goes to a file, or another program, has a line for each entry of a history."""


def print_dead(letters: Sequence[Mapping[str, Any]], *, following: str | None) -> None:
    """A page of dead letters, and how the next one is asked for."""
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
    for one in letters:
        table.add_row(
            Text(plain(one["id"]) or NO_ID), str(one["attempts"]), moment(one["dead_at_ms"]),
            Text(plain(one["reason"])), Text(_history(one["history"])),
        )  # fmt: skip
    console.print(table)
    if following is not None:
        console.print(f"more: --after {plain(following)}", markup=False, highlight=False)


def _history(failures: Sequence[Mapping[str, Any]]) -> str:
    """So many attempts, and what went wrong: a line for those that failed alike one after the other."""
    return "\n".join(f"{one['attempts']} x {plain(one['reason'])}" for one in failures)
