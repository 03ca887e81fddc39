"""Prints what became of the mutants: a table by package, then the survivors with their place and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from scripts.mutation.run import Outcome

_TEXT_MAX = 160


def progress_line(mutant: Mapping[str, object], result: Mapping[str, object]) -> str:
    """One mutant's line while the others run."""
    capped = " (capped)" if result.get("capped") else ""
    ran = f"{result['tests_run']}/{result['tests_covering']} tests, {result['seconds']} s"
    return f"{result['number']:>3} {result['outcome']}{capped}: {place(mutant)}, {mutant['operator']}; {ran}"


def place(mutant: Mapping[str, object]) -> str:
    """Where an editor finds it, and the function's name for a later tree."""
    return f"{mutant['path']}:{mutant['line']} {mutant['qualname']}"


def table(mutants: Sequence[Mapping[str, object]], results: Sequence[Mapping[str, object]]) -> str:
    """Counts by package, and those that no test killed."""
    by_number = {mutant["number"]: mutant for mutant in mutants}
    counts = Counter((_package(by_number[result["number"]]), str(result["outcome"])) for result in results)
    used = [column for column in Outcome if any(outcome == column for _, outcome in counts)]
    totals = Counter(str(result["outcome"]) for result in results)
    lines = [
        _row("package", used),
        *(
            _row(package, [counts[package, column] for column in used])
            for package in sorted({key[0] for key in counts})
        ),
        _row("all", [totals[column] for column in used]),
    ]
    for result in results:
        if result["outcome"] not in {Outcome.KILLED, Outcome.TIMED_OUT}:
            lines += ["", progress_line(by_number[result["number"]], result), *_change(by_number[result["number"]])]
    return "\n".join(lines)


def _row(name: str, cells: Iterable[object]) -> str:
    return "".join([f"{name:<18}", *(f"{cell!s:>13}" for cell in cells)])


def _package(mutant: Mapping[str, object]) -> str:
    return str(mutant["path"]).partition("/")[0]


def _change(mutant: Mapping[str, object]) -> list[str]:
    texts = {"in": mutant["statement"], "-": mutant["before"], "+": mutant["after"]}
    return [f"      {sign} {str(text)[:_TEXT_MAX]}" for sign, text in texts.items()]
