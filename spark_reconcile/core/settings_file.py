"""Declares the settings of reconciliation, and reads them: options, the environment, a file, defaults.

They are in [database], [broker] and [reconcile] of a file of several services, `outbox.toml`, where keys of other
services in the first two are ignored. A file of reconciliation alone, `reconcile.toml`, has at its root what is below
[reconcile] there. Without pydantic: this extra is installed in Spark clusters, and would replace the pydantic of all
their jobs, some of major version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from outbox_core.common.errors import ConfigurationError, InvalidMessage
from outbox_core.runtime.config_files import read_secret, read_toml
from outbox_core.runtime.declared_settings import (
    DeclaredSetting,
    Location,
    as_json,
    as_written,
    file_tables,
    is_near,
    layered_values,
    nearest,
    origin_of,
)
from spark_reconcile.core.settings import (
    MASTER_DEFAULT,
    BusinessRule,
    CompletenessBound,
    Condition,
    Grace,
    InboxSource,
    KeyFormat,
    LedgerSource,
    Operator,
    OutboxSource,
    Settings,
    check_local_folder,
    is_url,
)
from spark_reconcile.core.time_arguments import length_ms

OUTPUT_DEFAULT: Final = "reconciliation"
BROKER_EXPORT: Final = "broker"
"""Subfolder of the output folder for what bookies keep of the broker."""
REPAIRS_MAX_DEFAULT: Final = 1_000
"""More repairs than this are no faults of single messages: a source is missing, or is the wrong one."""
EVERY_DEFAULT: Final = "1h"
LOOKBACK_DEFAULT: Final = "48h"


# -- the declaration ---------------------------------------------------------------------------------------------------
#
# How each key's text in the environment is read. What is wrong with a value is said where it is used, whoever gave it.


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("it is not a number") from None


def _as_flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError("it is neither true nor false")
    return text.lower() == "true"


def _as_time(text: str) -> int | datetime:
    try:
        return int(text) if text.isdecimal() else datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it is neither a date, e.g. 2026-11-01, nor epoch milliseconds") from None


def _as_path(text: str) -> str:
    """Returns the path within the working directory; those of a file of reconciliation alone are within its folder."""
    return str(Path(text).expanduser().absolute())


def _as_paths(text: str) -> Any:
    locations = _as_texts(text)
    return [
        _as_path(location) if isinstance(location, str) and not is_url(location) else location for location in locations
    ]


def _as_texts(text: str) -> Any:
    return as_json(text) if text.startswith("[") else [text]


_Keys = Mapping[str, Callable[[str], Any]]
_UNTIL: Final[_Keys] = {"complete_until": _as_time, "lag_seconds": _as_number}
_SHARED: Final[Mapping[str, _Keys]] = {
    "database": {
        "url": as_written, "password_file": _as_path, "schema": as_written, "archive": _as_flag,
        "complete_since": _as_time, "archive_days": _as_number, "inbox_days": _as_number, **_UNTIL,
    },
    "broker": {"data": _as_path, "store": as_written, "config": _as_path, "groups": _as_texts},
}  # fmt: skip
"""Tables that services have as well."""
_OWN: Final[Mapping[str, _Keys]] = {
    "archive": {"parquet": _as_paths},
    "grace": {setting.name: _as_number for setting in fields(Grace)},
    "output": {"folder": _as_path, "keep_days": _as_number},
    "delay": {"store": as_written, "config": _as_path},
}  # fmt: skip
"""Tables below [reconcile]."""
_COMMAND: Final[_Keys] = {
    "master": as_written, "metrics_file": _as_path, "repairs_max": _as_number, "every": as_written,
    "lookback": as_written,
}  # fmt: skip
"""Keys of [reconcile]: how the commands run it."""
_LISTS: Final[Mapping[str, frozenset[str]]] = {
    "outboxes": frozenset({"url", "schema", *_UNTIL}),
    "rules": frozenset(
        {
            "name", "table", "where", "key_column", "time_column", "time_unit", "topic", "deliver_at_column", "url",
            "complete_since", "body", "key_format", *_UNTIL,
        }
    ),
    "inboxes": frozenset({"group", "url", "schema", "topics", "complete_since", *_UNTIL}),
}  # fmt: skip
"""Lists of tables below [reconcile], each with its keys: JSON in the environment."""
_BELOW: Final = frozenset({*_OWN, *_COMMAND, *_LISTS})
_CONDITION: Final = frozenset({"column", "op", "value"})
_RECONCILE: Final = "reconcile"
_REQUIRED: Final = frozenset({("database", "url")})
_DEFAULTS: Final[Mapping[Location, Any]] = {
    ("database", "archive"): True,
    **{("reconcile", "grace", name): value for name, value in asdict(Grace()).items()},
    ("reconcile", "output", "folder"): OUTPUT_DEFAULT,
    ("reconcile", "master"): MASTER_DEFAULT,
    ("reconcile", "repairs_max"): REPAIRS_MAX_DEFAULT,
    ("reconcile", "every"): EVERY_DEFAULT,
    ("reconcile", "lookback"): LOOKBACK_DEFAULT,
    **{("reconcile", name): [] for name in _LISTS},
}


def _declared() -> Iterator[DeclaredSetting]:
    readers: dict[Location, Callable[[str], Any]] = {
        **{(table, key): from_text for table, keys in _SHARED.items() for key, from_text in keys.items()},
        **{(_RECONCILE, key): from_text for key, from_text in _COMMAND.items()},
        **{(_RECONCILE, table, key): from_text for table, keys in _OWN.items() for key, from_text in keys.items()},
        **{(_RECONCILE, name): as_json for name in _LISTS},
    }
    for location, from_text in readers.items():
        yield DeclaredSetting(
            location=location, default=_DEFAULTS.get(location), is_required=location in _REQUIRED,
            is_shared=location[0] in _SHARED, from_text=from_text,
        )  # fmt: skip


class ReconcileDeclaration:
    """What reconciliation declares, for `outbox config`."""

    def declared(self) -> Sequence[DeclaredSetting]:
        """Returns all settings."""
        return list(_declared())

    def placed(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tables, those of a file of reconciliation alone below [reconcile]."""
        if not _is_alone(tables):
            return dict(tables)
        shared = {name: table for name, table in tables.items() if is_near(name, _SHARED)}
        below = {name: table for name, table in tables.items() if name not in shared}
        return {**shared, _RECONCILE: below} if below else shared

    def problems(self, *, file: Path | None) -> list[str]:
        """Returns the first that keeps a run from starting."""
        try:
            settings = command_settings({}, file=file)
            length_ms(settings.every)
            length_ms(settings.lookback)
        except ConfigurationError as error:
            return [str(error)]
        return []


