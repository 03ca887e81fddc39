"""Where a setting is from: a flag, else a variable OUTBOX_*, else a TOML file, else its default. Checks no values.

Whoever has settings declares them, and is shown and checked by `outbox config`: services as pydantic models, see
settings.py; reconciliation without pydantic, which would replace that of a Spark cluster's other jobs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_toml
from outbox_core.runtime.logs import MASK, mask_secrets

ENVIRONMENT_PREFIX: Final = "OUTBOX_"
_DELIMITER: Final = "__"
_NEAR: Final = 0.8
_SECRET_WORDS: Final = ("password", "secret", "token")

Location = tuple[str, ...]


def as_written(text: str) -> str:
    """Returns a variable's text: its declaration reads it."""
    return text


def as_json(text: str) -> Any:
    """Returns the list or the table of a variable. Raises ValueError, which does not quote it."""
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("it is not JSON; write lists and tables as JSON there") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSetting:
    """A setting: where it stands in the file, `("broker", "data")` for `data` of [broker], and its default.

    `from_text` reads a variable's text, and raises ValueError. `is_input_file`: it names a file that must be there.
    `is_shared`: services have it as well, so that it does not tell whether this one is configured.
    """

    location: Location
    default: Any = None
    is_required: bool = False
    is_input_file: bool = False
    is_shared: bool = False
    from_text: Callable[[str], Any] = as_written

    @property
    def name(self) -> str:
        """Its name: `broker.data`."""
        return ".".join(self.location)

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return variable_of(self.location)


