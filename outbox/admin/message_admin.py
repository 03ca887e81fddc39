"""Operators' access to messages: list, show, retry, park, discard. Commands and consoles call SchemaAdmin.

MessageAdmin has the statements on one message table; it opens and commits nothing. SchemaAdmin has all message tables
of a schema, selects rows and changes them in batches, in short transactions of its own. Times and ages are in the
units of the tables: `_us` microseconds, `_ms` milliseconds, since the Unix epoch by the database's clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    and_,
    case,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.engine import URL, Dialect

from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.database_identity import refuse_stranger
from outbox.store.databases.database_port import Write
from outbox.store.databases.supported import database_of
from outbox.store.message_table import MessageStore
from outbox.store.schema import (
    PARKED_BY_HAND,
    RowKind,
    RowState,
    message_table,
    message_table_names,
    outbox_tables,
    plain_message_table_name,
)
from outbox.store.table_placement import table_namespace, tables_missing
from outbox_core.common.errors import UsageError
from outbox_core.messages.ids import new_token

DISCARDED: Final = "discarded"
"""What the archive says of a message that an operator discarded, whether or not somebody had tried to send it."""
_DUE: Final = re.compile(r"-?[0-9]{1,18}")


class AdminAction(StrEnum):
    """A change to rows."""

    RETRY = "retry"
    PARK = "park"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSelection:
    """Conditions that select rows; None matches any."""

    state: RowState | None = None
    topic: str | None = None
    key: str | None = None
    older_than_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentMessage:
    """A row of a message table, without what its producer wrote into it."""

    id: str
    kind: RowKind
    topic: str
    key: str | None
    state: RowState
    attempts: int
    created_at_us: int
    deliver_at_ms: int | None
    last_error: str | None
    due_at_us: int
    due_in_us: int
    """Until it is due, by the database's clock when it was read; negative since then."""
    in_hand: bool
    """Whether somebody is sending it: the lease on it has not ended."""
    table: str

    def place(self) -> tuple[RowState, int, str]:
        """Returns its place in a list: by state, the longest due first."""
        return self.state, self.due_at_us, self.id

    @property
    def cursor(self) -> str:
        """Returns what a list that goes on behind this message begins with."""
        return f"{self.state}:{self.due_at_us}:{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageContent:
    """What a producer wrote into a row: `headers` as JSON, and the beginning of a body of `body_bytes` bytes."""

    headers: str | None
    body: bytes
    body_bytes: int
    body_sha256: str
    order_key: str | None
    order_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePage:
    """A page of a list, and the cursor of the next one; None: there is none."""

    messages: tuple[UnsentMessage, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedMessage:
    """A row of the archive: a message that left its table, when, and with which result of the broker's.

    An outcome of WITHDRAWN says that its producer canceled it, and no broker was given it; DISCARDED that an operator
    discarded it.
    """

    id: str
    kind: RowKind
    topic: str
    message_key: str | None
    body_sha256: str
    deliver_at_ms: int | None
    created_at_us: int
    attempts: int
    sent_at_us: int
    outcome: str


class MessageAdmin:
    """The operators' statements. They skip rows whose lease has not ended: the lease's owner settles those."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None, table: str | None = None) -> None:
        """`dialect`: of an engine that has connected. `table`: one of the namespace's message tables; by default the
        one that is not split.
        """
        namespace = table_namespace(dialect, schema)
        self.table: str = table or plain_message_table_name(namespace)
        self._message = message_table(namespace.schema, self.table)
        self._store = MessageStore(dialect=dialect, schema=schema, table=self.table)
        self._dialect = dialect
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()
        nobodys = self._message.c.token.is_(None) | (self._message.c.due_at_us <= self._now_us)
        self._free = (self._message.c.state == RowState.PENDING) & nobodys
        self._parked = self._message.c.state.in_([RowState.PARKED, RowState.HELD])

    # -- reading -----------------------------------------------------------------------------------------------------

    def rows(
        self, connection: Connection, selection: MessageSelection, *, limit: int, after: str | None = None
    ) -> list[UnsentMessage]:
        """Returns rows by state, the longest due first; `after`: those behind a cursor. Raises UsageError for none."""
        message = self._message
        statement = (
            select(*self._plain_columns())
            .where(*self._conditions(selection), *self._behind(after))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        return [self._unsent(row) for row in connection.execute(statement).mappings()]

    def show(
        self, connection: Connection, message_id: str, *, body_bytes_max: int
    ) -> tuple[UnsentMessage, MessageContent] | None:
        """Returns a complete row, with at most `body_bytes_max` of its body; None if it is not in this table."""
        message = self._message
        statement = select(
            *self._plain_columns(),
            message.c.headers,
            message.c.body_sha256,
            message.c.order_key,
            message.c.order_seq,
            func.length(message.c.body).label("body_bytes"),
            func.substr(message.c.body, 1, body_bytes_max).label(message.c.body.name),
        ).where(message.c.id == message_id)
        row = connection.execute(statement).mappings().one_or_none()
        if row is None:
            return None
        content = MessageContent(
            headers=row["headers"], body=bytes(row["body"] or b""), body_bytes=row["body_bytes"],
            body_sha256=row["body_sha256"],
            order_key=row["order_key"], order_seq=row["order_seq"],
        )  # fmt: skip
        return self._unsent(row), content

    def ids(self, connection: Connection, selection: MessageSelection, *, action: AdminAction, limit: int) -> list[str]:
        """Returns ids of the selected rows to which the action can be applied now, the longest due first."""
        message = self._message
        statement = (
            select(message.c.id)
            .where(*self._conditions(selection), self._allowed(action))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        return list(connection.scalars(statement))

    def among(self, connection: Connection, ids: Sequence[str], *, action: AdminAction | None = None) -> list[str]:
        """Returns the ids that are rows of this table; with an action, of rows to which it can be applied now."""
        message = self._message
        allowed = () if action is None else (self._allowed(action),)
        return list(connection.scalars(select(message.c.id).where(message.c.id.in_(sorted(ids)), *allowed)))

    # -- changing ----------------------------------------------------------------------------------------------------

    def change(self, connection: Connection, action: AdminAction, ids: Sequence[str]) -> int:
        """Apply an action to rows by id; returns how many rows were changed."""
        match action:
            case AdminAction.RETRY:
                return self.retry(connection, ids)
            case AdminAction.PARK:
                return self.park(connection, ids)
            case AdminAction.DISCARD:
                return self.discard(connection, ids)
            case _:
                assert_never(action)

    def retry(self, connection: Connection, ids: Sequence[str]) -> int:
        """Make rows due now, also parked ones; returns how many."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._allowed(AdminAction.RETRY))
            .values(state=RowState.PENDING, token=null(), due_at_us=self._now_us)
        )
        return self._write(connection, statement)

    def park(self, connection: Connection, ids: Sequence[str]) -> int:
        """Park pending rows; returns how many. A row's error is kept: it says why it was not sent, and that a broker
        may have the message all the same.
        """
        message = self._message
        error = message.c.last_error
        kept = case(
            (error.is_(None), literal(PARKED_BY_HAND)),
            (error.startswith(PARKED_BY_HAND), error),
            else_=literal(f"{PARKED_BY_HAND}, before: ") + error,
        )
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._allowed(AdminAction.PARK))
            .values(state=RowState.PARKED, token=null(), last_error=kept)
        )
        return self._write(connection, statement)

    def discard(self, connection: Connection, ids: Sequence[str]) -> int:
        """Move parked rows to the archive, as DISCARDED; returns how many. Rows that may still be sent stay.

        Without the archive's row the reconciliation would call a discarded message lost. Younger messages of an ordered
        key need not wait for it any more.
        """
        message, token = self._message, new_token()
        has_id = message.c.id.in_(sorted(ids))
        # A token first, as for a broker's acceptance: the archive's row is copied without a lock, and a retry or
        # another discard between the copy and the removal would leave a row of a message that is sent, or two rows.
        claimed = self._write(
            connection, update(message).where(has_id, self._allowed(AdminAction.DISCARD)).values(token=token)
        )
        if not claimed:
            return 0
        numbers = select(message.c.id, message.c.order_key, message.c.order_seq).where(
            has_id, message.c.token == token, message.c.order_key.is_not(None)
        )
        ordered = {row.id: (row.order_key, row.order_seq) for row in connection.execute(numbers)}
        self._store.archive(connection, ids, token=token, outcome=DISCARDED)
        return self._store.remove(connection, ids, token=token, numbers=ordered)

    def _write(self, connection: Connection, statement: Write) -> int:
        return connection.execute(self._database.by_primary_key(statement, self._dialect)).rowcount

    def _allowed(self, action: AdminAction) -> ColumnElement[bool]:
        match action:
            case AdminAction.RETRY:
                return self._free | self._parked
            case AdminAction.PARK:
                return self._free
            case AdminAction.DISCARD:
                return self._parked
            case _:
                assert_never(action)

    def _conditions(self, selection: MessageSelection) -> list[ColumnElement[bool]]:
        message = self._message
        # Without a selected state both are named, so that the index on state and due time also gives the order.
        conditions: list[ColumnElement[bool]] = [
            message.c.state.in_([selection.state] if selection.state else list(RowState)),
        ]
        if selection.topic is not None:
            conditions.append(message.c.topic == selection.topic)
        if selection.key is not None:
            conditions.append(message.c.message_key == selection.key)
        if selection.older_than_us is not None:
            conditions.append(message.c.created_at_us <= self._now_us - selection.older_than_us)
        return conditions

    def _behind(self, cursor: str | None) -> list[ColumnElement[bool]]:
        """Conditions of the rows that come after a cursor in the list's order."""
        if cursor is None:
            return []
        state, due, message_id = _parsed(cursor)
        columns = self._message.c
        later_due = or_(columns.due_at_us > due, and_(columns.due_at_us == due, columns.id > message_id))
        following = [other for other in RowState if other > state]
        # The states are named, so that the scan of the index begins at the cursor's.
        return [
            columns.state.in_([state, *following]),
            or_(columns.state.in_(following), and_(columns.state == state, later_due)),
        ]

    def _unsent(self, row: RowMapping) -> UnsentMessage:
        return UnsentMessage(
            id=row["id"], kind=RowKind(row["kind"]), topic=row["topic"], key=row["key"], state=RowState(row["state"]),
            attempts=row["attempts"], created_at_us=row["created_at_us"], deliver_at_ms=row["deliver_at_ms"],
            last_error=row["last_error"], due_at_us=row["due_at_us"], due_in_us=row["due_in_us"],
            in_hand=bool(row["in_hand"]),
            table=self.table,
        )  # fmt: skip

    def _plain_columns(self) -> list[ColumnElement[Any]]:
        message = self._message
        in_hand = (message.c.state == RowState.PENDING) & message.c.token.is_not(None)
        return [
            message.c.id, message.c.kind, message.c.topic, message.c.message_key.label("key"), message.c.state,
            message.c.attempts, message.c.created_at_us, message.c.deliver_at_ms, message.c.last_error,
            message.c.due_at_us, (message.c.due_at_us - self._now_us).label("due_in_us"),
            (in_hand & (message.c.due_at_us > self._now_us)).label("in_hand"),
        ]  # fmt: skip