DECLARATION: Final = ReconcileDeclaration()


def _is_alone(tables: Mapping[str, Any]) -> bool:
    """Whether a file is of reconciliation alone: no table, and no key of [database] and [broker], is of a service.

    What is nearly a name of reconciliation's is one that is misspelt.
    """
    if _RECONCILE in tables:
        return False
    keys = [(key, known_keys) for name, known_keys in _SHARED.items() for key in _table(tables, name)]
    names = [(name, {*_SHARED, *_BELOW}) for name in tables]
    return all(is_near(name, known_names) for name, known_names in [*names, *keys])


# -- the values --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """What the commands of `outbox reconcile` are given: the settings of a run, and how and when to make it.

    `repairs_max`: more are refused. `every`, `lookback`: of `watch`, each a number and one of s, m, h, d.
    """

    run: Settings
    master: str
    metrics_file: Path | None
    repairs_max: int
    every: str
    lookback: str


def command_settings(flags: Mapping[str, Any], *, file: Path | None) -> CommandSettings:
    """Returns the flags, nested as `outbox.toml` is; for what they leave out the environment, the file, the default.

    Raises ConfigurationError that names the file or the variable, and for an unknown key the most similar known one.
    """
    tables, folder = _given(flags, file=file)
    if not tables["database"] or not tables["broker"]:
        raise ConfigurationError("name a file with --config, or at least --url and --broker-data")
    tables = {"master": MASTER_DEFAULT, "every": EVERY_DEFAULT, "lookback": LOOKBACK_DEFAULT, **tables}
    repairs_max = _number({"repairs_max": REPAIRS_MAX_DEFAULT, **tables}, "repairs_max", _RECONCILE) or 0.0
    if repairs_max < 1 or repairs_max != int(repairs_max):
        raise ConfigurationError("[reconcile]: repairs_max is a whole number, and at least 1")
    return CommandSettings(
        run=settings_of(tables, folder=folder),
        master=_text(tables, "master", _RECONCILE),
        metrics_file=_path(_text(tables, "metrics_file", _RECONCILE), folder) if "metrics_file" in tables else None,
        repairs_max=int(repairs_max),
        every=_text(tables, "every", _RECONCILE),
        lookback=_text(tables, "lookback", _RECONCILE),
    )


def output_folder(flags: Mapping[str, Any], *, file: Path | None) -> Path | None:
    """Returns the folder of results, from the same sources; None: there is no file, and nothing else names it."""
    tables, folder = _given(flags, file=file)
    output = _table(tables, "output")
    if file is None and "folder" not in output:
        return None
    path = _path(_text({"folder": OUTPUT_DEFAULT, **output}, "folder", "output"), folder)
    check_local_folder(path, "[output] folder")
    return path


def read_config(file: Path) -> dict[str, Any]:
    """Returns the tables of a file, with checked keys, as a file of reconciliation alone has them."""
    return _checked(file_tables(DECLARATION, file), flags={}, file=file)


def _given(flags: Mapping[str, Any], *, file: Path | None) -> tuple[dict[str, Any], Path | None]:
    """Returns the tables as a file of reconciliation alone has them, and the folder of its relative paths; None: the
    working directory, to which services relate those of a file that they share.
    """
    tables = _checked(layered_values(DECLARATION, flags, file=file), flags=flags, file=file)
    is_alone = file is not None and _is_alone(read_toml(file))
    return tables, file.resolve().parent if file is not None and is_alone else None


def _checked(values: Mapping[str, Any], *, flags: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Returns what stands in [database], [broker] and below [reconcile]. Raises ConfigurationError for unknown keys."""
    written = {} if file is None else read_toml(file)
    is_alone = _is_alone(written)
    misplaced = sorted(values.keys() & _BELOW)
    if misplaced:
        raise ConfigurationError(
            f"{file}: {misplaced[0]!r} is reconciliation's: in a file of several services it stands in [reconcile]"
        )

    def check(table: Mapping[str, Any], known: Iterable[str], *location: str) -> None:
        for key in sorted(table.keys() - set(known)):
            origin = origin_of([*location, key], flags=flags, file=file)
            shown = location[1:] if is_alone and location[0] == _RECONCILE else location
            raise ConfigurationError(origin + _unknown_key(key, known, ".".join(shown)))

    below = _table(values, _RECONCILE)
    check(below, _BELOW, _RECONCILE)
    for name, keys in _OWN.items():
        check(_table(below, name), keys, _RECONCILE, name)
    for name, known in _LISTS.items():
        for table in _tables(below, name):
            check(table, known, _RECONCILE, name)
    for name, keys in _SHARED.items():
        check(_table(written, name) if is_alone else {}, keys, name)
    shared = {
        name: {key: value for key, value in _table(values, name).items() if key in keys}
        for name, keys in _SHARED.items()
    }
    return {**below, **shared}


