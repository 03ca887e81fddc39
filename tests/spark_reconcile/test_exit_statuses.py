"""What an exit status means: 1 is for findings alone, and what nobody foresaw has one of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, DatabaseUnavailable, SchemaMissing
from spark_reconcile import Summary
from spark_reconcile.cli import run_command, spark_submit_entry
from spark_reconcile.core.errors import NotComparable, OutputFailed
from spark_reconcile.report.page import page_of
from spark_reconcile.results.summary import Example, VerdictCount
from spark_reconcile.rules.verdict_rule import Scope, Severity, State

PASSWORD = "s3cret-of-the-database"
URL = f"mysql+pymysql://reader:{PASSWORD}@db/shop"
SCRIPT = "</script></text><script>alert(1)</script>"
COMMANDS = {
    "run": ["run", "--config"],
    "watch": ["watch", "--config"],
    "report": ["report", "--config"],
    "repair apply": ["repair", "apply", "repairs.jsonl", "--config"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"no such thing: {URL}"), OSError(28, "No space left on device"), AssertionError(),
        BrokerUnavailable("down"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_error_that_was_not_foreseen_is_no_finding_and_its_trace_names_no_password(
    failing: Callable[[Exception], Path], command: str, error: Exception
) -> None:
    config = failing(error)

    ended = CliRunner().invoke(run_command.app, [*COMMANDS[command], str(config)])

    assert ended.exit_code == 4, ended.output
    said = re.search(r"error: (\w+), which was not foreseen.* its trace is in (\S+)", ended.stderr)
    assert said is not None, ended.stderr
    trace = Path(said[2])
    assert said[1] == type(error).__name__
    assert "Traceback" in trace.read_text()
    assert PASSWORD not in trace.read_text() + ended.output + ended.stderr
    assert trace.stat().st_mode & 0o077 == 0
    trace.unlink()


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotComparable("x"), 3), (DatabaseUnavailable("x"), 3), (KeyboardInterrupt(), 130), (typer.Abort(), 130)],
    ids=["not comparable", "unavailable", "interrupted", "interrupted at a question"],
)
def test_an_error_that_was_foreseen_has_its_own_status(
    failing: Callable[[BaseException], Path], error: BaseException, status: int
) -> None:
    ended = CliRunner().invoke(run_command.app, ["run", "--config", str(failing(error))])

    assert ended.exit_code == status, ended.output


@pytest.mark.parametrize("error", [ConfigurationError("x"), SchemaMissing("x"), OutputFailed("x")])
def test_a_mistake_of_the_settings_is_left_to_the_command_that_prints_it(
    failing: Callable[[Exception], Path], error: Exception
) -> None:
    ended = CliRunner().invoke(run_command.app, ["run", "--config", str(failing(error))])

    assert ended.exception is error


def test_by_spark_submit_a_package_that_a_cluster_lacks_is_a_mistake_of_usage_and_no_finding(
    failing: Callable[[Exception], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = failing(ModuleNotFoundError("No module named 'pymysql'", name="pymysql"))
    monkeypatch.setattr("sys.argv", ["spark_submit", "run", "--config", str(config)])

    with pytest.raises(SystemExit) as ended:
        spark_submit_entry.main()

    assert (ended.value.code, capsys.readouterr().err) == (2, "error: No module named 'pymysql'\n")


def test_an_option_that_there_is_not_is_a_mistake_of_usage() -> None:
    assert CliRunner().invoke(run_command.app, ["run", "--no-such-option"]).exit_code == 2


def test_the_page_escapes_what_messages_say() -> None:
    counted = VerdictCount(
        scope=Scope.MESSAGE, topic=SCRIPT, of=SCRIPT, state=State.LOST, severity=Severity.FINDING,
        rule="not_in_broker", count=1,
    )  # fmt: skip
    example = Example(
        scope=Scope.MESSAGE, rule="not_in_broker", state=State.LOST, severity=Severity.FINDING, id=SCRIPT, topic=SCRIPT,
        of=SCRIPT, key=SCRIPT, at_ms=1,
    )  # fmt: skip
    summary = Summary(
        run_id="r", judged_at_ms=1, business_rows=0, messages=1, message_groups=0, stored=0, delivered=0, redelivered=0,
        acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0, verdict_counts=[counted],
        examples=[example], clocks={SCRIPT: 5_000}, folder=SCRIPT,
    )  # fmt: skip

    page = page_of(summary)

    assert "<script" not in page
    assert "&lt;/script&gt;" in page


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Path]:
    """A settings file; reading it fails as it is told to."""

    def fail_with(error: BaseException) -> Path:
        def fail(*_: object, **__: object) -> None:
            raise error

        for reader in ("command_settings", "output_folder"):
            monkeypatch.setattr(f"spark_reconcile.cli.options.{reader}", fail)
        path = tmp_path / "reconcile.toml"
        path.write_text(f'[database]\nurl = "{URL}"\n[broker]\ndata = "broker"\n')
        return path

    return fail_with
