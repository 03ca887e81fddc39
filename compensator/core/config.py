"""The compensator's configuration: flags, then OUTBOX_* of the environment, then a TOML file, then defaults.

Its names are in three tables, [database], [broker] and [compensator]; what other rooms keep in the first two is passed
over. An unknown name in [compensator] or [[compensator.sources]] is an error that says which one is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.amounts import parse_duration_ms
from outbox_core.runtime.secret_files import read_toml

ENVIRONMENT_PREFIX: Final = "OUTBOX_"
SOURCES_MAX: Final = 10_000
WORKERS_MAX: Final = 12
"""A pool has 15 connections at most: so many workers, and the retention and the gauges beside them."""
_OURS: Final = ("database", "broker", "compensator")

DurationMs = Annotated[int, BeforeValidator(parse_duration_ms), Field(ge=1)]
Days = Annotated[float, Field(ge=0)]
RowsPerSecond = Annotated[float, Field(gt=0)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceTable(_Table):
    """One of [[compensator.sources]]: an instance, its message schemas, and where their messages go."""

    url: str
    schemas: list[str] = Field(default=[], max_length=SOURCES_MAX)
    zone: str | None = None
    broker: str | None = None
    token_file: Path | None = None
    password_file: Path | None = None
    rate_limit: RowsPerSecond | None = None


class DatabaseTable(_Table):
    """What the compensator reads of [database]: its one instance, where no sources are listed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str | None = None
    schemas: list[str] = []
    password_file: Path | None = None


class BrokerTable(_Table):
    """What the compensator reads of [broker]: the broker of sources that name none of their own."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str | None = None
    token_file: Path | None = None


class CompensatorTable(_Table):
    """[compensator]. Every name is also OUTBOX_COMPENSATOR__NAME, and most are flags of `outbox compensator run`."""

    sources: list[SourceTable] = Field(default=[], max_length=SOURCES_MAX)
    interval: DurationMs = 1_000
    idle_interval: DurationMs = 5_000
    batch_rows: int = Field(default=200, ge=1, le=1_000)
    lease: DurationMs = Field(default=60_000, ge=1_000)
    workers: int = Field(default=4, ge=1, le=WORKERS_MAX)
    rate_limit: RowsPerSecond | None = None
    drain_rate: int = Field(default=1_000, ge=1)
    probe_rows: int = Field(default=10, ge=1)
    zone: str | None = None
    leases: bool | None = None
    lease_url: str | None = None
    lease_schema: str | None = None
    archive: bool = True
    archive_days: Days | None = None
    inbox_days: Days | None = None
    order_head_days: Days | None = 7
    judged_file: Path | None = None
    stop_timeout: DurationMs = 25_000
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65_535)


class CompensatorConfig(BaseSettings):
    """Everything, resolved."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="ignore", frozen=True
    )

    database: DatabaseTable = DatabaseTable()
    broker: BrokerTable = BrokerTable()
    compensator: CompensatorTable = CompensatorTable()
    log_format: Literal["text", "json"] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def source_tables(self) -> list[SourceTable]:
        """The sources that are listed, or the one instance of [database]. Raises ConfigurationError where none is."""
        if self.compensator.sources:
            return self.compensator.sources
        database = self.database
        if database.url is None:
            raise ConfigurationError(
                "no database is named: give --url, OUTBOX_DATABASE__URL or [[compensator.sources]] in --config FILE"
            )
        return [SourceTable(url=database.url, schemas=database.schemas, password_file=database.password_file)]


def load(flags: Mapping[str, Any], *, file: Path | None) -> CompensatorConfig:
    """The configuration; `flags` are nested as the file is, and those that are None were not given.

    Raises ConfigurationError that names what is at fault, and the name that is nearest to an unknown one.
    """
    tables = {} if file is None else _tables(file)

    class CompensatorLayers(CompensatorConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings  # neither a .env file nor a folder of secrets is read
            return init_settings, env_settings, InitSettingsSource(settings_cls, tables)

    try:
        return CompensatorLayers(**_given(flags))
    except ValidationError as error:
        raise ConfigurationError(_said(error)) from error


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Without the flags that were not given, and without tables that are empty for that."""
    given = {name: _given(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in given.items() if value not in (None, {}, [])}


def _tables(file: Path) -> dict[str, Any]:
    tables = read_toml(file)
    known = CompensatorConfig.model_fields
    for name in tables:
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and near:
            raise ConfigurationError(f"there is no {name!r} in {file}; {near[0]!r} is meant?")
    for name in _OURS:
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigurationError(f"[{name}] in {file} must be a table")
    return tables


def _said(error: ValidationError) -> str:
    """The first thing that is wrong, in an operator's words; values are not repeated, since they may be secrets."""
    first = error.errors(include_input=False, include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    name = ".".join(place)
    if first["type"] == "missing":
        return f"the setting {name!r} is needed"
    if first["type"] == "extra_forbidden":
        table = SourceTable if "sources" in place else CompensatorTable
        near = get_close_matches(place[-1], table.model_fields, n=1)
        return f"there is no setting {name!r}" + (f"; {near[0]!r} is meant?" if near else "")
    return f"the setting {name!r} is wrong: {first['msg'].removeprefix('Value error, ')}"
