"""Reports the steps of a run: by a status line on a terminal, elsewhere by a line of each step with the time so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Monotonic = Callable[[], float]


@contextmanager
def step_progress(console: Console, *, monotonic: Monotonic, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each step as it begins; `quiet`: without a terminal nothing is shown.

    The status line shows at once that sources are checked. Without a terminal nothing is written before the first step,
    so that a refused setting stays one line.
    """
    started = monotonic()
    if not console.is_terminal:

        def write_line(step: str) -> None:
            if not quiet:
                console.print(f"{monotonic() - started:7.1f} s  {step}", markup=False, soft_wrap=True)

        yield write_line
        return
    with console.status("checking the sources") as status:
        yield lambda step: status.update(f"{step} ({monotonic() - started:.0f} s)")
