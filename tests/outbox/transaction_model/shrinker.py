"""Makes a failing program small: leaves out steps as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tests.outbox.transaction_model.steps import Finish, Program, Step, WithBody

RUNS_MAX: Final = 400


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Returns a program that still fails, and does not without any one of its steps, within RUNS_MAX runs."""
    runs = 0

    def still_fails(candidate: Program) -> bool:
        nonlocal runs
        runs += 1
        return runs <= RUNS_MAX and fails(candidate)

    while True:
        smaller = next((candidate for candidate in _smaller(program) if still_fails(candidate)), None)
        if smaller is None:
            return program
        program = smaller


def _smaller(program: Program) -> Iterator[Program]:
    """Smaller programs, the smallest first."""
    for steps in _without_some(program.steps):
        yield replace(program, steps=steps)
    if program.finish is Finish.DROP:
        yield replace(program, finish=Finish.CLOSE)


def _without_some(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Ever shorter spans are left out, as delta debugging does; then bodies get smaller, or stand for their calls."""
    length = len(steps) // 2
    while length >= 1:
        for begin in range(0, len(steps), length):
            yield steps[:begin] + steps[begin + length :]
        length //= 2
    if len(steps) == 1:
        yield ()
    for index, step in enumerate(steps):
        if isinstance(step, WithBody):
            yield steps[:index] + step.body + steps[index + 1 :]
            for body in _without_some(step.body):
                yield (*steps[:index], replace(step, body=body), *steps[index + 1 :])
