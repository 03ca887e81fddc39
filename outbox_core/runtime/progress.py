"""Shows how far a long command is: a bar on a terminal, a line every few seconds elsewhere, or JSON for a program.

All of it goes to standard error: standard output has the command's result alone. Not for logs of services.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Final, Self, TextIO

import typer
from rich.console import Console

from outbox_core.common.clock import Clock, SystemClock

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

EVERY_MS: Final = 2_000
"""At most one line, or object, in this time."""
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS


class ProgressForm(StrEnum):
    """How progress is shown: for whoever looks at it, on a terminal or in a file, or for a program."""

    AUTO = "auto"
    JSON = "json"


ProgressOption = Annotated[
    ProgressForm,
    typer.Option("--progress", help="auto: a bar, or a line every two seconds; json: an object a line. On stderr."),
]


class Progress:
    """The progress of one command, as a context manager. Used by one thread at a time.

    A JSON object has `operation`, `done`, `total`, `left_ms` (null: nobody knows), `step` of a command that has steps,
    and the command's own figures. There is one at the first update and at each new step, one every two seconds, and the
    last state at the end, also of a command that fails. A line is written only while something is left.
    """

    def __init__(
        self, operation: str, *, form: ProgressForm, clock: Clock | None = None, steady: bool = False,
        shares: bool = False, file: TextIO | None = None,
    ) -> None:  # fmt: skip
        """`steady`: the rest takes as long a piece as what is done, so the time left can be estimated. `shares`: what
        is done and the total are shares of the work, nothing that people count. `file`: instead of standard error.
        """
        self._operation = operation
        self._form = form
        self._clock = SystemClock() if clock is None else clock
        self._steady = steady
        self._shares = shares
        self._file = file
        self._step = ""
        self._begun_ms = self._clock.monotonic_ms()
        self._shown_ms: int | None = None
        self._unshown: dict[str, object] | None = None
        self._console = Console(file=file, stderr=file is None)
        self._bar: tuple[Bar, TaskID] | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at it, and at what comes later in its place."""
        return self._console.is_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()
        if self._unshown is not None:
            self._print_json(self._unshown)

    def update(
        self, done: int, total: int, *, left_ms: int | None = None, step: str = "", note: str = "",
        figures: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Show that so much is done, of so much. `left_ms`: for how long it goes on, where that is known; `step`: what
        is being done now, shown at once where it is new; `note`: what people are told beside it, and `figures` what
        programs are.
        """
        if left_ms is None and self._steady and done:
            left_ms = (self._clock.monotonic_ms() - self._begun_ms) * max(0, total - done) // done
        time_left = "" if left_ms is None else f"{_duration_text(left_ms)} left"
        is_new = step != self._step
        self._step = step
        if self._form is ProgressForm.JSON:
            self._unshown = {
                "operation": self._operation, "done": done, "total": total, "left_ms": left_ms,
                **({"step": step} if step else {}), **(figures or {}),
            }  # fmt: skip
            if self._is_time() or is_new:
                self._print_json(self._unshown)
        elif self._console.is_terminal:
            self._draw(done, total, beside="; ".join(filter(None, (step, note, time_left))))
        elif done < total and (self._is_time() or is_new):
            percent = f"{100 * done // total} %"
            share = percent if self._shares else f"{done:,} of {total:,} ({percent})"
            self._print("; ".join(filter(None, (f"{self._operation}: {share}", step, note, time_left))))

    def tell(self, line: str) -> None:
        """Print a line for people that stays there, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_time(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        if self._shown_ms is not None and now_ms - self._shown_ms < EVERY_MS:
            return False
        self._shown_ms = now_ms
        return True

    def _print_json(self, state: dict[str, object]) -> None:
        self._unshown = None
        self._print(json.dumps(state))

    def _print(self, line: str) -> None:
        typer.echo(line, file=self._file, err=True)

    def _draw(self, done: int, total: int, *, beside: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn  # 30 ms
            from rich.progress import Progress as Bar

            counted = TaskProgressColumn() if self._shares else MofNCompleteColumn()
            columns = (
                TextColumn("{task.description}"), BarColumn(), counted,
                TextColumn("{task.fields[beside]}", markup=False),
            )  # fmt: skip
            bar = Bar(*columns, console=self._console, transient=True)
            self._bar = bar, bar.add_task(self._operation, total=total, beside=beside)
            bar.start()
        bar, task = self._bar
        bar.update(task, completed=done, total=total, beside=beside)


def _duration_text(ms: int) -> str:
    """Returns a duration as people say it: in the two units that matter."""
    seconds = -(-ms // 1_000)
    if ms < _MINUTE_MS:
        return f"{seconds} s"
    if ms < _HOUR_MS:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds // 60 % 60} min"
