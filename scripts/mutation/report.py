"""Prints what became of the mutants: a table by package, then the survivors with their place and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.mutation.run import Outcome

_TEXT_MAX = 160
_DEAD = {Outcome.KILLED, Outcome.TIMED_OUT}


def progress_line(mutant: Mapping[str, object], result: Mapping[str, Any]) -> str:
    """One mutant's line while the others run."""
    capped = " (capped)" if result.get("capped") else ""
    left_out = [f", {len(result[name])} {name}" for name in ("dropped", "gone") if result.get(name)]
    ran = "".join([f"{result['tests_run']}/{result['tests_covering']} tests", *left_out, f", {result['seconds']} s"])
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
        if result["outcome"] not in _DEAD:
            lines += ["", progress_line(by_number[result["number"]], result), *_change(by_number[result["number"]])]
    return "\n".join(lines)


def as_json(mutants: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The counts by package and outcome, and each mutant that no test killed, with its place, change and result."""
    by_number = {mutant["number"]: mutant for mutant in mutants}
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(_package(by_number[result["number"]]), Counter())[str(result["outcome"])] += 1
    survivors = [
        {name: value for name, value in {**by_number[result["number"]], **result}.items() if name != "covered_by"}
        for result in results
        if result["outcome"] not in _DEAD
    ]
    return {"mutants": len(mutants), "tried": len(results), "packages": counts, "survivors": survivors}


def _row(name: str, cells: Iterable[object]) -> str:
    return "".join([f"{name:<18}", *(f"{cell!s:>13}" for cell in cells)])


def _package(mutant: Mapping[str, object]) -> str:
    return str(mutant["path"]).partition("/")[0]


def _change(mutant: Mapping[str, object]) -> list[str]:
    texts = {"in": mutant["statement"], "-": mutant["before"], "+": mutant["after"]}
    return [f"      {sign} {str(text)[:_TEXT_MAX]}" for sign, text in texts.items()]
