"""Loads the settings of a service: flags, then environment variables OUTBOX_*, then a TOML file, then defaults.

A service declares its tables as pydantic models, with names, types and limits. For services only: the SDK does not
need pydantic. msgspec would spare the dependency, but its errors are texts to be taken apart, and some quote the value.
Where a value is from, and what `outbox config` says of it, is told by declared_settings.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.declared_settings import (
    DeclaredSetting,
    as_json,
    as_written,
    layered_values,
    missing_files,
    origin_of,
    present_flags,
    variable_of,
)

_MADE_BY_SERVICES: Final = frozenset({"data", "ready_file", "judged_file"})
"""Paths of what a service makes itself, or another one does later: they may be missing."""


class Table(BaseModel):
    """A table of the file. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(BaseModel):
    """All tables that a service reads; tables of other services in the same file are ignored.

    The key `name` of [table] is OUTBOX_TABLE__NAME in the environment.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    def check(self) -> None:
        """Raise ConfigurationError for settings that contradict each other, or whose files cannot be used."""

    @classmethod
    def declared(cls) -> list[DeclaredSetting]:
        """Returns the settings of its tables, and single keys before the first table."""
        return [_declared(location, field) for location, field in _locations(cls)]

    @classmethod
    def placed(cls, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tables of a file: a service has no file of another form."""
        return dict(tables)

    @classmethod
    def problems(cls, *, file: Path | None) -> list[str]:
        """Returns what keeps a service from starting with these settings, each with its cure; quotes no value.

        Wrong and missing values, keys that are unknown, values that contradict each other, files that are missing.
        Raises ConfigurationError for a file that cannot be read.
        """
        try:
            settings = cls.model_validate(layered_values(cls, {}, file=file))
        except ConfigurationError as error:
            return [str(error)]
        except ValidationError as error:
            return [*_descriptions(error, cls, flag_values={}, file=file), *missing_files(cls, file=file)]
        missing = missing_files(cls, file=file)
        if missing:
            return missing
        try:
            settings.check()
        except ConfigurationError as error:
            return [str(error)]
        return []


S = TypeVar("S", bound=ServiceSettings)


def load_settings(model: type[S], flags: Mapping[str, Any], *, file: Path | None) -> S:
    """Returns the settings; `flags` are nested as the file is; None and an empty list mean an absent flag.

    Raises ConfigurationError that names the file or the variable, the key, and for an unknown key the most similar
    known one. It repeats no values, since they may be secrets.
    """
    flag_values = present_flags(flags)
    try:
        return model.model_validate(layered_values(model, flag_values, file=file))
    except ValidationError as error:
        raise ConfigurationError(_descriptions(error, model, flag_values=flag_values, file=file)[0]) from error


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
    origin = origin_of(location, flags=flag_values, file=file)
    if kind == "extra_forbidden":
        similar = get_close_matches(str(key), _keys_of(model, table), n=1)
        return f"{origin}there is no setting {name}" + (f"; {similar[0]!r} is meant?" if similar else "")
    return f"{origin}the setting {name} is wrong: {says.removeprefix('Value error, ')}"


def _how_to_give(table: Sequence[str | int], key: str) -> str:
    if len(table) != 1:
        return ""
    return f"--{key.replace('_', '-')} is needed, or {variable_of([*table, key])}, or a --config FILE: "


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


def _locations(model: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in model.model_fields.items():
        table = _table_in(field.annotation)
        if table is None:
            yield (name,), field
        else:
            yield from (((name, key), inner) for key, inner in table.model_fields.items())


def _declared(location: tuple[str, ...], field: FieldInfo) -> DeclaredSetting:
    types = (field.annotation, *get_args(field.annotation))
    is_list = any(get_origin(candidate) is list for candidate in types)
    return DeclaredSetting(
        location=location,
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        is_required=field.is_required(),
        is_input_file=Path in types and location[-1] not in _MADE_BY_SERVICES,
        from_text=as_json if is_list else as_written,
    )
