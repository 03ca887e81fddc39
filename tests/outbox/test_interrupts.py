"""An interrupt ends any command with one line and the status 130, whatever is being imported or done."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from outbox_core.runtime import entry_point

ROOT = Path(__file__).parents[2]
INTERRUPTED_AT_IMPORT = """
import sys
from outbox_core.runtime.command import main
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
main({arguments!r})
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("spark_reconcile.cli.run_command", ["reconcile", "explain"]),
        ("spark_reconcile.classify.classification", ["reconcile", "explain", "lost"]),
        ("compensator.entry.cli", ["compensator", "--help"]),
    ],
    ids=["a room", "within a command", "a help page"],
)
def test_an_interrupt_while_something_is_imported(module: str, arguments: list[str]) -> None:
    program = INTERRUPTED_AT_IMPORT.format(module=module, arguments=arguments)

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)

    assert (ended.returncode, ended.stderr) == (130, "interrupted: what was done before stands\n")


def test_an_interrupt_before_the_command_itself_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.metadata, "entry_points", interrupted)

    with pytest.raises(SystemExit) as ended:
        entry_point.main()

    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted: nothing was begun\n")


def test_the_process_finds_the_command_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (named,) = project["entry-points"][entry_point.GROUP].values()
    module, _, function = named.partition(":")

    assert project["scripts"]["outbox"] == f"{entry_point.__name__}:main"
    assert callable(getattr(import_module(module), function))