class SettingsDeclaration(Protocol):
    """What a service, or reconciliation, declares. Reads files and the environment alone, and writes nothing."""

    def declared(self) -> Sequence[DeclaredSetting]:
        """Returns all settings."""

    def placed(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tables of a file as they stand in a file of several services."""

    def problems(self, *, file: Path | None) -> list[str]:
        """Returns what is wrong with the settings, each with its cure; quotes no value. Raises ConfigurationError for a
        file that cannot be read.
        """


# -- the values --------------------------------------------------------------------------------------------------------


def layered_values(declaration: SettingsDeclaration, flags: Mapping[str, Any], *, file: Path | None) -> dict[str, Any]:
    """Returns what was given, nested as a file of several services: the file, the environment over it, and `flags`,
    nested alike, over both. A flag that is None or an empty list is absent. Defaults are the declaration's to add.

    Raises ConfigurationError that names the file or the variable, and for an unknown table the most similar known one.
    """
    settings = declaration.declared()
    tables = {} if file is None else file_tables(declaration, file)
    return _merged(_merged(tables, _environment(settings)), present_flags(flags))


def file_tables(declaration: SettingsDeclaration, file: Path) -> dict[str, Any]:
    """Returns the file's tables; those of other services are among them. Raises ConfigurationError."""
    settings = declaration.declared()
    tables = declaration.placed(read_toml(file))
    known_names = {setting.location[0] for setting in settings}
    for name in tables.keys() - known_names:
        if is_near(name, known_names):
            raise ConfigurationError(f"there is no {name!r} in {file}{nearest(name, known_names)}")
    for name in sorted(_table_names(settings)):
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigurationError(f"[{name}] in {file} must be a table")
    return tables


def present_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags without those that were not given."""
    nested = {name: present_flags(flag) if isinstance(flag, Mapping) else flag for name, flag in flags.items()}
    return {name: flag for name, flag in nested.items() if flag is not None and flag != []}


def origin_of(location: Sequence[str | int], *, flags: Mapping[str, Any], file: Path | None) -> str:
    """Returns the beginning of a sentence about a value: the source of highest precedence that has it."""
    if _has(flags, location):
        return ""
    variables = {name.upper() for name in os.environ}
    for length in range(len(location), 0, -1):
        if variable_of(location[:length]) in variables:
            return f"{variable_of(location[:length])} in the environment: "
    return "" if file is None else f"{file}: "


def variable_of(location: Sequence[str | int]) -> str:
    """Returns the name in the environment of what stands there in the file."""
    return ENVIRONMENT_PREFIX + _DELIMITER.join(map(str, location)).upper()


def is_near(name: str, known_names: Iterable[str]) -> bool:
    """Returns whether the name is one of these, or one of them misspelt; else it may be another service's."""
    return bool(get_close_matches(name, list(known_names), n=1, cutoff=_NEAR))


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: the known one that is meant, if any is similar."""
    similar = get_close_matches(name, sorted(names), n=1)
    return f"; {similar[0]!r} is meant?" if similar else ""


def _environment(settings: Sequence[DeclaredSetting]) -> dict[str, Any]:
    """Returns the values of the environment, also of keys that nobody declared, for the declaration to refuse.

    A variable with the name of a whole table is left out: applications name their broker's URL OUTBOX_BROKER.
    """
    by_location = {setting.location: setting for setting in settings}
    table_names = _table_names(settings)
    values: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        location = _location_of(variable)
        setting = by_location.get(location)
        if setting is None and not (len(location) > 1 and location[0] in table_names):
            continue
        try:
            value = text if setting is None else setting.from_text(text)
        except ValueError as error:
            raise ConfigurationError(f"{variable} in the environment: {error}") from None  # it may quote the value
        nested: Any = value
        for part in reversed(location):
            nested = {part: nested}
        values = _merged(values, nested)
    return values


def _location_of(variable: str) -> Location:
    """Returns where in the file a variable's setting stands; nothing for a variable that is none of ours."""
    upper = variable.upper()
    if not upper.startswith(ENVIRONMENT_PREFIX):
        return ()
    return tuple(upper.removeprefix(ENVIRONMENT_PREFIX).lower().split(_DELIMITER))


def _table_names(settings: Iterable[DeclaredSetting]) -> set[str]:
    return {setting.location[0] for setting in settings if len(setting.location) > 1}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both, key by key; where both have a value, and not both a table, the one of `above`."""
    merged = dict(below)
    for name, value in above.items():
        before = merged.get(name)
        are_tables = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(merged[name], value) if are_tables else value
    return merged


def _has(tables: object, location: Sequence[str | int]) -> bool:
    """Returns whether these tables have the value at that location, or a list or text that contains it."""
    for part in location:
        if not isinstance(tables, Mapping):
            return True
        if part not in tables:
            return False
        tables = tables[part]
    return True


# -- what `outbox config` says of the settings -------------------------------------------------------------------------


class Origin(StrEnum):
    """Where the value of a setting comes from. Flags are a command's own, and win over all of these."""

    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"
    MISSING = "missing"
    """It has no value, and a service needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    """A setting: its name in the file (`table.key`), its value without secrets, and where it is from.

    `source`: the variable, or the file; None for a default.
    """

    name: str
    value: Any
    origin: Origin
    source: str | None
    variable: str


def resolved_settings(declaration: SettingsDeclaration, *, file: Path | None) -> list[ResolvedSetting]:
    """Returns every setting as it was written; what is wrong with it is said by problems().

    Raises ConfigurationError for a file that cannot be read.
    """
    tables = {} if file is None else declaration.placed(read_toml(file))
    return [_resolved(setting, tables=tables, file=file) for setting in declaration.declared()]


def is_configured(declaration: SettingsDeclaration, *, file: Path | None) -> bool:
    """Returns whether the file or the environment has one of these settings that is not shared."""
    tables = {} if file is None else declaration.placed(read_toml(file))
    own = [setting for setting in declaration.declared() if not setting.is_shared]
    origins = {_resolved(setting, tables=tables, file=file).origin for setting in own}
    return not origins.isdisjoint({Origin.ENVIRONMENT, Origin.FILE})


def unknown_names(declarations: Sequence[SettingsDeclaration], *, file: Path | None) -> list[str]:
    """Returns the keys and variables that nobody declares, each with the nearest name."""
    known: dict[str, set[str]] = {"": set()}
    tables = {} if file is None else read_toml(file)
    for declaration in declarations:
        tables = declaration.placed(tables)
        for setting in declaration.declared():
            for length, key in enumerate(setting.location):
                known.setdefault(".".join(setting.location[:length]), set()).add(key)
    return sorted([*_unknown_in_file(tables, known, file=file), *_unknown_variables(known)])


def missing_files(declaration: SettingsDeclaration, *, file: Path | None) -> list[str]:
    """Returns a sentence for each file that a setting names and that cannot be read."""
    tables = {} if file is None else declaration.placed(read_toml(file))
    resolved = [
        _resolved(setting, tables=tables, file=file) for setting in declaration.declared() if setting.is_input_file
    ]
    return [
        f"{setting.source}: {setting.value}, the setting {setting.name}, is no file that this user can read"
        for setting in resolved
        if isinstance(setting.value, str) and not os.access(setting.value, os.R_OK)
    ]


def _resolved(setting: DeclaredSetting, *, tables: Mapping[str, Any], file: Path | None) -> ResolvedSetting:
    given = {written.upper(): (written, text) for written, text in os.environ.items()}.get(setting.variable)
    value: Any
    source: str | None
    if given is not None:
        value, origin, source = given[1], Origin.ENVIRONMENT, given[0]
    elif found := _values_at(tables, setting.location):
        [value], origin, source = found, Origin.FILE, str(file)
    elif setting.is_required:
        value, origin, source = None, Origin.MISSING, None
    else:
        value, origin, source = setting.default, Origin.DEFAULT, None
    shown = _shown(setting.name, value)
    return ResolvedSetting(name=setting.name, value=shown, origin=origin, source=source, variable=setting.variable)


def _values_at(tables: Any, location: Location) -> list[Any]:
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


def _unknown_in_file(
    tables: Mapping[str, Any], known: Mapping[str, set[str]], *, file: Path | None, table: str = ""
) -> Iterator[str]:
    for key, value in tables.items():
        name = f"{table}.{key}" if table else key
        if key not in known[table]:
            what = f"setting {key!r} of [{table}]" if table else f"table or key {key!r}"
            yield f"{file}: there is no {what}{nearest(key, known[table])}"
        elif isinstance(value, dict) and name in known:
            yield from _unknown_in_file(value, known, file=file, table=name)


def _unknown_variables(known: Mapping[str, set[str]]) -> Iterator[str]:
    for variable in os.environ:
        location = _location_of(variable)
        # Those without the delimiter are also an application's own: it names its broker's URL OUTBOX_BROKER.
        if len(location) < 2:
            continue
        for length, key in enumerate(location):
            table = ".".join(location[:length])
            if table not in known:
                break  # it goes on in a list, or a table, that is one setting
            if key not in known[table]:
                what = f"setting {key!r} of [{table}]" if table else f"table {key!r}"
                origin = variable_of(location[: length + 1] if table else location)
                yield f"{origin} in the environment: there is no {what}{nearest(key, known[table])}"
                break
