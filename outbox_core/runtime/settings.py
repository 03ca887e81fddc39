"""Loads the settings of a service: flags, then environment variables OUTBOX_*, then a TOML file, then defaults.

A service declares its tables as pydantic models, with names, types and limits. For services only: the SDK does not
need pydantic. msgspec would spare the dependency, but its errors are texts to be taken apart, and some quote the value.
The same declarations say what `outbox config` shows of each setting, and what it finds wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
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
from outbox_core.runtime.logs import MASK, mask_secrets

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

    def check(self) -> None:
        """Raise ConfigurationError for settings that contradict each other, or whose files cannot be used."""


S = TypeVar("S", bound=ServiceSettings)


def load_settings(model: type[S], flags: Mapping[str, Any], *, file: Path | None) -> S:
    """Returns the settings; `flags` are nested as the file is; None and an empty list mean an absent flag.

    Raises ConfigurationError that names the file or the variable, the key, and for an unknown key the most similar
    known one. It repeats no values, since they may be secrets.
    """
    flag_values = _without_absent(flags)
    try:
        return _layered(model, flag_values, file=file)
    except ValidationError as error:
        raise ConfigurationError(_descriptions(error, model, flag_values=flag_values, file=file)[0]) from error
    except SettingsError as error:
        raise ConfigurationError(f"the environment: {error}; write lists and tables as JSON there") from error


def _layered(model: type[S], flag_values: Mapping[str, Any], *, file: Path | None) -> S:
    tables = {} if file is None else _read_tables(model, file)

    def sources(
        settings_cls: type[BaseSettings], /, **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Neither a .env file nor a folder of secrets is read.
        return sources["init_settings"], _environment(settings_cls), InitSettingsSource(settings_cls, tables)

    layered: type[S] = type(model.__name__, (model,), {"settings_customise_sources": staticmethod(sources)})
    return layered(**flag_values)


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


def _descriptions(
    error: ValidationError, model: type[BaseModel], *, flag_values: Mapping[str, Any], file: Path | None
) -> list[str]:
    """Describes each error, and the origin of the value."""
    return [
        _description(part["type"], part["loc"], part["msg"], model=model, flag_values=flag_values, file=file)
        for part in error.errors(include_input=False, include_url=False)
    ]


def _description(
    kind: str, location: Sequence[str | int], says: str, *, model: type[BaseModel], flag_values: Mapping[str, Any],
    file: Path | None,
) -> str:  # fmt: skip
    *table, key = location
    name = f"{key!r}" + (f" of [{'.'.join(map(str, table))}]" if table else "")
    if kind == "missing":
        return f"{_how_to_give(table, str(key))}the setting {name} is needed"
    origin = _origin(location, flag_values=flag_values, file=file)
    if kind == "extra_forbidden":
        similar = get_close_matches(str(key), _keys_of(model, table), n=1)
        return f"{origin}there is no setting {name}" + (f"; {similar[0]!r} is meant?" if similar else "")
    return f"{origin}the setting {name} is wrong: {says.removeprefix('Value error, ')}"


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


# -- what `outbox config` says of the settings -------------------------------------------------------------------------

_MADE_BY_SERVICES: Final = frozenset({"data", "ready_file", "judged_file"})
"""Paths of what a service makes itself, or another one does later: they may be missing."""
_SECRET_WORDS: Final = ("password", "secret", "token")


class Origin(StrEnum):
    """Where the value of a setting comes from. Flags are a command's own, and win over all of these."""

    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"
    MISSING = "missing"
    """It has no value, and a service needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    """A setting of a service: its name in the file (`table.key`), its value without secrets, and where it is from.

    `source`: the variable, or the file; None for a default.
    """

    name: str
    value: Any
    origin: Origin
    source: str | None
    variable: str


def resolved_settings(model: type[ServiceSettings], *, file: Path | None) -> list[ResolvedSetting]:
    """Returns every setting of a service, as it was written; what is wrong with it is said by setting_problems().

    Raises ConfigurationError for a file that cannot be read.
    """
    tables = {} if file is None else read_toml(file)
    return [_resolved(location, field, tables=tables, file=file) for location, field in _locations(model)]


def setting_problems(model: type[ServiceSettings], *, file: Path | None) -> list[str]:
    """Returns what keeps a service from starting with these settings, each with its cure; quotes no value.

    Wrong and missing values, keys that are unknown, values that contradict each other, files that are missing. Raises
    ConfigurationError for a file that cannot be read.
    """
    try:
        settings = _layered(model, {}, file=file)
    except ValidationError as error:
        return [*_descriptions(error, model, flag_values={}, file=file), *_missing_files(model, file=file)]
    except SettingsError as error:
        return [f"the environment: {error}; write lists and tables as JSON there"]
    missing = list(_missing_files(model, file=file))
    if missing:
        return missing
    try:
        settings.check()
    except ConfigurationError as error:
        return [str(error)]
    return []


def unknown_names(models: Iterable[type[ServiceSettings]], *, file: Path | None) -> list[str]:
    """Returns the keys and variables that none of these services has, each with the nearest name."""
    known: dict[str, set[str]] = {"": set()}
    for model in models:
        for (*table, key), _field in _locations(model):
            known.setdefault(".".join(table), set()).add(key)
            known[""].update(table or [key])
    return sorted([*_unknown_in_file(known, file=file), *_unknown_variables(known)])


def _unknown_in_file(known: Mapping[str, set[str]], *, file: Path | None) -> Iterator[str]:
    for name, table in ({} if file is None else read_toml(file)).items():
        if name not in known[""]:
            yield f"{file}: there is no table or key {name!r}{_nearest(name, known[''])}"
        elif isinstance(table, dict) and name in known:
            for key in table.keys() - known[name]:
                yield f"{file}: there is no setting {key!r} of [{name}]{_nearest(key, known[name])}"


def _unknown_variables(known: Mapping[str, set[str]]) -> Iterator[str]:
    for variable in map(str.upper, os.environ):
        # Those without the delimiter are also an application's own: it names its broker's URL OUTBOX_BROKER.
        if not variable.startswith(ENVIRONMENT_PREFIX) or _DELIMITER not in variable:
            continue
        table, key, *_ = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split(_DELIMITER)
        if table not in known:
            yield f"{variable} in the environment: there is no table {table!r}{_nearest(table, known[''])}"
        elif key not in known[table]:
            origin = f"{_variable([table, key])} in the environment"
            yield f"{origin}: there is no setting {key!r} of [{table}]{_nearest(key, known[table])}"


def is_configured(model: type[ServiceSettings], *, file: Path | None) -> bool:
    """Returns whether the file or the environment has a setting of this service's."""
    return any(setting.origin in {Origin.ENVIRONMENT, Origin.FILE} for setting in resolved_settings(model, file=file))


