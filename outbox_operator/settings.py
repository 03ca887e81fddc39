"""The settings of the operator; runtime/settings.py loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from outbox_core.runtime.logs import LogFormat
from outbox_core.runtime.settings import ServiceSettings, Table, load_settings

DurationMs = Annotated[int, BeforeValidator(parse_duration_ms), Field(ge=100)]


class OperatorTable(Table):
    """[operator]. Every name is also OUTBOX_OPERATOR__NAME, and a flag of `outbox operator run`."""

    namespaces: list[str] = Field(default=[], max_length=1_000)
    """Whose resources it looks after; all where none is named."""
    kubeconfig: Path | None = None
    lease_namespace: str = "outbox-system"
    """Where the lease is, which one of several operators has."""
    interval: DurationMs = 10_000
    """Between two looks at a resource at which nothing is under way."""
    busy_interval: DurationMs = 1_000
    """Between two looks at one that is rolled out, or drained."""
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65_535)
    log_format: LogFormat | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class OperatorSettings(ServiceSettings):
    """All settings, resolved."""

    operator: OperatorTable = OperatorTable()


def load(flags: Mapping[str, Any], *, file: Path | None) -> OperatorTable:
    """Load the settings; flags that are None were not given. Raises ConfigurationError, see load_settings."""
    return load_settings(OperatorSettings, {"operator": flags}, file=file).operator
