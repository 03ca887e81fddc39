"""Runs the covering tests against each mutant, and says which mutants they kill.

A mutant counts as killed when a test fails with it and the same test passes without it. A test that fails without it as
well is dropped for that mutant and named in the result; so is a covering test that the tree does not have any more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from scripts.mutation.sites import Site, mutate
from scripts.mutation.workspace import PytestRun, Workspace

SECONDS_MIN = 120
SECONDS_FACTOR = 3
COLLECT_SECONDS_MAX = 600
FIRST_CHUNK_TESTS = 150
FIRST_CHUNK_SECONDS = 15
DROPPED_TESTS_MAX = 5
_USAGE_ERROR = 4  # of pytest: a test that it does not find, or a conftest that fails
_NOTHING_COLLECTED = 5  # of pytest


class Outcome(StrEnum):
    """What became of a mutant. A time-out counts as killed."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_COVERED = "not covered"
    NOT_FOUND = "not found"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Test:
    """A covering test and the seconds that it took in the covering run."""

    __test__ = False

    node_id: str
    seconds: float
    parametrizations: int = 1  # of its function, of which the covering run took this one


@dataclass(slots=True)
class Result:
    """What became of one mutant, and what was run for it."""

    number: int
    outcome: Outcome
    killed_by: str = ""
    tests_run: int = 0
    tests_covering: int = 0
    capped: bool = False  # survived, but the bound left out covering tests
    seconds: float = 0.0
    dropped: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # covering tests that the tree does not have

    def as_json(self) -> dict[str, object]:
        """For the file of results."""
        return asdict(self)


def widen(tests: Sequence[Test]) -> list[Test]:
    """The whole functions, with all parametrizations, of those tests whose function was sampled."""
    widened: dict[str, Test] = {}
    for test in tests:
        function = test.node_id.partition("[")[0]
        if test.parametrizations > 1:
            seconds = test.seconds * test.parametrizations
            widened[function] = Test(function, seconds=seconds, parametrizations=test.parametrizations)
    return sorted(widened.values(), key=lambda test: (test.seconds, test.node_id))


def select_tests(tests: Sequence[Test], *, seconds_max: float, seed: int) -> list[Test]:
    """Within the seconds allowed: the fastest for half of them, then a seeded sample of the others. 0: no bound."""
    if not seconds_max or sum(test.seconds for test in tests) <= seconds_max:
        return list(tests)
    fastest_first = sorted(tests, key=lambda test: (test.seconds, test.node_id))
    chosen: list[Test] = []
    spent = 0.0
    while fastest_first and spent + fastest_first[0].seconds <= seconds_max / 2:
        chosen.append(fastest_first.pop(0))
        spent += chosen[-1].seconds
    for test in random.Random(seed).sample(fastest_first, len(fastest_first)):
        if spent + test.seconds <= seconds_max or not chosen:
            chosen.append(test)
            spent += test.seconds
    return chosen