def _unknown_key(key: str, known: Iterable[str], table: str) -> str:
    return f"there is no setting {key!r}{f' of [{table}]' if table else ''}{nearest(key, known)}"


def settings_of(config: Mapping[str, Any], *, folder: Path | None = None) -> Settings:
    """Builds Settings from checked tables; relative paths are relative to `folder`, the file's own."""
    database, broker, output = _table(config, "database"), _table(config, "broker"), _table(config, "output")
    results = _path(output.get("folder", OUTPUT_DEFAULT), folder)
    exported = results / BROKER_EXPORT
    try:
        store = _broker_store(broker, folder)
        settings = Settings(
            database_url=_text(database, "url", "database"),
            schema=_text(database, "schema", "database") if "schema" in database else None,
            outboxes=tuple(outbox for table in _tables(config, "outboxes") for outbox in _outboxes(table)),
            archives=tuple(
                _archive(location, folder) for location in _listed(_table(config, "archive"), "parquet", "archive")
            ),
            complete_since_ms=_time_ms(database, "database"),
            archive=_flag(database, "archive", "database"),
            archive_days=_number(database, "archive_days", "database"),
            inbox_days=_number(database, "inbox_days", "database"),
            until=_until(database, "database"),
            broker_data=exported if store else _path(_text(broker, "data", "broker"), folder),
            broker_store=store,
            groups=_listed(broker, "groups", "broker"),
            rules=tuple(_rule(table) for table in _tables(config, "rules")),
            inboxes=tuple(_inbox(table) for table in _tables(config, "inboxes")),
            grace=_grace(_table(config, "grace")),
            output=results,
            delay=_delay(_table(config, "delay"), folder),
            keep_days=_number(output, "keep_days", "output"),
        )
    except InvalidMessage as error:
        raise ConfigurationError(str(error)) from error
    if "password_file" not in database:
        return settings
    file = _path(_text(database, "password_file", "database"), folder)
    return with_password(settings, read_secret(file, what="password"))


