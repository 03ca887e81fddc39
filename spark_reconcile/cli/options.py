"""Common parts of the commands of `outbox reconcile`: options, settings from options, exit statuses."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, UsageError
from outbox_core.runtime.entry_point import EXIT_INTERRUPTED
from outbox_core.runtime.logs import mask_secrets
from outbox_core.runtime.terminal_text import escaped
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings_file import CommandSettings, command_settings, output_folder

EXIT_FINDINGS: Final = 1
EXIT_NOT_COMPARABLE: Final = 3
EXIT_UNFORESEEN: Final = 4

Config = Annotated[
    Path | None,
    typer.Option("--config", envvar="OUTBOX_CONFIG", help="TOML file: reconcile.toml, or [reconcile] in outbox.toml."),
]
Url = Annotated[str | None, typer.Option("--url", help="Database of the outbox.")]
PasswordFile = Annotated[Path | None, typer.Option("--password-file", help="File with the databases' password.")]
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
RepairsMax = Annotated[
    int | None, typer.Option("--repairs-max", min=1, help="With --repair: refuse to do more than these (1000).")
]
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
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write no progress where standard error is no terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


def given_settings(
    config: Path | None, *, url: str | None = None, schema: str | None = None, broker_data: Path | None = None,
    output: Path | None = None, grace_seconds: float | None = None, password_file: Path | None = None,
    reconcile: Mapping[str, Any] | None = None,
) -> CommandSettings:  # fmt: skip
    """Returns the given flags, and what they leave out from the environment or the file. `reconcile`: more flags of
    that table, by their names there.
    """
    flags = {
        "database": {"url": url, "schema": schema, "password_file": absolute_path(password_file)},
        "broker": {"data": absolute_path(broker_data)},
        "reconcile": {
            "output": {"folder": absolute_path(output)}, "grace": {"seconds": grace_seconds}, **(reconcile or {})
        },
    }  # fmt: skip
    return command_settings(flags, file=config)


def given_output(config: Path | None, output: Path | None) -> Path:
    """Returns the folder of results. Raises ConfigurationError if nothing names it."""
    folder = output_folder({"reconcile": {"output": {"folder": absolute_path(output)}}}, file=config)
    if folder is None:
        raise ConfigurationError("name the folder of results with --output, or the settings with --config")
    return folder


def absolute_path(path: Path | None) -> str | None:
    """Returns a path of the command line: unlike those of a file it is relative to the working directory."""
    return None if path is None else str(path.resolve())


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
