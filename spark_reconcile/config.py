"""What to reconcile, from one TOML file: sources, rules, grace, output. Values only; nothing is opened here."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from messaging.errors import ConfigurationError


class DatabaseSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the outbox's tables and, unless a rule says otherwise, the business's are.

    `archive_days`, `inbox_days`: how long these rows are kept, as the compensator's retention has it; None: for ever.
    """

    url: str
    schema: str | None = None
    archive_days: float | None = None
    inbox_days: float | None = None


class BrokerSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker's data folder, whose logs are read in place, running or not."""

    data: str


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which business rows must have which message: rows of `table` where all of `where` holds, joined by the key.

    `time_column` holds integers, microseconds since the epoch (`time_unit` "us"), or "ms" or "s".
    """

    name: str
    table: str
    key_column: str
    time_column: str
    topic: str
    where: dict[str, str | int] = {}
    time_unit: str = "us"
    url: str | None = None


class InboxSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An inbox table, and the group whose effects it proves. Without a url: in the outbox's database."""

    group: str
    url: str | None = None
    schema: str | None = None


class Grace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things may take before they are judged; how far clocks may be apart."""

    seconds: float = 60.0
    late_after_seconds: float = 60.0
    clock_skew_seconds: float = 1.0


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where results go: a folder a run, and a manifest that names the newest."""

    folder: str = "reconciliation"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of one run. `now_ms` fixes the moment of judgement (tests); None is the machine's clock."""

    database: DatabaseSource
    broker: BrokerSource
    rules: list[Rule] = []
    inboxes: list[InboxSource] = []
    grace: Grace = Grace()
    output: Output = Output()
    master: str = "local[*]"
    now_ms: int | None = None


_UNKNOWN = re.compile(r"unknown field `(.+?)`")


def read_settings(path: Path) -> Settings:
    """The settings in a TOML file. Raises ConfigurationError that names the file, the place and the cure."""
    try:
        parsed: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    try:
        return msgspec.convert(parsed, Settings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}{_hint(str(error))}") from error


def _hint(problem: str) -> str:
    """The known name that is nearest to an unknown one."""
    unknown = _UNKNOWN.search(problem)
    if unknown is None:
        return ""
    kinds = (Settings, DatabaseSource, BrokerSource, Rule, InboxSource, Grace, Output)
    known = {name for kind in kinds for name in kind.__struct_fields__}
    near = difflib.get_close_matches(unknown.group(1), known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