def _grace(table: Mapping[str, Any]) -> Grace:
    numbers = {name: _number(table, name, "grace") for name in table}
    return Grace(**{name: value for name, value in numbers.items() if value is not None})


def _broker_store(table: Mapping[str, Any], folder: Path | None) -> LedgerSource | None:
    if "store" not in table:
        if "config" in table:
            raise ConfigurationError("[broker] config goes with store: a broker's data folder needs none")
        if "data" not in table:
            raise ConfigurationError("[broker] needs data, a broker's folder, or store, its address on BookKeeper")
        return None
    if "data" in table:
        raise ConfigurationError("[broker] has data for a broker in a folder, or store for one on BookKeeper: not both")
    return _ledger_source(table, "broker", folder)


def _delay(table: Mapping[str, Any], folder: Path | None) -> LedgerSource | None:
    if not table:
        return None
    try:
        return _ledger_source(table, "delay", folder)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; a delay service on one machine cannot be read: what waits in it is not_in_broker until it is due"
        ) from error


def _ledger_source(table: Mapping[str, Any], name: str, folder: Path | None) -> LedgerSource:
    config = _path(_text(table, "config", name), folder) if "config" in table else None
    try:
        return LedgerSource(store=_text(table, "store", name), config=config)
    except ConfigurationError as error:
        raise ConfigurationError(f"[{name}] {error}; it is like bookkeeper://zk1,zk2,zk3/outbox/{name}") from error


def _rule(table: Mapping[str, Any]) -> BusinessRule:
    return BusinessRule(
        name=_text(table, "name", "rules"),
        table=_text(table, "table", "rules"),
        key_column=_text(table, "key_column", "rules"),
        time_column=_text(table, "time_column", "rules"),
        topic=_text(table, "topic", "rules"),
        where=_conditions(table.get("where", {})),
        time_unit=_text(table, "time_unit", "rules") if "time_unit" in table else "us",
        body=_body(table),
        urls=_listed(table, "url", "rules"),
        deliver_at_column=_text(table, "deliver_at_column", "rules") if "deliver_at_column" in table else None,
        key_format=_key_format(_text(table, "key_format", "rules")) if "key_format" in table else None,
        complete_since_ms=_time_ms(table, "rules"),
        until=_until(table, "rules"),
    )


def _flag(table: Mapping[str, Any], name: str, of: str) -> bool:
    value = table.get(name, True)
    if not isinstance(value, bool):
        raise ConfigurationError(f"[{of}]: {name} is true or false, not {value!r}")
    return value


def _key_format(name: str) -> KeyFormat:
    if name not in list(KeyFormat):
        raise ConfigurationError(f"[rules]: key_format is one of {', '.join(KeyFormat)}, not {name!r}")
    return KeyFormat(name)


def _body(table: Mapping[str, Any]) -> dict[str, str]:
    body = table.get("body", {})
    if not isinstance(body, dict) or not all(isinstance(column, str) for column in body.values()):
        raise ConfigurationError('[rules]: body is a table of fields and columns, e.g. body = {order_id = "id"}')
    return body


def _outboxes(table: Mapping[str, Any]) -> list[OutboxSource]:
    """One url with one schema, or with a list of them."""
    schemas = _listed(table, "schema", "outboxes") or (None,)
    url, until = _text(table, "url", "outboxes"), _until(table, "outboxes")
    return [OutboxSource(url=url, schema=schema, until=until) for schema in schemas]


def _inbox(table: Mapping[str, Any]) -> InboxSource:
    topics = table.get("topics", [])
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise ConfigurationError("[[inboxes]]: topics is a list of topic names")
    return InboxSource(
        group=_text(table, "group", "inboxes"),
        url=_text(table, "url", "inboxes") if "url" in table else None,
        schema=_text(table, "schema", "inboxes") if "schema" in table else None,
        topics=tuple(topics),
        complete_since_ms=_time_ms(table, "inboxes"),
        until=_until(table, "inboxes"),
    )


