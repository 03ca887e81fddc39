"""The pytest plugin of a workspace: says which test runs, and records how each ended and how long it took."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from typing import TYPE_CHECKING

import mutation_probe  # type: ignore[import-not-found]  # as probe.py is installed

if TYPE_CHECKING:
    import pytest

_index = 0
_running = ""
_seconds = 0.0
_outcome = "passed"


def pytest_configure() -> None:
    """Attribute what runs before the first test (imports, collection) to index 0."""
    mutation_probe.announce(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record what is only collected. With MUTATION_SAMPLE set, keep and count one parametrization of each test."""
    if config.option.collectonly:
        for item in items:
            mutation_probe.record(f"listed\t0\t0\t{item.nodeid}")
    if not os.environ.get("MUTATION_SAMPLE"):
        return
    functions: dict[str, list[str]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item.nodeid)
    for function, node_ids in functions.items():
        mutation_probe.record(f"collected\t0\t{len(node_ids)}\t{function}")
    # By the function's name, so that all workers of pytest-xdist choose the same.
    kept = {random.Random(function).choice(sorted(node_ids)) for function, node_ids in functions.items()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Announce the test before its fixtures are set up."""
    global _index, _running, _seconds, _outcome
    _index, _running, _seconds, _outcome = _index + 1, item.nodeid, 0.0, "passed"
    mutation_probe.announce(_index)
    mutation_probe.record(f"start\t{_index}\t0\t{_running}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a phase of the test. The controller of pytest-xdist runs none, and records none."""
    global _seconds, _outcome  # noqa: PLW0603 (one test at a time in a process)
    if report.nodeid == _running:
        _seconds += report.duration
        _outcome = report.outcome if report.outcome != "passed" else _outcome
    if report.when == "teardown" and report.nodeid == _running:
        mutation_probe.record(f"{_outcome}\t{_index}\t{_seconds:.3f}\t{_running}")
