"""A made-up business whose records are known to the last row: built in memory, then written as tables and logs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, create_engine, insert, text
from sqlalchemy.schema import CreateSchema

from outbox.store.row import CANCEL_TOPIC
from outbox.store.schema import outbox_tables
from outbox_core.journal import journal
from outbox_core.journal.block import FrameKind
from outbox_core.journal.dead_letter_records import Edited
from outbox_core.messages.message import EDITED_HEADER
from spark_reconcile import BusinessRule, Condition, Grace, InboxSource, Settings
from spark_reconcile.sources.broker_logs import survey
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import append_actions, write_actions
from tests.spark_reconcile.message_log import LoggedMessage, append_messages, write_messages

NOW_MS = 1_800_001_800_000
"""Half past an hour: what is an hour old lies in an hour that is over."""
SECOND_MS = 1_000
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
PAID, REMINDER = "order.paid", "trip.reminder"
TICKETS, MAIL = "tickets", "mail"
SETTINGS = """
[database]
url = "{url}"
[broker]
data = "broker"
[grace]
late_after_seconds = 120
confirm_after_seconds = 0
[[rules]]
name = "paid orders are announced"
table = "orders"
where = {{ status = "PAID" }}
key_column = "id"
time_column = "paid_at_us"
topic = "order.paid"
[[rules]]
name = "travellers are reminded"
table = "orders"
where = {{ status = "BOOKED" }}
key_column = "id"
time_column = "paid_at_us"
topic = "trip.reminder"
deliver_at_column = "remind_at_us"
[[inboxes]]
group = "tickets"
"""
"""A settings file for the world's tables, but for the database's URL."""
GRACE = Grace(seconds=60, late_after_seconds=120, clock_skew_seconds=1, confirm_after_seconds=0)

_metadata = MetaData()
ORDERS = Table(
    "orders",
    _metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("status", String(16), nullable=False),
    Column("paid_at_us", BigInteger, nullable=True),
    Column("remind_at_us", BigInteger, nullable=True),
)


@dataclass(slots=True)
class World:
    """Rows of every source. `plant` methods are in faults; here are rows, and messages for which all is well."""

    orders: list[dict[str, Any]] = field(default_factory=list)
    outbox: list[dict[str, Any]] = field(default_factory=list)
    archive: list[dict[str, Any]] = field(default_factory=list)
    inbox: list[dict[str, Any]] = field(default_factory=list)
    stored: list[LoggedMessage] = field(default_factory=list)
    actions: list[journal.Action] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    named: set[tuple[str, int, str]] = field(default_factory=set)
    """Of each action on a message: its topic and sequence, and the message that is meant."""
    _scheduled: dict[str, LoggedMessage] = field(default_factory=dict)
    last_order: int = 0

    # -- whole messages ----------------------------------------------------------------------------------------------

    def groups(self) -> None:
        """Declare the groups, before everything else."""
        for topic, group in ((PAID, TICKETS), (PAID, MAIL), (REMINDER, MAIL)):
            self.actions.append(
                journal.Declared(topic=topic, group=group, at_ms=NOW_MS - 24 * HOUR_MS, position=0, settings={})
            )

    def settled(self, *, age_ms: int = HOUR_MS) -> str:
        """An order whose message went all the way."""
        order = self.order(age_ms=age_ms)
        message = self.sent(f"good-{order}", key=str(order), age_ms=age_ms)
        sequence = self.store(message, key=str(order), age_ms=age_ms)
        self.done(message, sequence, TICKETS, age_ms=age_ms)
        self.done(message, sequence, MAIL, age_ms=age_ms)
        return message

    def done(self, message: str, sequence: int, group: str, *, age_ms: int, topic: str = PAID) -> None:
        """Delivered, handled where there is an inbox, acknowledged."""
        self.deliver(message, sequence, group, age_ms=age_ms - 20, topic=topic)
        if group == TICKETS:
            self.handle(message, age_ms=age_ms - 30)
        self.ack(message, sequence, group, age_ms=age_ms - 40, topic=topic)

    # -- rows --------------------------------------------------------------------------------------------------------

    def order(self, *, age_ms: int = HOUR_MS, status: str = "PAID", remind_at_ms: int | None = None) -> int:
        """A business row."""
        self.last_order += 1
        self.orders.append(
            {
                "id": self.last_order,
                "status": status,
                "paid_at_us": (NOW_MS - age_ms) * 1000,
                "remind_at_us": None if remind_at_ms is None else remind_at_ms * 1000,
            }
        )
        return self.last_order

    def unsent(
        self, message: str, *, key: str | None, age_ms: int = HOUR_MS, topic: str = PAID, state: str = "pending"
    ) -> str:
        """A row of the live message table."""
        self.outbox.append(
            {
                "id": message, "kind": "publish", "state": state, "due_at_us": (NOW_MS - age_ms) * 1000, "attempts": 1,
                "topic": topic, "message_key": key, "body": message.encode(), "body_sha256": sha(message),
                "deliver_at_ms": None, "created_at_us": (NOW_MS - age_ms) * 1000,
            }
        )  # fmt: skip
        return message

    def sent(
        self, message: str, *, key: str | None, age_ms: int = HOUR_MS, topic: str = PAID,
        deliver_at_ms: int | None = None, outcome: str = "stored",
    ) -> str:  # fmt: skip
        """A row of the archive."""
        self.archive.append(
            {
                "id": message, "kind": "publish", "topic": topic, "message_key": key, "body_sha256": sha(message),
                "deliver_at_ms": deliver_at_ms, "created_at_us": (NOW_MS - age_ms) * 1000,
                "sent_at_us": (NOW_MS - age_ms + 15) * 1000, "attempts": 1, "outcome": outcome,
            }
        )  # fmt: skip
        return message

    def unsent_cancel(self, name: str, of: str, *, age_ms: int = HOUR_MS, state: str = "pending") -> str:
        """A row of the live message table that asks to cancel a message."""
        self.unsent(name, key=None, age_ms=age_ms, topic=CANCEL_TOPIC, state=state)
        self.outbox[-1].update(kind="cancel", body=of.encode(), body_sha256=sha(of))
        return name

    def sent_cancel(self, name: str, of: str, outcome: str, *, age_ms: int = HOUR_MS) -> str:
        """A row of the archive that asked to cancel a message, with the broker's answer."""
        self.sent(name, key=None, age_ms=age_ms, topic=CANCEL_TOPIC, outcome=outcome)
        self.archive[-1].update(kind="cancel", body_sha256=sha(of))
        return name

    def store(
        self, message: str, *, key: str | None, age_ms: int = HOUR_MS, topic: str = PAID, body: str | None = None,
        deliver_at_ms: int | None = None, scheduled: bool = False,
    ) -> int:  # fmt: skip
        """A record of the message log; returns its sequence, -1 where it is scheduled."""
        record = LoggedMessage(
            sequence=None if scheduled else self.place(topic), id=message, topic=topic, key=key, headers={},
            body=(body or message).encode(), created_at_ms=NOW_MS - age_ms, stored_at_ms=NOW_MS - age_ms + 10,
            deliver_at_ms=deliver_at_ms,
        )  # fmt: skip
        if scheduled:
            self._scheduled[message] = record
            record = replace(record, kind=FrameKind.SCHEDULED)
        self.stored.append(record)
        return -1 if record.sequence is None else record.sequence

    def without_note(self, message: str) -> None:
        """The message was scheduled, and the note of it is not in the log."""
        self.stored[:] = [one for one in self.stored if one.id != message]

    def place(self, topic: str) -> int:
        """The next sequence of a topic."""
        self.sequences[topic] = self.sequences.get(topic, -1) + 1
        return self.sequences[topic]

    def fire(self, message: str, *, age_ms: int, topic: str = REMINDER) -> int:
        """A scheduled message fell due: it is written once more, with its sequence."""
        sequence, record = self.place(topic), self._scheduled[message]
        at_ms = NOW_MS - age_ms
        self.stored.append(replace(record, sequence=sequence, stored_at_ms=at_ms, kind=FrameKind.DISPATCHED))
        self.actions.append(journal.Fired(topic=topic, at_ms=at_ms, entries=[(sequence, message)]))
        return sequence

    def deliver(
        self, message: str, sequence: int, group: str, *, age_ms: int, topic: str = PAID, invisible_ms: int = 30_000,
        number: int = 1,
    ) -> None:  # fmt: skip
        """A hand-out; of what the log has under this sequence, which must be this message."""
        at_ms = NOW_MS - age_ms
        self.named.add((topic, sequence, message))
        self.actions.append(
            journal.Handed(
                topic=topic, group=group, at_ms=at_ms, visible_at_ms=at_ms + invisible_ms,
                runs=[journal.HandedRun(sequence, 1, number, number)],
            )
        )  # fmt: skip

    def ack(self, message: str, sequence: int, group: str, *, age_ms: int, topic: str = PAID) -> None:
        """An acknowledgement; of what the log has under this sequence, which must be this message."""
        self.named.add((topic, sequence, message))
        self.actions.append(journal.Settled(topic=topic, group=group, at_ms=NOW_MS - age_ms, runs=[(sequence, 1)]))

    def edit(self, message: str, sequence: int, group: str, *, age_ms: int, topic: str = PAID) -> str:
        """An operator's edit of a dead letter; returns the id of what it becomes."""
        edited = self.write_edited(message, sequence, age_ms=age_ms, topic=topic)
        entries = [(sequence, 0, 100, edited)]
        self.actions.append(
            Edited(topic=topic, group=group, at_ms=NOW_MS - age_ms, entries=entries, by="ops", why="typo")
        )
        return edited

    def write_edited(self, message: str, sequence: int, *, age_ms: int, topic: str = PAID) -> str:
        """What a dead letter becomes, in the message log; returns its id."""
        edited = f"edit-{message}"
        self.stored.append(
            LoggedMessage(
                sequence=sequence, id=edited, topic=topic, key=None, headers={EDITED_HEADER: message}, body=b"edited",
                created_at_ms=NOW_MS - age_ms, stored_at_ms=NOW_MS - age_ms, kind=FrameKind.ASIDE,
            )
        )  # fmt: skip
        return edited

    def handle(self, message: str, *, age_ms: int, group: str = TICKETS) -> None:
        """A row of the inbox."""
        self.inbox.append(
            {
                "consumer_group": group, "message_id": message, "topic": PAID,
                "handled_at_us": (NOW_MS - age_ms) * 1000,
            }
        )  # fmt: skip

    def shuffle(self, random: Random) -> None:
        """The same rows in another order."""
        for rows in (self.orders, self.outbox, self.archive, self.inbox):
            random.shuffle(rows)

    # -- on disk -----------------------------------------------------------------------------------------------------

    def write(self, database: Database, folder: Path, *, records_a_segment: int = 1000) -> Settings:
        """Write everything; returns the settings that reconcile it."""
        self.write_tables(database)
        write_log(folder / "broker" / "messages", self.stored, records_a_segment)
        self._check_names()
        actions = sorted(self.actions, key=lambda action: action.at_ms)
        write_log(folder / "broker" / "actions", actions, records_a_segment)
        return Settings(
            database_url=database.url,
            schema=database.schema,
            broker_data=folder / "broker",
            output=folder / "out",
            rules=[
                BusinessRule(
                    name="paid orders are announced", table="orders", key_column="id", time_column="paid_at_us",
                    topic=PAID, where=[Condition(column="status", values=("PAID",))],
                ),
                BusinessRule(
                    name="travellers are reminded", table="orders", key_column="id", time_column="paid_at_us",
                    topic=REMINDER, where=[Condition(column="status", values=("BOOKED",))],
                    deliver_at_column="remind_at_us",
                ),
            ],
            inboxes=[InboxSource(group=TICKETS)],
            grace=GRACE,
        )  # fmt: skip

    def _check_names(self) -> None:
        """An action names a message by its sequence alone: a wrong one would be an action on another message."""
        ids = {(one.topic, one.sequence): one.id for one in self.stored if one.kind is not FrameKind.ASIDE}
        fired = [one for one in self.actions if isinstance(one, journal.Fired)]
        ids.update({(one.topic, sequence): id_ for one in fired for sequence, id_ in one.entries})
        for topic, sequence, message in self.named:
            assert ids.get((topic, sequence), never_stored(topic, sequence)) == message

    def write_tables(self, database: Database) -> None:
        """The rows of every table, in place of what is there."""
        engine = create_engine(database.url)
        try:
            with engine.begin() as connection:
                self._write_tables(connection, database)
        finally:
            engine.dispose()

    def _write_tables(self, connection: Connection, database: Database) -> None:
        if database.schema:
            connection.execute(CreateSchema(database.schema, if_not_exists=True))
        tables = outbox_tables(database.namespace)
        _metadata.drop_all(connection)
        _metadata.create_all(connection)
        tables.metadata.create_all(connection)
        written = (
            (ORDERS, self.orders), (tables.message, self.outbox), (tables.archive, self.archive),
            (tables.inbox, self.inbox),
        )  # fmt: skip
        for table, rows in written:
            connection.execute(table.delete())
            if rows:
                connection.execute(insert(table), rows)