def _locations(model: type[BaseModel]) -> Iterator[tuple[list[str], FieldInfo]]:
    """Yields the settings of a model: those of its tables, and single keys before the first table."""
    for name, field in model.model_fields.items():
        table = _table_in(field.annotation)
        if table is None:
            yield [name], field
        else:
            yield from (([name, key], inner) for key, inner in table.model_fields.items())


def _resolved(
    location: list[str], field: FieldInfo, *, tables: Mapping[str, Any], file: Path | None
) -> ResolvedSetting:
    variable, name = _variable(location), ".".join(location)
    given = {written.upper(): (written, text) for written, text in os.environ.items()}.get(variable)
    if given is not None:
        value, origin, source = given[1], Origin.ENVIRONMENT, given[0]
    elif found := _values_at(tables, location):
        [value], origin, source = found, Origin.FILE, str(file)
    elif field.is_required():
        value, origin, source = None, Origin.MISSING, None
    else:
        value, origin, source = field.get_default(call_default_factory=True), Origin.DEFAULT, None
    return ResolvedSetting(name=name, value=_shown(name, value), origin=origin, source=source, variable=variable)


def _values_at(tables: Any, location: Sequence[str]) -> list[Any]:
    """Returns the value there; nothing where there is none."""
    for part in location:
        if not isinstance(tables, Mapping) or part not in tables:
            return []
        tables = tables[part]
    return [tables]


def _shown(name: str, value: Any) -> Any:
    """Returns a value as JSON has it, without passwords, tokens and secrets of URLs. Paths of their files are shown."""
    key = name.rpartition(".")[2]
    if value and any(word in key for word in _SECRET_WORDS) and not key.endswith(("_file", "tokens")):
        return MASK
    match value:
        case Mapping():
            return {inner: _shown(str(inner), part) for inner, part in value.items()}
        case list() | tuple():
            return [_shown(name, part) for part in value]
        case bool() | int() | float() | None:
            return value
        case _:
            return mask_secrets(str(value))


def _missing_files(model: type[ServiceSettings], *, file: Path | None) -> Iterator[str]:
    tables = {} if file is None else read_toml(file)
    for location, field in _locations(model):
        types: tuple[object, ...] = (field.annotation, *get_args(field.annotation))
        if Path not in types or location[-1] in _MADE_BY_SERVICES:
            continue
        setting = _resolved(location, field, tables=tables, file=file)
        if isinstance(setting.value, str) and not os.access(setting.value, os.R_OK):
            yield f"{setting.source}: {setting.value}, the setting {setting.name}, is no file that this user can read"


def _nearest(name: str, names: Iterable[str]) -> str:
    similar = get_close_matches(name, sorted(names), n=1)
    return f"; {similar[0]!r} is meant?" if similar else ""