def _conditions(where: object) -> tuple[Condition, ...]:
    """`{status = "PAID", kind = ["a", "b"]}`, or a list of `{column, op, value}`."""
    match where:
        case dict():
            return tuple(
                Condition(column=column, operator=Operator.IN, values=_values(value))
                if isinstance(value, list)
                else Condition(column=column, values=_values(value))
                for column, value in where.items()
            )
        case list():
            return tuple(_condition(condition) for condition in where)
        case _:
            raise ConfigurationError(
                'where is a table of columns and values, e.g. where = {status = "PAID"}, '
                'or a list of {column = "amount", op = ">", value = 0}; free SQL is not taken'
            )


def _condition(condition: object) -> Condition:
    if not isinstance(condition, dict):
        raise ConfigurationError('a condition is a table, e.g. {column = "amount", op = ">", value = 0}')
    for key in sorted(condition.keys() - _CONDITION):
        raise ConfigurationError(_unknown_key(key, _CONDITION, "where"))
    try:
        operator = Operator(condition.get("op", "="))
    except ValueError as error:
        operators = ", ".join(repr(str(operator)) for operator in Operator)
        raise ConfigurationError(f"op {condition.get('op')!r} is not one of {operators}") from error
    values = _values(condition["value"]) if "value" in condition else ()
    return Condition(column=_text(condition, "column", "where"), operator=operator, values=values)


def _values(value: object) -> tuple[str | int | float | bool, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(scalar, str | int | float | bool) for scalar in values):
        raise ConfigurationError(f"a condition's value is text, a number or a boolean, not {value!r}")
    return tuple(values)


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{name} is a table: write [{name}]")
    return table


def _tables(config: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    tables = config.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{name} are tables: write [[{name}]] before each")
    return tables


def _text(table: Mapping[str, Any], key: str, table_name: str) -> str:
    text = table.get(key)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f"[{table_name}] needs {key}, a text" if text is None else f"[{table_name}]: {key} is a text"
        )
    return text


def _listed(table: Mapping[str, Any], key: str, table_name: str) -> tuple[str, ...]:
    """A text, or a list of texts."""
    value = table.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigurationError(f"[{table_name}]: {key} is a text, or a list of texts")
    return tuple(texts)


def _number(table: Mapping[str, Any], key: str, table_name: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigurationError(f"[{table_name}]: {key} is a number")
    return float(value)


def _until(table: Mapping[str, Any], table_name: str) -> CompletenessBound:
    return CompletenessBound(
        complete_until_ms=_time_ms(table, table_name, "complete_until"),
        lag_seconds=_number(table, "lag_seconds", table_name),
    )


def _time_ms(table: Mapping[str, Any], table_name: str, key: str = "complete_since") -> int | None:
    """Reads a TOML date or datetime (UTC without a zone), or milliseconds since the epoch."""
    match table.get(key):
        case None:
            return None
        case int(epoch_ms) if not isinstance(epoch_ms, bool):
            return epoch_ms
        case datetime() as moment:
            return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
        case date() as day:
            return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
        case _:
            raise ConfigurationError(f"[{table_name}]: {key} is a date, e.g. 2026-11-01, or epoch milliseconds")


def _archive(text: str, folder: Path | None) -> Path | str:
    """Returns a URL unchanged, since Path() would join its slashes; else a folder."""
    return text if is_url(text) else _path(text, folder)


def _path(text: str, folder: Path | None) -> Path:
    path = Path(text).expanduser()
    return path if folder is None or path.is_absolute() else folder / path


def with_password(settings: Settings, password: str) -> Settings:
    """Returns the settings with the password in each URL of MySQL or MariaDB that has none."""
    return replace(
        settings,
        database_url=url_with_password(settings.database_url, password),
        outboxes=tuple(replace(outbox, url=url_with_password(outbox.url, password)) for outbox in settings.outboxes),
        rules=tuple(
            replace(rule, urls=tuple(url_with_password(url, password) for url in rule.urls)) for rule in settings.rules
        ),
        inboxes=tuple(
            replace(inbox, url=None if inbox.url is None else url_with_password(inbox.url, password))
            for inbox in settings.inboxes
        ),
    )


def url_with_password(url: str, password: str) -> str:
    """Returns the URL unchanged if it has a password, or no user; what is no URL is refused where it is opened."""
    try:
        parts = urlsplit(url)
        if not parts.username or parts.password is not None:
            return url
    except ValueError:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