def _parsed(cursor: str) -> tuple[RowState, int, str]:
    state, _, rest = cursor.partition(":")
    due, colon, message_id = rest.partition(":")
    # Beyond 18 digits the databases' integers end.
    if state not in set(RowState) or not (colon and message_id) or not _DUE.fullmatch(due):
        raise UsageError(f"{cursor!r} is no cursor of a list: name the one that the page before ended with")
    return RowState(state), int(due), message_id


# -- all message tables of a schema ------------------------------------------------------------------------------------

PAGE_MAX: Final = 10_000
BATCH_ROWS: Final = 200
"""Rows changed in one transaction: few, so that senders do not wait long for their locks."""


class SchemaAdmin:
    """The message tables of one schema."""

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        """`engine` comes from outbox.store.database.background_engine. Raises SchemaMissing if there is no table,
        and ConfigurationError if the schema is another service's.
        """
        self._engine = engine
        with self._reading() as connection:
            self._namespace = table_namespace(engine.dialect, schema)
            names = message_table_names(connection, self._namespace)
            if not names:
                raise tables_missing(connection, schema)
            refuse_stranger(connection, engine.dialect, schema)
        self._admins = {name: MessageAdmin(dialect=engine.dialect, schema=schema, table=name) for name in names}

    def page(self, selection: MessageSelection, *, limit: int, after: str | None = None) -> MessagePage:
        """Returns a page of unsent messages of all tables, by state, the longest due first.

        `limit`: its messages, 1 to PAGE_MAX; `after`: the cursor that the page before ended with. Raises UsageError for
        others.
        """
        if not 1 <= limit <= PAGE_MAX:
            raise UsageError(f"a page has 1 to {PAGE_MAX:,} messages, not {limit:,}")
        messages: list[UnsentMessage] = []
        with self._reading() as connection:
            for admin in self._admins.values():
                messages += admin.rows(connection, selection, limit=limit + 1, after=after)
        messages.sort(key=UnsentMessage.place)
        shown = tuple(messages[:limit])
        return MessagePage(messages=shown, next_cursor=shown[-1].cursor if len(messages) > limit else None)

    def show(self, message_id: str, *, body_bytes_max: int) -> tuple[UnsentMessage, MessageContent] | None:
        """Returns the complete row of a message; None if no table has it."""
        with self._reading() as connection:
            for admin in self._admins.values():
                found = admin.show(connection, message_id, body_bytes_max=body_bytes_max)
                if found is not None:
                    return found
        return None

    def archived(self, message_id: str) -> list[ArchivedMessage]:
        """Returns the archive's rows of a message, the oldest first: several if a repair wrote it again."""
        archive = outbox_tables(self._namespace).archive
        statement = select(archive).where(archive.c.id == message_id).order_by(archive.c.sent_at_us).limit(PAGE_MAX)
        with self._reading() as connection:
            return [
                ArchivedMessage(**{**row, "kind": RowKind(row["kind"])})
                for row in connection.execute(statement).mappings()
            ]

    def find(self, selection: MessageSelection, *, action: AdminAction, rows_max: int) -> dict[str, list[str]]:
        """Returns, by table, ids of at most `rows_max` selected rows to which the action can be applied."""
        ids_by_table: dict[str, list[str]] = {}
        rows_left = rows_max
        with self._reading() as connection:
            for name, admin in self._admins.items():
                if rows_left <= 0:
                    break
                ids_by_table[name] = admin.ids(connection, selection, action=action, limit=rows_left)
                rows_left -= len(ids_by_table[name])
        return ids_by_table

    def locate(self, ids: Sequence[str]) -> dict[str, list[str]]:
        """Returns these ids by table; unknown ones are left out."""
        ids_by_table: dict[str, list[str]] = {}
        ids_left = set(ids)
        with self._reading() as connection:
            for name, admin in self._admins.items():
                if not ids_left:
                    break
                for batch in _batches(sorted(ids_left)):
                    ids_by_table.setdefault(name, []).extend(admin.among(connection, batch))
                ids_left -= set(ids_by_table[name])
        return ids_by_table

    def count_allowed(self, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]]) -> int:
        """Returns to how many of these rows, by table, the action can be applied now."""
        with self._reading() as connection:
            return sum(
                len(self._admins[name].among(connection, batch, action=action))
                for name, ids in ids_by_table.items()
                for batch in _batches(ids)
            )

    def change(
        self, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]], *, after_batch: Callable[[int], None]
    ) -> Iterator[int]:
        """Apply the action by primary key, in a short transaction for each batch; yields how many rows each changed.

        `after_batch` is called with the number of rows of each batch. An iteration can be stopped between two batches.
        """
        for name, ids in ids_by_table.items():
            for batch in _batches(ids):
                with database_errors(self._engine.url), self._engine.begin() as connection:
                    changed = self._admins[name].change(connection, action, batch)
                after_batch(len(batch))
                yield changed

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with database_errors(self._engine.url), self._engine.connect() as connection:
            yield connection


@contextmanager
def open_schema_admin(url: URL, *, schema: str | None) -> Iterator[SchemaAdmin]:
    """Yields access to the schema at a URL. Raises SchemaMissing, DatabaseUnavailable or ConfigurationError."""
    engine = open_engine(url)
    background = background_engine(engine)
    try:
        yield SchemaAdmin(background, schema=schema)
    finally:
        background.dispose()
        engine.dispose()


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), BATCH_ROWS):
        yield ids[start : start + BATCH_ROWS]
