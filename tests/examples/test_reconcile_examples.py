"""The examples of scheduled reconciliation: the settings are read, each command is one that exists, spark-submit runs.

Airflow is not installed here: its file is read as a tree, and its command is rendered as Airflow renders it.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import typer

from spark_reconcile.cli.run_command import app
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.core.time_arguments import moment_ms
from tests.fixtures.databases import Database
from tests.fixtures.spark_classes import archive_options
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, World

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "reconcile"
CRON = re.compile(r"((?:[\d*,/-]+ ){5})(\w+)\s+(.+)")
RUN_SECONDS_MAX = 540


def test_every_example_is_looked_at_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "airflow_dag.py", "crontab", "reconcile.toml", "spark_submit.sh"
    }  # fmt: skip


def test_the_settings_are_read_as_they_stand() -> None:
    settings = settings_of(read_config(EXAMPLES / "reconcile.toml"), folder=EXAMPLES)

    assert len(settings.all_outboxes) == 3
    assert settings.rules[0].body == {"order_id": "order_id"}


def test_each_line_of_the_crontab_is_a_time_a_user_and_a_command_that_exists() -> None:
    lines = [line for line in (EXAMPLES / "crontab").read_text().splitlines() if not line.startswith("#")]

    found = [CRON.fullmatch(line) for line in lines]

    assert len(lines) == 2
    for one in found:
        assert one is not None
        given = _parsed(one[3])
        assert moment_ms(given["since"], now_ms=NOW_MS) < NOW_MS
        assert given["config"] == Path("/etc/outbox-mq/reconcile.toml")


def test_the_airflow_task_asks_for_hours_by_a_command_that_exists() -> None:
    tree = ast.parse((EXAMPLES / "airflow_dag.py").read_text())
    imported = {f"{one.module}.{name.name}" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)
                for name in one.names}  # fmt: skip
    dag, operator = _call(tree, "DAG"), _call(tree, "BashOperator")
    end = datetime(2026, 11, 3, 7, tzinfo=UTC)

    given = _parsed(_rendered(operator["bash_command"], tree, start=end - timedelta(hours=1), end=end))

    assert {"airflow.sdk.DAG", "airflow.providers.standard.operators.bash.BashOperator"} <= imported
    until_ms = moment_ms(given["until"], now_ms=0)
    assert (until_ms, until_ms - moment_ms(given["since"], now_ms=0)) == (int(end.timestamp() * 1000), 49 * HOUR_MS)
    assert ast.literal_eval(dag["max_active_runs"]) == 1, "one run at a time writes to an output folder"
    assert CRON.fullmatch(f"{ast.literal_eval(dag['schedule'])} user command")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.processes
def test_the_spark_submit_example_judges_by_the_hour_and_ends_with_the_runs_status(
    sqlite: Database, tmp_path: Path
) -> None:
    config = _sources(sqlite, tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as an activated environment has it
    given = {"PATH": path, "SPARK_MASTER": "local[2]", "SHUFFLE_PARTITIONS": "1", "EXECUTOR_MEMORY": "1g"}
    # Of so few rows, most is compiling; with one compiler, the default code cache is full before the run ends.
    options = f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC {archive_options()}"
    given["SPARK_SUBMIT_OPTS"] = options

    ended = subprocess.run(
        ["sh", str(EXAMPLES / "spark_submit.sh"), str(config), "3h", "--now-ms", str(NOW_MS)],
        env={**os.environ, **given}, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS_MAX,
    )  # fmt: skip

    assert ended.returncode == 1, ended.stderr[-3000:]
    # spark-submit joins standard error, with the steps, to standard output.
    assert "\nNot balanced: 1 lost.\n" in ended.stdout
    assert list((tmp_path / "reconciliation").glob("*/report.html"))


def _sources(database: Database, folder: Path) -> Path:
    """Three orders for which all is well, and one whose message the broker lost; the settings file."""
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    world.sent("lost", key=str(world.order(age_ms=2 * HOUR_MS)), age_ms=2 * HOUR_MS)
    world.write(database, folder)
    config = folder / "reconcile.toml"
    config.write_text(
        f'[database]\nurl = "{database.url}"\n[broker]\ndata = "broker"\n[[rules]]\nname = "paid"\ntable = "orders"\n'
        f'where = {{ status = "PAID" }}\nkey_column = "id"\ntime_column = "paid_at_us"\ntopic = "{PAID}"\n'
        "[grace]\nconfirm_after_seconds = 0\n"
    )
    return config


def _parsed(command: str) -> dict[str, Any]:
    """What the command line makes of a command's options. Raises where it knows one of them not."""
    program, group, *rest = shlex.split(command)
    assert (program, group) == ("outbox", "reconcile")
    commands: Any = typer.main.get_command(app)
    given: dict[str, Any] = commands.commands[rest[0]].make_context(rest[0], rest[1:]).params
    return given


def _call(tree: ast.Module, name: str) -> dict[str, ast.expr]:
    """The named arguments of the one call of that name."""
    (call,) = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
               and one.func.id == name]  # fmt: skip
    return {str(one.arg): one.value for one in call.keywords}


def _rendered(command: ast.expr, tree: ast.Module, *, start: datetime, end: datetime) -> str:
    """A templated command as Airflow would run it; of names in it only the file's constants are known."""
    constants = {
        target.id: ast.literal_eval(one.value)
        for one in tree.body if isinstance(one, ast.Assign)
        for target in one.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    assert isinstance(command, ast.JoinedStr)
    template = "".join(_text(part, constants) for part in command.values)
    macros = SimpleNamespace(timedelta=timedelta)
    strict = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    return strict.from_string(template).render(data_interval_start=start, data_interval_end=end, macros=macros)


def _text(part: ast.expr, constants: dict[str, Any]) -> str:
    """A part of a formatted string: its text, or the constant that it names."""
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return str(constants[part.value.id])
    return str(ast.literal_eval(part))
