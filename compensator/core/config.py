"""Declares the settings of the compensator; runtime/settings.py loads them.

They are in three tables, [database], [broker] and [compensator]; keys of other services in the first two are ignored.
An unknown key in [compensator] or [[compensator.sources]] is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from outbox_core.runtime.settings import ServiceSettings, Table, load_settings
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperTable

SOURCES_MAX: Final = 10_000
WORKERS_MAX: Final = 12
"""A pool has 15 connections at most: 12 for workers, the rest for the retention and the gauges."""


def _at_least(least_ms: int) -> AfterValidator:
    """A validator whose error names the unit: a user writes "5s", or reads of a number of milliseconds."""

    def check(ms: int) -> int:
        if ms < least_ms:
            raise ValueError(f"it is {ms:,} ms, and at least {least_ms:,} ms are needed")
        return ms

    return AfterValidator(check)


DurationMs = Annotated[int, BeforeValidator(parse_duration_ms), _at_least(1)]
Days = Annotated[float, Field(ge=0, allow_inf_nan=False)]
RowsPerSecond = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SourceTable(Table):
    """One of [[compensator.sources]]: a database instance, its message schemas, and the broker of their messages."""

    url: str
    schemas: list[str] = Field(default=[], max_length=SOURCES_MAX)
    zone: str | None = None
    broker: str | None = None
    timing: str | None = None
    token_file: Path | None = None
    password_file: Path | None = None
    rate_limit: RowsPerSecond | None = None


class DatabaseTable(Table):
    """What the compensator reads of [database]: its only database instance if no sources are listed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str | None = None
    schemas: list[str] = Field(default=[], max_length=SOURCES_MAX)
    password_file: Path | None = None


class BrokerTable(Table):
    """What the compensator reads of [broker]: the broker of sources that name none."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str | None = None
    token_file: Path | None = None


class TimingTable(Table):
    """[timing]: the timing store of sources that name none, and how fast it is rebuilt from the database."""

    store: str | None = None
    rebuild_rows_per_second: int = Field(default=50_000, ge=1)


class CompensatorTable(ZooKeeperTable):
    """[compensator]. Every name is also OUTBOX_COMPENSATOR__NAME, and most are flags of `outbox compensator run`."""

    sources: list[SourceTable] = Field(default=[], max_length=SOURCES_MAX)
    interval: DurationMs = 1_000
    idle_interval: DurationMs = 5_000
    batch_rows: int = Field(default=200, ge=1, le=1_000)
    lease: Annotated[DurationMs, _at_least(1_000)] = 60_000
    workers: int = Field(default=4, ge=1, le=WORKERS_MAX)
    rate_limit: RowsPerSecond | None = None
    drain_rate: int = Field(default=1_000, ge=1)
    probe_rows: int = Field(default=10, ge=1)
    zone: str | None = None
    leases: bool | None = None
    lease_url: str | None = None
    """Where leases are, if not in the first source's database: another one, or zookeeper://zk1,zk2,zk3/path."""
    lease_schema: str | None = None
    archive: bool = True
    archive_days: Days | None = None
    inbox_days: Days | None = None
    order_head_days: Days | None = 7
    judged_file: Path | None = None
    stop_timeout: DurationMs = 25_000
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65_535)


class CompensatorConfig(ServiceSettings):
    """All settings, resolved."""

    database: DatabaseTable = DatabaseTable()
    broker: BrokerTable = BrokerTable()
    timing: TimingTable = TimingTable()
    compensator: CompensatorTable = CompensatorTable()
    log_format: Literal["text", "json"] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def check(self) -> None:
        """Raise ConfigurationError without a database, or for a login to ZooKeeper that cannot be used."""
        self.source_tables()
        _ = self.compensator.zookeeper_security

    def source_tables(self) -> list[SourceTable]:
        """The sources that are listed, else the instance of [database]. Raises ConfigurationError without either."""
        if self.compensator.sources:
            return self.compensator.sources
        database = self.database
        if database.url is None:
            raise ConfigurationError(
                "no database is named: give --url, OUTBOX_DATABASE__URL or [[compensator.sources]] in --config FILE"
            )
        return [SourceTable(url=database.url, schemas=database.schemas, password_file=database.password_file)]


def load(flags: Mapping[str, Any], *, file: Path | None) -> CompensatorConfig:
    """Load the configuration; `flags` are nested like the file. Raises ConfigurationError, see load_settings."""
    return load_settings(CompensatorConfig, flags, file=file)