def write_log(
    folder: Path, records: Sequence[object], records_a_segment: int, *, first_offset: int = 0
) -> list[Path]:  # fmt: skip
    """A log of segments, as the broker writes it, `messages` or `actions` by the folder's name."""
    write = write_messages if folder.name == "messages" else write_actions
    return write(
        folder, records, records_a_segment, created_at_ms=NOW_MS - 24 * HOUR_MS, first_offset=first_offset,
        first_number=1 if not first_offset else 2,
    )  # fmt: skip


def append(settings: Settings, log: str, records: Sequence[object]) -> None:
    """Records behind what a log of the broker's (`messages`, `actions`) holds already."""
    path = Path(survey(settings.broker_data, log)[-1].path)
    if log == "actions":
        append_actions(path, records)
    else:
        append_messages(path, records)


def archived(settings: Settings, folder: Path, rows: list[dict[str, Any]]) -> Settings:
    """With an archive in files that holds these rows of the archive's table."""
    folder.mkdir()
    types = {"deliver_at_ms": pa.int64(), "message_key": pa.string()}
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "part.parquet")
    return dataclasses.replace(settings, archives=[folder])


def no_wait(_: float) -> None:
    """A pause between both looks in which no time passes, and nothing comes."""


def never_stored(topic: str, sequence: int) -> str:
    """The id by which a verdict names a message that the log does not have."""
    return f"{topic}#{sequence}"


def sha(body: str) -> str:
    """The SHA-256 of a body, as the outbox writes it."""
    return hashlib.sha256(body.encode()).hexdigest()


def outbox_rows(database: Database) -> dict[str, dict[str, Any]]:
    """What stands in the outbox's table, by id."""
    table = f"{database.schema}.message" if database.schema else "outbox_message"
    engine = create_engine(database.url)
    try:
        with engine.connect() as connection:
            rows = connection.execute(text(f"SELECT * FROM {table}")).mappings()
            return {row["id"]: dict(row) for row in rows}
    finally:
        engine.dispose()
