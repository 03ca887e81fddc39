"""Rules of the engine tests: they run only where the command line names them, and a run in which no test passed fails.

`./scripts/test --engines` sets up what they need and names them. The plain suite collects nothing from this folder.
Each engine has a pytest process of its own: two of Java would share a JVM and its class path.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

_ENGINES = Path(__file__).parent


@pytest.fixture
def topic() -> str:
    """A name of the test's own."""
    return f"t.{uuid.uuid4().hex}"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests out of a run whose arguments name another folder, or none."""
    return None if _are_named(config) else True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which every test was skipped or deselected: it would look like a run that found no fault."""
    config = session.config
    if not _are_named(config) or config.option.collectonly or session.exitstatus != pytest.ExitCode.OK:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert isinstance(reporter, pytest.TerminalReporter)
    if not reporter.stats.get("passed"):
        reporter.write_line("no test of the engine passed: nothing was tested, which is a failure", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _are_named(config: pytest.Config) -> bool:
    start = config.invocation_params.dir
    paths = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return any(path.is_relative_to(_ENGINES) for path in paths)