def chunks(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """A first chunk of the fastest tests, which kill most mutants, then all others; each file's tests together."""
    fastest_first = sorted(tests, key=lambda test: (test.seconds, test.node_id))
    count, spent = 0, 0.0
    for test in fastest_first[:FIRST_CHUNK_TESTS]:
        spent += test.seconds
        if count and spent > FIRST_CHUNK_SECONDS:
            break
        count += 1
    for chunk in (fastest_first[:count], fastest_first[count:]):
        if chunk:
            yield _by_file(chunk)


def _by_file(tests: Sequence[Test]) -> list[Test]:
    first: dict[str, int] = {}
    for place, test in enumerate(tests):
        first.setdefault(test.node_id.partition("::")[0], place)
    return sorted(tests, key=lambda test: first[test.node_id.partition("::")[0]])


class MutantRunner:
    """Tries mutants in one workspace, one after the other."""

    def __init__(self, workspace: Workspace, *, pytest_arguments: Sequence[str], log: Path) -> None:
        self._workspace = workspace
        self._arguments = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *pytest_arguments]
        self._log = log

    def run(self, number: int, site: Site, tests: Sequence[Test], *, seconds_max: float) -> Result:
        """Apply the mutation, run the tests that reach it as far as the bound allows, and restore the module.

        Raises StoppedError after `stop`.
        """
        began = time.monotonic()
        result = Result(number=number, outcome=Outcome.SURVIVED, tests_covering=len(tests))
        source = (self._workspace.folder / site.path).read_bytes()
        for wave in (tests, widen(tests)):
            selected = select_tests(wave, seconds_max=seconds_max, seed=number)
            for chunk in chunks(selected):
                if result.outcome is Outcome.SURVIVED:
                    self._run_chunk(site, source, chunk, result)
            result.capped = result.outcome is Outcome.SURVIVED and (result.capped or len(selected) < len(wave))
        if result.outcome is Outcome.SURVIVED and not result.tests_run:
            result.outcome = Outcome.UNDECIDED if result.dropped else Outcome.NOT_COVERED
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def stop(self) -> None:
        """End the tests that run in another thread."""
        self._workspace.stop()

    def _run_chunk(self, site: Site, source: bytes, chunk: Sequence[Test], result: Result) -> None:
        left = list(chunk)
        while left:
            dropped = [f"--deselect={node_id}" for node_id in result.dropped]
            run = self._pytest(left, dropped, f"mutant {result.number}", site.path, mutate(source, site), source)
            passed = {record.node_id for record in run.records if record.outcome == "passed"}
            result.tests_run += len(passed)
            if run.exit_code == 0 or (run.exit_code == _NOTHING_COLLECTED and dropped):
                return
            if run.exit_code is None:
                result.outcome, result.killed_by = Outcome.TIMED_OUT, ", ".join(run.unfinished)
                return
            if run.exit_code == _USAGE_ERROR and (gone := self._gone(left)):
                result.gone += gone
                left = [test for test in left if test.node_id not in gone]
                continue
            suspect = _suspect(run, left)
            alone = self._pytest([suspect], [], f"mutant {result.number}, without it", site.path, source, source)
            if alone.exit_code == 0:
                result.outcome, result.killed_by = Outcome.KILLED, suspect.node_id
                result.tests_run += 1
                return
            result.dropped.append(suspect.node_id)
            if len(result.dropped) >= DROPPED_TESTS_MAX:
                result.outcome = Outcome.UNDECIDED
                return
            left = [test for test in left if test.node_id not in {*passed, suspect.node_id}]

    def _gone(self, tests: Sequence[Test]) -> list[str]:
        """The tests that the tree, without a mutation, does not have: pytest runs none of a list that names one."""
        files = sorted({test.node_id.partition("::")[0] for test in tests})
        there = [file for file in files if (self._workspace.folder / file).exists()]
        listed: set[str] = set()
        if there:
            run = self._workspace.run_pytest(
                [*self._arguments, "--collect-only", *there], seconds_max=COLLECT_SECONDS_MAX, output=self._log
            )
            listed = {record.node_id for record in run.records if record.outcome == "listed"}
        listed |= {node_id.partition("[")[0] for node_id in listed}
        return [test.node_id for test in tests if test.node_id not in listed]

    def _pytest(
        self, tests: Sequence[Test], dropped: Sequence[str], title: str, path: str, tried: bytes, restored: bytes
    ) -> PytestRun:
        arguments = self._workspace.folder / ".venv" / "tests.txt"
        arguments.write_text("\n".join(test.node_id for test in tests))
        with self._log.open("a") as log:
            log.write(f"\n#### {title}: {len(tests)} tests\n")
        try:
            self._workspace.write(path, tried)
            return self._workspace.run_pytest(
                [*self._arguments, *dropped, f"@{arguments}"],
                seconds_max=SECONDS_MIN + SECONDS_FACTOR * sum(test.seconds for test in tests),
                output=self._log,
            )
        finally:
            self._workspace.write(path, restored)


def _suspect(run: PytestRun, tests: Sequence[Test]) -> Test:
    """The test that failed, or in which pytest died; where none began (an import fails), the first."""
    failed = [record.node_id for record in run.records if record.outcome == "failed"]
    name = next(iter([*failed, *run.unfinished]), tests[0].node_id)
    own = (test for test in tests if test.node_id in {name, name.partition("[")[0]})
    return replace(next(own, tests[0]), node_id=name)


def tests_of(mutant: Mapping[str, object], tests: Sequence[Sequence[Any]]) -> list[Test]:
    """The covering tests of a mutant in the file that `cover` wrote."""
    covered_by = mutant["covered_by"]
    assert isinstance(covered_by, list)
    return [Test(*tests[place]) for place in covered_by]
