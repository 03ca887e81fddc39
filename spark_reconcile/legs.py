"""The legs: each source's records in one shape, read once and in causal order, from the consumer back to the business.

That order matters while things move: whatever is seen downstream was upstream before, so that what moves between two
reads can look late, but never invented. Each leg is written to the run's staging folder, and read from there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from messaging.errors import ConfigurationError, SchemaMissing, StorageFailed
from messaging.journal import HEADER_BYTES, SegmentDamaged, SegmentHeader, segment_paths
from messaging.message import check_group
from spark_reconcile.config import InboxSource, Rule, Settings
from spark_reconcile.database import Place, checked, columns_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_SCHEMA: Final = "outbox"
SQL_PARTITIONS: Final = 4
_MESSAGE: Final = (
    "id string, kind string, state string, topic string, message_key string, body_sha256 string, "
    "deliver_at_ms bigint, created_at_us bigint, attempts int"
)
_ARCHIVE: Final = (
    "id string, kind string, topic string, message_key string, body_sha256 string, "
    "deliver_at_ms bigint, created_at_us bigint, sent_at_us bigint, attempts int, outcome string"
)
_INBOX: Final = "consumer_group string, message_id string, topic string, handled_at_us bigint"
_UNITS: Final = {"us": 1, "ms": 1_000, "s": 1_000_000}


class Legs:
    """Checks the sources of a run, then reads them, one after the other."""

    def __init__(self, session: SparkSession, settings: Settings, *, staging: Path) -> None:
        self._session = session
        self._settings = settings
        self._staging = staging

    def inboxes(self) -> DataFrame:
        """id, group, handled_ms: one row an effect."""
        found = None
        for inbox in self._settings.inboxes:
            place, schema = _inbox_place(self._settings, inbox)
            table = self._sql(
                place, url=inbox.url or self._settings.database.url, schema=schema, table=_named(place, "inbox"),
                ddl=_INBOX, where={"consumer_group": inbox.group}, range_column="handled_at_us",
            )  # fmt: skip
            effects = table.selectExpr(
                "message_id as id", "consumer_group as group", "handled_at_us div 1000 as handled_ms"
            )
            found = effects if found is None else found.unionByName(effects)
        if found is None:
            found = self._session.createDataFrame([], "id string, group string, handled_ms bigint")
        return self._staged("inboxes", found)

    def actions(self) -> DataFrame:
        """The broker's actions, a row a message."""
        source = self._session.read.format("outbox_broker_actions").option("data", self._settings.broker.data)
        return self._staged("actions", source.load())

    def stored(self) -> DataFrame:
        """The broker's messages."""
        source = self._session.read.format("outbox_broker_messages").option("data", self._settings.broker.data)
        return self._staged("stored", source.load())

    def outbox(self) -> DataFrame:
        """Rows of the message table that publish."""
        return self._staged("outbox", self._table("message", _MESSAGE, range_column="created_at_us"))

    def archive(self) -> DataFrame:
        """Rows of the archive that published. Read after the message table: a row moves from there to here."""
        return self._staged("archive", self._table("archive", _ARCHIVE, range_column="created_at_us"))

    def business(self) -> DataFrame:
        """rule, topic, key, at_ms: one row for each business row that must have a message."""
        found = None
        for rule in self._settings.rules:
            place = Place.of(rule.url or self._settings.database.url)
            ddl = f"`{checked(rule.key_column)}` string, `{checked(rule.time_column)}` bigint"
            table = self._sql(
                place, url=rule.url or self._settings.database.url, schema=None, table=rule.table, ddl=ddl,
                where=rule.where, range_column=rule.time_column,
            )  # fmt: skip
            rows = table.selectExpr(
                f"'{rule.name}' as rule",
                f"'{rule.topic}' as topic",
                f"`{rule.key_column}` as key",
                f"`{rule.time_column}` * {_UNITS[rule.time_unit]} div 1000 as at_ms",
            )
            found = rows if found is None else found.unionByName(rows)
        if found is None:
            found = self._session.createDataFrame([], "rule string, topic string, key string, at_ms bigint")
        return self._staged("business", found)

    def _table(self, name: str, ddl: str, *, range_column: str) -> DataFrame:
        place = Place.of(self._settings.database.url)
        return self._sql(
            place, url=self._settings.database.url, schema=_schema(place, self._settings.database.schema),
            table=_named(place, name), ddl=ddl, where={"kind": "publish"}, range_column=range_column,
        )  # fmt: skip

    def _sql(
        self, place: Place, *, url: str, schema: str | None, table: str, ddl: str, where: dict[str, str | int],
        range_column: str,
    ) -> DataFrame:  # fmt: skip
        return (
            self._session.read.format("outbox_sql")
            .schema(ddl)
            .option("url", url)
            .option("schema", schema or "")
            .option("table", table)
            .option("where", json.dumps(where))
            .option("range_column", range_column)
            .option("partitions", "1" if place.backend == "sqlite" else str(SQL_PARTITIONS))
            .load()
        )

    def _staged(self, name: str, frame: DataFrame) -> DataFrame:
        path = str(self._staging / name)
        frame.write.mode("overwrite").parquet(path)
        return self._session.read.parquet(path)


