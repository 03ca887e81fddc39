"""The suite comes to its end whatever a test does to its worker, and few workers have a session of Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.fixtures.scheduling import (
    FILES_A_SESSION,
    MANY_SPARK_TESTS,
    MANY_TESTS,
    SESSION,
    FileScheduling,
    order_for_workers,
)

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 300
CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.fixtures.scheduling import FileScheduling
    return FileScheduling(config, log)
"""
TESTS = """
import os
import time
import pytest

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    if __name__.endswith("b") and number == 1:
        os._exit(1)
    time.sleep(0.05)
"""


def test_a_run_ends_and_names_the_test_that_ended_its_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:randomly", "-p", "no:schemathesis",
            "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path),
        ],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS_MAX,
    )  # fmt: skip

    assert "1 failed, 11 passed" in run.stdout, run.stdout + run.stderr
    assert "test_b.py::test_number[1]" in run.stdout


@dataclass(eq=False, slots=True)
class Worker:
    """A worker as the scheduler sees it: what it was given, and not that it runs anything."""

    gateway: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="gw"))
    waiting: list[int] = field(default_factory=list)
    shutting_down: bool = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize(
    ("spark_files", "processors", "sessions"),
    [(FILES_A_SESSION, 2, 1), (2 * FILES_A_SESSION, 1, 1), (2 * FILES_A_SESSION, 2, 2), (9 * FILES_A_SESSION, 2, 2)],
)
def test_a_further_session_begins_only_once_all_else_is_done_and_where_it_pays(
    spark_files: int, processors: int, sessions: int
) -> None:
    with_session = (
        path for path in sorted(ROOT.glob("tests/spark_reconcile/test_*.py")) if SESSION in path.read_text()
    )
    of_spark = [path.relative_to(ROOT).as_posix() for path, _ in zip(with_session, range(spark_files), strict=False)]
    plain = [f"tests/outbox/test_{number}.py" for number in range(8)]
    tests = [f"{file}::test_{number}" for file in (*of_spark, *plain) for number in range(3)]

    given = list(_run(processors, tests))

    assert sorted(test for _, test in given) == sorted(tests)
    by_worker = [[test for one, test in given if one is worker] for worker in dict.fromkeys(one for one, _ in given)]
    having = [some for some in by_worker if any(test.startswith(tuple(of_spark)) for test in some)]
    assert len(having) == sessions
    for some in having[1:]:
        assert some[0].startswith("tests/outbox/")
    assert sum(test.startswith("tests/outbox/") for test in having[0]) == 0


def test_what_takes_longest_is_begun_first() -> None:
    tests: list[tuple[str, int, set[str]]] = [
        ("tests/outbox/test_quick.py", 1, set()), ("tests/outbox/test_slow.py", 1, {"slow"}),
        ("tests/outbox/test_many.py", MANY_TESTS, set()), ("tests/outbox/test_programs.py", 1, {"processes", "slow"}),
        ("tests/outbox_demo/test_demo.py", 1, {"spark", "processes"}),
        ("tests/spark_reconcile/test_verdicts.py", 1, {"spark"}),
        ("tests/spark_reconcile/test_windows.py", MANY_SPARK_TESTS, {"spark"}),
    ]  # fmt: skip
    items: list[Any] = [
        SimpleNamespace(path=path, nodeid=f"{path}::test_{number}", get_closest_marker=marks.__contains__)
        for path, count, marks in tests
        for number in range(count)
    ]

    order_for_workers(items)

    begun = [Path(path).stem.removeprefix("test_") for path in dict.fromkeys(item.path for item in items)]
    assert begun == ["windows", "verdicts", "demo", "programs", "slow", "many", "quick"]


def _run(processors: int, tests: Sequence[str]) -> Iterator[tuple[Worker, str]]:
    """Each test with the one of three workers that runs it. In turn each runs one, once it has another behind it, or
    knows that no more will come.
    """
    config: Any = SimpleNamespace(getvalue=lambda _: ["3*popen"], option=SimpleNamespace(loadscopereorder=False))
    workers: list[Any] = [Worker() for _ in range(3)]
    scheduling = FileScheduling(config, Producer("scheduling", enabled=False), processors=processors)
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    while not scheduling.tests_finished or any(worker.waiting for worker in workers):
        if scheduling.tests_finished:
            for worker in workers:
                worker.shutdown()
        for worker in workers:
            if len(worker.waiting) > 1 or (worker.waiting and worker.shutting_down):
                index = worker.waiting.pop(0)
                yield worker, tests[index]
                scheduling.mark_test_complete(worker, index)
