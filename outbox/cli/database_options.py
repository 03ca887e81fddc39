"""Options that several commands on an outbox's database have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[str, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database, e.g. mysql+pymysql://u@h/d.")]
Schema = Annotated[str | None, typer.Option("--schema", help="Schema that has the outbox tables alone (MySQL).")]
PasswordFile = Annotated[
    Path | None,
    typer.Option("--password-file", envvar="OUTBOX_DATABASE__PASSWORD_FILE", help="File with the database's password."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
