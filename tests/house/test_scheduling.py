"""The suite comes to its end whatever a test does to its worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