def check_sources(settings: Settings) -> None:
    """Look at every source before any work, and refuse what cannot be judged, naming the cure.

    Raises ConfigurationError (a name, a table or a column that is not there), SchemaMissing, DatabaseUnavailable, or
    StorageFailed for a broker's folder that cannot be read or is damaged at the head of a segment.
    """
    for rule in settings.rules:
        _check_rule(settings, rule)
    place = Place.of(settings.database.url)
    schema = _schema(place, settings.database.schema)
    for table in ("message", "archive"):
        if not columns_of(place, schema=schema, table=_named(place, table)):
            raise SchemaMissing(
                f"there is no table {schema + '.' if schema else ''}{_named(place, table)} in {place}; "
                "run: outbox db upgrade --url URL"
            )
    for number, inbox in enumerate(settings.inboxes):
        check_group(inbox.group)
        if inbox in settings.inboxes[:number]:
            raise ConfigurationError(f"the inbox of {inbox.group} is named twice: its effects would count twice")
        inbox_place, inbox_schema = _inbox_place(settings, inbox)
        if not columns_of(inbox_place, schema=inbox_schema, table=_named(inbox_place, "inbox")):
            raise SchemaMissing(f"there is no inbox table for the group {inbox.group} in {inbox_place}")
    _check_broker(Path(settings.broker.data))


def _check_rule(settings: Settings, rule: Rule) -> None:
    if rule.time_unit not in _UNITS:
        raise ConfigurationError(f"rule {rule.name}: time_unit is us, ms or s, not {rule.time_unit!r}")
    for text in (rule.name, rule.topic):
        if "'" in text or "\\" in text:
            raise ConfigurationError(f"rule {rule.name!r}: name and topic must not contain quotes or backslashes")
    place = Place.of(rule.url or settings.database.url)
    found = columns_of(place, schema=None, table=rule.table)
    if not found:
        raise ConfigurationError(f"rule {rule.name}: there is no table {rule.table} in {place}")
    for column in (rule.key_column, rule.time_column, *rule.where):
        if column not in found:
            raise ConfigurationError(
                f"rule {rule.name}: table {rule.table} has no column {column}; it has {', '.join(sorted(found))}"
            )
    if "int" not in found[rule.time_column]:
        raise ConfigurationError(
            f"rule {rule.name}: column {rule.time_column} is {found[rule.time_column] or 'of no type'}; time_column "
            "must be an integer column, time since the epoch (see time_unit)"
        )


def _check_broker(folder: Path) -> None:
    for log in ("messages", "actions"):
        try:
            paths = segment_paths(folder / log)
            if not paths:
                raise ConfigurationError(f"{folder} is not a broker's data folder: it has no segments in {log}/")
            for path in paths[:-1]:
                with path.open("rb") as file:
                    SegmentHeader.decode(file.read(HEADER_BYTES))
        except OSError as error:
            raise StorageFailed(f"cannot read the broker's log {folder / log}: {error.strerror}") from error
        except SegmentDamaged as damage:
            raise StorageFailed(f"the broker's log is damaged, nothing can be judged: {path}: {damage}") from damage


def _inbox_place(settings: Settings, inbox: InboxSource) -> tuple[Place, str | None]:
    place = Place.of(inbox.url or settings.database.url)
    return place, _schema(place, inbox.schema or settings.database.schema)


def _schema(place: Place, schema: str | None) -> str | None:
    return None if place.backend == "sqlite" else schema or DEFAULT_SCHEMA


def _named(place: Place, table: str) -> str:
    return f"outbox_{table}" if place.backend == "sqlite" else table
