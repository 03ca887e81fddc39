"""Consistent records of many messages in all four books: business, outbox, broker, inbox; and ways to falsify them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert

from messaging import journal
from outbox.database import open_engine
from outbox.schema import outbox_tables
from spark_reconcile.config import BrokerSource, DatabaseSource, Grace, InboxSource, Output, Rule, Settings

NOW_MS = 1_800_000_000_000
START_MS = NOW_MS - 3_600_000
TOPIC = "payment.completed"
LEDGER, MAIL = "ledger", "mail"  # the group with an inbox, and the one without

_business = MetaData()
PAYMENT = Table(
    "payment",
    _business,
    Column("order_id", Integer),
    Column("status", String(8)),
    Column("paid_at_us", BigInteger),
)


@dataclass
class Story:
    """What the books say of one order. Falsified by changing fields; all of them consistent by default."""

    number: int
    at_ms: int
    id: str = ""
    paid: bool = True
    outbox: str | None = None  # "pending" or "parked"
    archived: bool = True
    outcome: str = "stored"
    stored: int = 1
    body: bytes = b"{}"
    stored_body: bytes | None = None
    deliver_at_ms: int | None = None
    canceled: bool = False
    delivered_ms: dict[str, list[int]] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    handled: bool = True

    @property
    def key(self) -> str:
        return str(self.number)


def settled(number: int) -> Story:
    """An order whose message went the whole way."""
    at_ms = START_MS + number * 1_000
    delivered = {LEDGER: [at_ms + 20], MAIL: [at_ms + 30]}
    return Story(number, at_ms, id=f"m-{number:06}", delivered_ms=delivered, acked={LEDGER, MAIL})


def write(stories: list[Story], *, folder: Path, url: str, schema: str | None) -> Settings:
    """Write the books, and return the settings that reconcile them."""
    _write_tables(stories, url=url, schema=schema)
    _write_logs(stories, folder / "broker")
    return Settings(
        database=DatabaseSource(url=url, schema=schema),
        broker=BrokerSource(data=str(folder / "broker")),
        rules=[
            Rule(
                name="paid is announced",
                table="payment",
                where={"status": "PAID"},
                key_column="order_id",
                time_column="paid_at_us",
                topic=TOPIC,
            )
        ],
        inboxes=[InboxSource(group=LEDGER)],
        grace=Grace(seconds=60, late_after_seconds=60),
        output=Output(folder=str(folder / "results")),
        now_ms=NOW_MS,
    )


def _write_tables(stories: list[Story], *, url: str, schema: str | None) -> None:
    engine = open_engine(url)
    tables = outbox_tables(schema)
    if schema:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE IF NOT EXISTS {schema}")
    tables.metadata.create_all(engine)
    _business.create_all(engine)
    paid = [{"order_id": one.number, "status": "PAID", "paid_at_us": one.at_ms * 1000} for one in stories if one.paid]
    waiting = [{**_sent(one), "state": one.outbox, "due_at_us": 0, "body": one.body} for one in stories if one.outbox]
    archived = [
        {**_sent(one), "sent_at_us": (one.at_ms + 5) * 1000, "outcome": one.outcome} for one in stories if one.archived
    ]
    handled = [
        {
            "consumer_group": LEDGER,
            "message_id": one.id,
            "topic": TOPIC,
            "handled_at_us": (one.delivered_ms[LEDGER][0] + 2) * 1000,
        }
        for one in stories
        if one.handled and one.delivered_ms.get(LEDGER)
    ]
    with engine.begin() as connection:
        books = ((PAYMENT, paid), (tables.message, waiting), (tables.archive, archived), (tables.inbox, handled))
        for table, rows in books:
            if rows:
                connection.execute(insert(table), rows)
    engine.dispose()


def _sent(one: Story) -> dict[str, Any]:
    return {
        "id": one.id,
        "kind": "publish",
        "topic": TOPIC,
        "message_key": one.key,
        "body_sha256": hashlib.sha256(one.body).hexdigest(),
        "deliver_at_ms": one.deliver_at_ms,
        "created_at_us": one.at_ms * 1000,
        "attempts": 1,
    }


def _write_logs(stories: list[Story], folder: Path) -> None:
    declared = [
        journal.Declared(topic=TOPIC, group=group, at_ms=START_MS, position=0, settings={}) for group in (LEDGER, MAIL)
    ]
    messages = [_message(one, copy) for one in stories for copy in range(one.stored)]
    actions = [*declared, *(action for one in stories for action in _actions(one))]
    write_segment(folder / "messages", journal.SegmentKind.MESSAGES, messages)
    write_segment(folder / "actions", journal.SegmentKind.ACTIONS, actions)


def _message(one: Story, copy: int) -> journal.MessageRecord:
    return journal.MessageRecord(
        sequence=one.number * 2 + copy, id=one.id, topic=TOPIC, key=one.key, headers={},
        body=one.body if one.stored_body is None else one.stored_body, created_at_ms=one.at_ms,
        stored_at_ms=one.at_ms + 4, deliver_at_ms=one.deliver_at_ms,
    )  # fmt: skip


def _actions(one: Story) -> list[journal.Action]:
    found: list[journal.Action] = []
    if one.canceled:
        found.append(journal.Canceled(at_ms=one.at_ms + 10, ids=[one.id]))
    for group, times in one.delivered_ms.items():
        for attempt, at_ms in enumerate(times, start=1):
            entry = (one.number * 2, one.id, attempt, attempt)
            found.append(
                journal.Delivered(topic=TOPIC, group=group, at_ms=at_ms, visible_at_ms=at_ms + 30_000, entries=[entry])
            )
    for group in sorted(one.acked):
        at_ms = max(one.delivered_ms[group]) + 5
        found.append(journal.Acked(topic=TOPIC, group=group, at_ms=at_ms, entries=[(one.number * 2, one.id)]))
    for group in sorted(one.dead):
        entry = (one.number * 2, one.id, 4)
        found.append(journal.Died(topic=TOPIC, group=group, at_ms=one.at_ms + 90, entries=[entry], reason="refused"))
    return found


def write_segment(folder: Path, kind: journal.SegmentKind, records: list[Any]) -> Path:
    """One segment of these records, as the broker writes it."""
    folder.mkdir(parents=True)
    header = journal.SegmentHeader(kind=kind, first_offset=0, created_at_ms=START_MS)
    path = journal.segment_path(folder, 0)
    path.write_bytes(header.encode() + b"".join(journal.frame(journal.encode_record(one)) for one in records))
    return path
