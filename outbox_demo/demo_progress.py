"""What the demonstration tells while it runs: what has happened, and how far it is. On standard error alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outbox_core.common.clock import Clock, SystemClock
from outbox_core.runtime.progress import Progress, ProgressForm

OPERATIONS: Final = ("load", "book", "settle", "prove")
"""What is done one after the other, with a count of its own each."""


class DemoProgress:
    """The progress of one operation after the other, and lines about what happened meanwhile. Used by one thread.

    A program is told each line as the step of the operation, or, between two, of the operation `demo`, which counts
    those that are done.
    """

    def __init__(self, *, form: ProgressForm, clock: Clock | None = None) -> None:
        self._form = form
        self._clock = clock or SystemClock()
        self._begun_ms = self._clock.monotonic_ms()
        self._whole = Progress("demo", form=form, clock=self._clock)
        self._operation: Progress | None = None
        self._counted = 0, 1
        self._operations_done = 0

    def say(self, line: str) -> None:
        """Tell what has happened."""
        if self._form is not ProgressForm.JSON:
            seconds = (self._clock.monotonic_ms() - self._begun_ms) / 1000
            (self._operation or self._whole).tell(f"[{seconds:6.1f} s] {line}")
        elif self._operation is not None:
            self._operation.update(*self._counted, step=line)
        else:
            self._whole.update(self._operations_done, len(OPERATIONS), step=line)

    def count(self, done: int, total: int, *, left_ms: int | None = None, step: str = "") -> None:
        """Show how far the operation is."""
        self._counted = done, total
        if self._operation is not None:
            self._operation.update(done, total, left_ms=left_ms, step=step)

    @contextmanager
    def operation(self, name: str, *, steady: bool = True, shares: bool = False) -> Iterator[None]:
        """One of OPERATIONS begins, and ends with this context."""
        self._counted = 0, 1
        with Progress(name, form=self._form, clock=self._clock, steady=steady, shares=shares) as progress:
            self._operation = progress
            try:
                yield
            finally:
                self._operation = None
        self._operations_done += 1
