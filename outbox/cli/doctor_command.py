"""Command `outbox doctor`: prints what the checks of outbox/admin/doctor.py found. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outbox.admin.doctor import CheckResult, Status, Target, run_checks
from outbox.admin.grants import DatabaseRole
from outbox.cli.database_options import AsJson, PasswordFile, Schema, Url
from outbox.store.database_url import database_url
from outbox_core.messages.connect import connect
from outbox_core.runtime.config_files import read_optional_secret
from outbox_core.runtime.terminal_text import escaped

app: typer.Typer = typer.Typer()

TIMEOUT_SECONDS: Final = 10.0


@app.callback(invoke_without_command=True)
def doctor(
    url: Url,
    schema: Schema = None,
    password_file: PasswordFile = None,
    role: Annotated[
        DatabaseRole, typer.Option("--role", help="Whose rights the URL's user shall have.")
    ] = DatabaseRole.APP,
    broker: Annotated[
        str | None, typer.Option("--broker", envvar="OUTBOX_BROKER__URL", help="Broker of the outbox.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", envvar="OUTBOX_BROKER__TOKEN_FILE", help="File with the broker's token."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="How long each check may take, seconds.")
    ] = TIMEOUT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Check database, rights, compensator and broker.

    A line a check, with the cure below it where something is wrong. Writes nothing. Exit status 1 if a check failed.

    Example: outbox doctor --url mysql+pymysql://app@db/shop --broker http://broker:7788
    """
    token = read_optional_secret(token_file, what="token")
    options: dict[str, Any] = {} if token is None else {"token": token}
    target = Target(
        url=database_url(url, password_file=password_file), schema=schema, role=role,
        open_broker=None if broker is None else lambda: connect(broker, **options),
    )  # fmt: skip
    checks = []
    for check in run_checks(target, timeout_s=timeout_s):
        checks.append(check)
        if not as_json:
            _print(check)
    is_well = all(check.status is not Status.FAIL for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": is_well, "checks": [asdict(check) for check in checks]}))
    raise typer.Exit(0 if is_well else 1)


def _print(result: CheckResult) -> None:
    typer.echo(escaped(f"{result.status:<4}  {result.check}: {result.says}"))
    if result.cure:
        typer.echo(escaped(f"      {result.cure}"))
