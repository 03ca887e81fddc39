"""Reads Settings from a TOML file; an unknown key is an error that suggests the nearest known one.

Without pydantic: this extra is installed in Spark clusters, and would replace the pydantic of all their jobs, some of
major version 1. There are no layers to merge: one file, and five flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from outbox_core.common.errors import ConfigurationError, InvalidMessage
from outbox_core.runtime.config_files import read_secret, read_toml
from spark_reconcile.core.settings import (
    BusinessRule,
    CompletenessBound,
    Condition,
    DelaySource,
    Grace,
    InboxSource,
    KeyFormat,
    Operator,
    OutboxSource,
    Settings,
    is_url,
)

_UNTIL: Final = frozenset({"complete_until", "lag_seconds"})
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({"database", "outboxes", "archive", "broker", "rules", "inboxes", "grace", "output", "delay"}),
    "database": frozenset(
        {"url", "password_file", "schema", "archive", "complete_since", "archive_days", "inbox_days"}
    ) | _UNTIL,
    "outboxes": frozenset({"url", "schema"}) | _UNTIL,
    "archive": frozenset({"parquet"}),
    "broker": frozenset({"data", "groups"}),
    "rules": frozenset(
        {
            "name", "table", "where", "key_column", "time_column", "time_unit", "topic", "deliver_at_column", "url",
            "complete_since", "body", "key_format",
        }
    ) | _UNTIL,
    "inboxes": frozenset({"group", "url", "schema", "topics", "complete_since"}) | _UNTIL,
    "grace": frozenset(
        {"seconds", "late_after_seconds", "clock_skew_seconds", "slack_seconds", "confirm_after_seconds"}
    ),
    "output": frozenset({"folder", "keep_days"}),
    "delay": frozenset({"store", "config"}),
    "where": frozenset({"column", "op", "value"}),
}  # fmt: skip
OUTPUT_DEFAULT: Final = "reconciliation"


def read_config(path: Path) -> dict[str, Any]:
    """Returns the file's tables, with checked keys. Raises ConfigurationError with the nearest known key."""
    config = read_toml(path)
    _check_keys(config, "")
    for name in ("database", "archive", "broker", "grace", "output", "delay"):
        _check_keys(_table(config, name), name)
    for name in ("outboxes", "rules", "inboxes"):
        for table in _tables(config, name):
            _check_keys(table, name)
    return config


def settings_of(config: Mapping[str, Any], *, folder: Path | None = None) -> Settings:
    """Builds Settings from checked tables; relative paths are relative to `folder`, the file's own."""
    database, broker, output = _table(config, "database"), _table(config, "broker"), _table(config, "output")
    try:
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
            broker_data=_path(_text(broker, "data", "broker"), folder),
            groups=_listed(broker, "groups", "broker"),
            rules=tuple(_rule(table) for table in _tables(config, "rules")),
            inboxes=tuple(_inbox(table) for table in _tables(config, "inboxes")),
            grace=_grace(_table(config, "grace")),
            output=_path(output.get("folder", OUTPUT_DEFAULT), folder),
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


def _delay(table: Mapping[str, Any], folder: Path | None) -> DelaySource | None:
    if not table:
        return None
    config = _path(_text(table, "config", "delay"), folder) if "config" in table else None
    return DelaySource(store=_text(table, "store", "delay"), config=config)


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
    _check_keys(condition, "where")
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


def _check_keys(table: Mapping[str, Any], table_name: str) -> None:
    known_keys = _KEYS[table_name]
    for key in table:
        if key not in known_keys:
            near = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known_keys))}"
            raise ConfigurationError(f"unknown key {key!r}{f' in [{table_name}]' if table_name else ''}; {hint}")


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
