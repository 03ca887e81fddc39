"""The pytest plugin as its users have it: in a pytest of their own, with the guide's code."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.outbox_testing.guide import write_files

ROOT = Path(__file__).parents[2]


def run_pytest(folder: Path, *, verbosity: str = "-q") -> subprocess.CompletedProcess[str]:
    """A pytest of its own, as far from ours as it can be."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pytest",
        verbosity,
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        ".",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_pytest_finds_the_plugin_by_itself() -> None:
    [found] = entry_points(group="pytest11", name="outbox")

    assert found.value == "outbox.testing.plugin"


@pytest.mark.processes
def test_the_code_of_the_guide_works(tmp_path: Path) -> None:
    files = write_files(ROOT / "docs" / "guides" / "testing.md", tmp_path)

    done = run_pytest(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(path.read_text().count("def test_") for path in files) == 11
    assert "11 passed" in done.stdout, done.stdout


@pytest.mark.processes
def test_what_goes_wrong_is_shown(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "guides" / "testing.md", tmp_path)
    for path in tmp_path.glob("test_*.py"):
        path.unlink()
    (tmp_path / "test_wrong.py").write_text(
        "from shop import pay\n\ndef test_wrong(published):\n    pay(1)\n"
        "    assert published == [('payment.failed', 2)]\n"
    )

    done = run_pytest(tmp_path)

    assert done.returncode == 1
    assert "<published 'payment.completed', {'order_id': 1}, key='1'>" in done.stdout
    assert "('payment.failed', 2)" in done.stdout


@pytest.mark.processes
def test_outbox_testing_needs_no_pytest() -> None:
    program = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "from outbox import connect\n"
        "from outbox.testing import capture_published\n"
        "connect('memory:').close()\n"
        "with capture_published() as published: assert published == []\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_a_hook_of_the_users_that_came_first_and_raises_hides_nothing(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "guides" / "testing.md", tmp_path)
    for path in tmp_path.glob("test_*.py"):
        path.unlink()
    (tmp_path / "test_hook.py").write_text(
        "import pytest\n"
        "from sqlalchemy import event\n"
        "from sqlalchemy.orm import Session\n"
        "def raises(session): raise LookupError\n"
        "event.listen(Session, 'after_commit', raises)\n"
        "def test_hook(published):\n"
        "    from shop import pay\n"
        "    with pytest.raises(LookupError):\n"
        "        pay(1)\n"
        "    assert published.topics == ['payment.completed']\n"
    )

    done = run_pytest(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
