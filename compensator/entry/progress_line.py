"""Shows a progress line on a terminal while a large backlog is sent; nothing without a terminal, or for few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compensator.core.batch_totals import BatchTotals
from compensator.work.source import Source
from outbox_core.common.errors import OutboxError

WORTH_ROWS: Final = 1_000


@contextmanager
def progress_line(sources: Sequence[Source], console: Console) -> Iterator[Callable[[BatchTotals], None]]:
    """Yields a function to call with each report; the total is the number of pending rows, counted up to a bound."""
    pending_rows = _pending(sources) if console.is_terminal else 0
    if pending_rows < WORTH_ROWS:
        yield lambda _report: None
        return
    columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("sending", total=pending_rows)
        yield lambda report: progress.update(task, completed=report.claimed, total=max(pending_rows, report.claimed))


def _pending(sources: Sequence[Source]) -> int:
    total = 0
    for source in sources:
        try:
            total += source.counts().pending
        except OutboxError:
            continue  # the pass reports the error
    return total
