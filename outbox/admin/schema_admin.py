"""All message tables of one schema at once, for an operator: list, show, count what is meant, change it in batches.

It opens short transactions of its own; what a statement is, is the desk's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, select
from sqlalchemy.engine import URL

from outbox.admin.message_admin import AdminAction, MessageDesk, MessageSelection
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.schema import message_table_names, outbox_tables, schema_for
from outbox_core.common.errors import SchemaMissing

BATCH_ROWS: Final = 200
"""Rows changed in one transaction: few enough that nobody who sends waits long for them."""


class Desks:
    """The desks of a schema's message tables."""

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        """`engine` comes from outbox.store.database.background_engine. Raises SchemaMissing where there is no table."""
        self._engine = engine
        self._actual = schema_for(engine.dialect, schema)
        with self._reading() as connection:
            names = message_table_names(connection, self._actual)
        if not names:
            place = f"schema {self._actual}" if self._actual else "database"
            raise SchemaMissing(f"there is no message table in the {place}; run: outbox db upgrade --url URL")
        self._desks = {name: MessageDesk(dialect=engine.dialect, schema=schema, table=name) for name in names}

    def rows(self, wanted: MessageSelection, *, limit: int) -> list[dict[str, Any]]:
        """Rows of all tables, without bodies and headers, the longest due of each state first."""
        rows: list[dict[str, Any]] = []
        with self._reading() as connection:
            for name, desk in self._desks.items():
                rows += ({**row, "table": name} for row in desk.rows(connection, wanted, limit=limit))
        return sorted(rows, key=lambda row: (row["state"], row["due_in_us"], row["id"]))[:limit]

    def show(self, message_id: str, *, body_bytes_max: int) -> dict[str, Any] | None:
        """One message with all that its row holds; None where no table has it."""
        with self._reading() as connection:
            for name, desk in self._desks.items():
                row = desk.show(connection, message_id, body_bytes_max=body_bytes_max)
                if row is not None:
                    return {**row, "table": name}
        return None

    def sent(self, message_id: str) -> list[dict[str, Any]]:
        """What the archive says of a message: when it was sent, and what the broker answered."""
        archive = outbox_tables(self._actual).archive
        statement = select(archive).where(archive.c.id == message_id).order_by(archive.c.sent_at_us)
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def find(self, wanted: MessageSelection, *, action: AdminAction, rows_max: int) -> dict[str, list[str]]:
        """Ids, by table, of at most so many rows that are meant and that the action may be done to."""
        found: dict[str, list[str]] = {}
        left = rows_max
        with self._reading() as connection:
            for name, desk in self._desks.items():
                if left <= 0:
                    break
                found[name] = desk.ids(connection, wanted, action=action, limit=left)
                left -= len(found[name])
        return found

    def locate(self, ids: Sequence[str]) -> dict[str, list[str]]:
        """Which table has which of these ids; those that no table has are left out."""
        found: dict[str, list[str]] = {}
        left = set(ids)
        with self._reading() as connection:
            for name, desk in self._desks.items():
                if not left:
                    break
                for batch in _batches(sorted(left)):
                    found.setdefault(name, []).extend(desk.among(connection, batch))
                left -= set(found[name])
        return found

    def change(
        self, action: AdminAction, places: Mapping[str, Sequence[str]], *, after_batch: Callable[[int], None]
    ) -> Iterator[int]:
        """Do the action by primary key, a short transaction a batch; yields how many each batch changed.

        `after_batch` hears how many rows each batch tried. Whoever stops iterating stops between two batches.
        """
        for name, ids in places.items():
            for batch in _batches(ids):
                with database_errors(self._engine.url), self._engine.begin() as connection:
                    changed = self._desks[name].change(connection, action, batch)
                after_batch(len(batch))
                yield changed

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with database_errors(self._engine.url), self._engine.connect() as connection:
            yield connection


@contextmanager
def open_desks(url: URL, *, schema: str | None) -> Iterator[Desks]:
    """The desks of the schema at a URL. Raises SchemaMissing, DatabaseUnavailable or ConfigurationError."""
    engine = open_engine(url)
    background = background_engine(engine)
    try:
        yield Desks(background, schema=schema)
    finally:
        background.dispose()
        engine.dispose()


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), BATCH_ROWS):
        yield ids[start : start + BATCH_ROWS]
