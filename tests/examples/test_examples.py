"""Every example runs, prints what it promises, and the README shows the quickstart as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = {
    "quickstart.py": "payment.completed {'order_id': 1}",
    "inbox_consumer.py": "tickets: 2",
    "schedule_and_cancel.py": "still scheduled: 1",
}
FAILURES = {"inbox_consumer.py": 1}
"""How often a handler of an example fails on purpose, which the log shows."""


def test_every_example_has_its_expectation() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAID)


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_runs_and_says_what_it_promises(name: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    logged = [ended.stderr.count(text) for text in ("handler_failed", "Traceback")]
    assert logged == 2 * [FAILURES.get(name, 0)], ended.stderr
    assert SAID[name] in ended.stdout
    assert ended.returncode == 0


def test_the_readme_shows_the_quickstart_line_by_line() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    program = _code((ROOT / "examples" / "quickstart.py").read_text())

    missing = [line for line in _code(shown.group(1)) if line not in program]

    assert missing == []


def _code(text: str) -> list[str]:
    """Lines without comments, annotations and spaces at their ends."""
    stripped = (re.sub(r"\s*#.*", "", line).rstrip() for line in text.splitlines())
    return [line for line in stripped if line]
