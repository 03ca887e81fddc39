"""Loads the settings of a service: flags, then environment variables OUTBOX_*, then a TOML file, then defaults.

A service declares its tables as pydantic models, with names, types and limits. For services only: the SDK does not
need pydantic. msgspec would spare the dependency, but its errors are texts to be taken apart, and some quote the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_toml

ENVIRONMENT_PREFIX: Final = "OUTBOX_"
_DELIMITER: Final = "__"


class Table(BaseModel):
    """A table of the file. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(BaseSettings):
    """All tables that a service reads; tables of other services in the same file are ignored.

    The key `name` of [table] is OUTBOX_TABLE__NAME in the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=_DELIMITER, extra="ignore", frozen=True
    )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(model: type[S], flags: Mapping[str, Any], *, file: Path | None) -> S:
    """Returns the settings; `flags` are nested as the file is; None and an empty list mean an absent flag.

    Raises ConfigurationError that names the file or the variable, the key, and for an unknown key the most similar
    known one. It repeats no values, since they may be secrets.
    """
    tables = {} if file is None else _read_tables(model, file)

    def sources(
        settings_cls: type[BaseSettings], /, **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Neither a .env file nor a folder of secrets is read.
        return sources["init_settings"], _environment(settings_cls), InitSettingsSource(settings_cls, tables)

    layered: type[S] = type(model.__name__, (model,), {"settings_customise_sources": staticmethod(sources)})
    flag_values = _without_absent(flags)
    try:
        return layered(**flag_values)
    except ValidationError as error:
        raise ConfigurationError(_describe(error, model, flag_values=flag_values, file=file)) from error
    except SettingsError as error:
        raise ConfigurationError(f"the environment: {error}; write lists and tables as JSON there") from error


def _environment(model: type[BaseSettings]) -> EnvSettingsSource:
    """Reads variables of single keys, not of whole tables: applications name their broker's URL OUTBOX_BROKER."""
    source = EnvSettingsSource(model)
    table_variables = {
        _variable([name]).lower() for name, field in model.model_fields.items() if _table_in(field.annotation)
    }
    source.env_vars = {name: value for name, value in source.env_vars.items() if name.lower() not in table_variables}
    return source


def _without_absent(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _without_absent(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in nested.items() if value is not None and value != []}


def _read_tables(model: type[BaseModel], file: Path) -> dict[str, Any]:
    tables, known_fields = read_toml(file), model.model_fields
    for name, table in tables.items():
        similar = get_close_matches(name, known_fields, n=1, cutoff=0.8)
        if name not in known_fields and similar:
            raise ConfigurationError(f"there is no {name!r} in {file}; {similar[0]!r} is meant?")
        if _table_in(known_fields[name].annotation if name in known_fields else None) and not isinstance(table, dict):
            raise ConfigurationError(f"[{name}] in {file} must be a table")
    return tables


def _describe(
    error: ValidationError, model: type[BaseModel], *, flag_values: Mapping[str, Any], file: Path | None
) -> str:
    """Describes the first error, and the origin of the value."""
    first_error = error.errors(include_input=False, include_url=False)[0]
    *table, key = first_error["loc"]
    name = f"{key!r}" + (f" of [{'.'.join(map(str, table))}]" if table else "")
    if first_error["type"] == "missing":
        return f"{_how_to_give(table, str(key))}the setting {name} is needed"
    origin = _origin(first_error["loc"], flag_values=flag_values, file=file)
    if first_error["type"] == "extra_forbidden":
        similar = get_close_matches(str(key), _keys_of(model, table), n=1)
        return f"{origin}there is no setting {name}" + (f"; {similar[0]!r} is meant?" if similar else "")
    return f"{origin}the setting {name} is wrong: {first_error['msg'].removeprefix('Value error, ')}"


def _how_to_give(table: Sequence[str | int], key: str) -> str:
    if len(table) != 1:
        return ""
    return f"--{key.replace('_', '-')} is needed, or {_variable([*table, key])}, or a --config FILE: "


def _origin(location: Sequence[str | int], *, flag_values: Mapping[str, Any], file: Path | None) -> str:
    """Returns the origin of a value: the source of highest precedence that has it."""
    if _has(flag_values, location):
        return ""
    variables = {name.upper() for name in os.environ}
    for length in range(len(location), 0, -1):
        if _variable(location[:length]) in variables:
            return f"{_variable(location[:length])} in the environment: "
    return "" if file is None else f"{file}: "


def _has(tables: object, location: Sequence[str | int]) -> bool:
    """Returns whether these tables have the value at that location, or a list or text that contains it."""
    for part in location:
        if not isinstance(tables, Mapping):
            return True
        if part not in tables:
            return False
        tables = tables[part]
    return True


def _variable(location: Sequence[str | int]) -> str:
    return ENVIRONMENT_PREFIX + _DELIMITER.join(map(str, location)).upper()


def _keys_of(model: type[BaseModel], table: Sequence[str | int]) -> Iterable[str]:
    """Returns the keys of a table within the model; an element of a list is a table, too."""
    for part in table:
        if isinstance(part, str):
            model = _table_in(model.model_fields[part].annotation) or model
    return model.model_fields


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the table type of a field: the field's type, or the type of its list's elements."""
    tables = (
        candidate
        for candidate in (annotation, *get_args(annotation))
        if isinstance(candidate, type) and issubclass(candidate, BaseModel)
    )
    return next(tables, None)
