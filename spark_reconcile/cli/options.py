"""Common parts of the commands of `outbox reconcile`: options, settings from options, exit statuses."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, UsageError
from outbox_core.runtime.entry_point import EXIT_INTERRUPTED
from outbox_core.runtime.logs import mask_secrets
from outbox_core.runtime.terminal_text import escaped
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.settings_file import read_config, settings_of

EXIT_FINDINGS: Final = 1
EXIT_NOT_COMPARABLE: Final = 3
EXIT_UNFORESEEN: Final = 4

Config = Annotated[Path | None, typer.Option("--config", help="TOML file that names sources and rules.")]
Url = Annotated[str | None, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database of the outbox.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", envvar="OUTBOX_DATABASE__PASSWORD_FILE", help="File with the databases' password."),
]
Schema = Annotated[str | None, typer.Option("--schema", help="Schema of the outbox tables (MySQL).")]
BrokerData = Annotated[Path | None, typer.Option("--broker-data", help="The broker's data folder, read in place.")]
Output = Annotated[Path | None, typer.Option("--output", help="Folder for tables and reports.")]
GraceSeconds = Annotated[float | None, typer.Option("--grace-seconds", help="What is newer is pending.")]
Master = Annotated[
    str | None, typer.Option("--master", help="Spark master, or sc://host for Spark Connect; default local[*].")
]
NowMs = Annotated[
    int | None, typer.Option("--now-ms", help="Judge as of this moment (epoch milliseconds); default: now.")
]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Judge by the hour, from here on: 2026-11-01T12:00:00Z, or so long ago: 2h, 7d."),
]
Until = Annotated[str | None, typer.Option("--until", help="With --since: up to here; default: now.")]
Full = Annotated[bool, typer.Option("--full", help="With --since: look at every row, whatever the digests say.")]
RepairIt = Annotated[
    bool, typer.Option("--repair", help="Hand what is lost and unsent back to the compensator: show it, and ask.")
]
Yes = Annotated[bool, typer.Option("--yes", help="With --repair: do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="With --repair: show it, and change nothing.")]
REPAIRS_MAX_DEFAULT: Final = 1_000
"""More repairs than this are no faults of single messages: a source is missing, or is the wrong one."""
RepairsMax = Annotated[int, typer.Option("--repairs-max", min=1, help="With --repair: refuse to do more than these.")]
MetricsFile = Annotated[
    Path | None, typer.Option("--metrics-file", help="Write recon_* metrics here as well, e.g. for node_exporter.")
]
AcceptMissing = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-missing", metavar="SOURCE",
        help="Judge although evidence of this source is missing, as the error named it; for one run.",
    ),
]  # fmt: skip
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Write no line for each step where standard error is no terminal.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


def given_settings(
    config: Path | None, *, url: str | None, schema: str | None, broker_data: Path | None, output: Path | None,
    grace_seconds: float | None, password_file: Path | None,
) -> Settings:  # fmt: skip
    """Returns the settings of the file, overridden by the given flags."""
    flags: dict[str, dict[str, Any]] = {
        "database": {
            "url": url,
            "schema": schema,
            "password_file": str(password_file.resolve()) if password_file else None,
        },
        "broker": {"data": str(broker_data.resolve()) if broker_data else None},
        "output": {"folder": str(output.resolve()) if output else None},
        "grace": {"seconds": grace_seconds},
    }
    tables: dict[str, Any] = {} if config is None else read_config(config)
    for name, values in flags.items():
        given_values = {key: value for key, value in values.items() if value is not None}
        if given_values:
            tables[name] = {**tables.get(name, {}), **given_values}
    if "database" not in tables or "broker" not in tables:
        raise ConfigurationError("name a file with --config, or at least --url and --broker-data")
    return settings_of(tables, folder=None if config is None else config.resolve().parent)


class GuardedCommands(TyperGroup):
    """The commands of `outbox reconcile`: whatever one of them raises, its exit status says what that means."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Exit status 1 is for findings alone; that of an error nobody foresaw is EXIT_UNFORESEEN."""
        try:
            return super().invoke(ctx)
        except (NotComparable, DatabaseUnavailable) as error:
            typer.echo(escaped(f"error: {error}", but="\n"), err=True)
            raise typer.Exit(EXIT_NOT_COMPARABLE) from error
        except typer.Abort as error:  # ^C at a question, which typer would end with 1
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except (UsageError, ModuleNotFoundError):
            raise  # the command `outbox` prints these, and spark_submit_entry
        except Exception as error:
            if hasattr(error, "exit_code"):  # Typer's own, whose common class it does not show
                raise
            typer.echo(
                f"error: {type(error).__name__}, which was not foreseen, so nothing is said about the records: its "
                f"trace is in {_written_trace(error)}",
                err=True,
            )
            raise typer.Exit(EXIT_UNFORESEEN) from error


def _written_trace(error: Exception) -> str:
    """Write the trace to a new file that only this user can read; returns its path.

    A message of a driver's may have a URL in it, and a source's values: none of them goes to the terminal.
    """
    descriptor, path = tempfile.mkstemp(prefix="outbox-reconcile-", suffix=".trace")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(mask_secrets("".join(traceback.format_exception(error))))
    return path
