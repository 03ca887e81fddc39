"""Generates the same bookings as a user's sources: a database, a broker's folder, archive files, a settings file.

    python -m benchmarks.reconcile.sources --messages 1000000 --folder data
    python -m benchmarks.reconcile.contest whole --folder data
    python -m benchmarks.reconcile.contest hourly --folder data

Business rows, the outbox and the inboxes stand in SQLite, the archive in Parquet, the broker's logs in segments as it
writes them. Every message goes to its topic's groups. Every kind of fault is planted in turn; `planted.json` says which
verdict must come of which id or key.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import duckdb
from sqlalchemy import create_engine

from benchmarks.reconcile.delivery_faults import DELIVERY_KINDS, group_actions
from benchmarks.reconcile.faults import KINDS, MORE_KINDS
from benchmarks.reconcile.planting import COVERED, GROUPS, STORED_AFTER_MS, TICKETS, Message, Planted, record
from benchmarks.reconcile.records import (
    ARCHIVE,
    MESSAGES_A_FAULT,
    START_MS,
    arguments,
    as_planted,
    plant,
    write_by_hour,
)
from outbox.store.schema import outbox_tables
from outbox_core.common.table_namespace import SQLITE_NAMESPACE
from outbox_core.journal import journal
from outbox_core.journal.block import (
    Framed,
    SegmentHead,
    SegmentKind,
    block,
    framed_changes,
)
from tests.spark_reconcile.message_log import LoggedMessage, framed_messages

ALL_KINDS: Final = (*KINDS, *MORE_KINDS, *DELIVERY_KINDS)
SEGMENT_BYTES: Final = 32 * 1024 * 1024
MESSAGES_A_BLOCK: Final = 50
HANDED_AT_ONCE: Final = 50
ROWS_AT_ONCE: Final = 10_000
_TRIP: Final = """
    create table trip (id integer primary key, topic text not null, booking text, at_ms bigint not null,
        remind_at_ms bigint);
    create index ix_trip_at on trip (at_ms); create index ix_trip_booking on trip (booking);
"""
_SETTINGS: Final = """[database]
url = "sqlite:///{folder}/shop.db"
complete_since = {since}
[archive]
parquet = ["archive"]
[broker]
data = "broker"
[[inboxes]]
group = "{group}"
complete_since = {since}
[[inboxes]]
group = "{group}"
url = "sqlite:///{folder}/desk.db"
complete_since = {since}
[grace]
late_after_seconds = 120
confirm_after_seconds = 0
"""
_RULE: Final = """[[rules]]
name = "{topic}"
table = "trip"
where = {{ topic = "{topic}" }}
key_column = "booking"
time_column = "at_ms"
time_unit = "ms"
deliver_at_column = "remind_at_ms"
topic = "{topic}"
"""


def write_sources(folder: Path, *, messages: int, faults: int, segment_bytes: int = SEGMENT_BYTES) -> dict[str, Any]:
    """Write everything and what was planted; returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as duck:
        planted = plant(duck, folder, ALL_KINDS, messages=messages, faults=faults)
        write_by_hour(duck, ARCHIVE, folder / "archive")
        write_desk(folder / "desk.db", planted)
        with closing(open_shop(folder / "shop.db")) as shop:
            insert_planted(shop, planted)
            broker = _Broker(folder / "broker", shop, segment_bytes=segment_bytes)
            broker.write_planted(planted)
            for rows in _bulk(duck):
                _business(shop, rows)
                broker.write(rows)
            broker.close()
            shop.commit()
    told = as_planted(planted, messages=messages)
    (folder / "planted.json").write_text(json.dumps(told))
    write_settings(folder)
    return told


def write_settings(folder: Path) -> None:
    """The settings file, `reconcile.toml`, that reconciles the sources in a folder."""
    since = "2026-10-01T00:00:00Z"
    rules = "".join(_RULE.format(topic=topic) for topic in COVERED)
    (folder / "reconcile.toml").write_text(
        _SETTINGS.format(folder=folder.resolve(), since=since, group=TICKETS) + rules
    )


class _Broker:
    """The broker's two logs, and the inbox of the group that has one: each message is taken by every group at once."""

    def __init__(self, folder: Path, shop: sqlite3.Connection, *, segment_bytes: int) -> None:
        self._messages = LogWriter(folder, SegmentKind.MESSAGES, segment_bytes)
        self._actions = LogWriter(folder, SegmentKind.ACTIONS, segment_bytes)
        self._shop = shop
        self._last_ms = 0
        self._places: dict[str, int] = {}
        self._taken: dict[str, list[tuple[int, str]]] = {}

    def write_planted(self, planted: Planted) -> None:
        """What was planted stands at the beginning of its topics."""
        self._places = dict(planted.places)
        for one in planted.stored:
            self._messages.add(one)
        for action in [*group_actions(START_MS), *sorted(planted.actions, key=lambda one: one.at_ms)]:
            self._actions.add(action)

    def write(self, messages: Iterable[Message]) -> None:
        """Messages for which all is well."""
        for one in messages:
            place = self._places[one.topic] = self._places.get(one.topic, -1) + 1
            self._last_ms = stored_ms = one.created_ms + STORED_AFTER_MS
            self._messages.add(record(one, place, stored_ms=stored_ms))
            taken = self._taken.setdefault(one.topic, [])
            taken.append((place, one.id))
            if len(taken) == HANDED_AT_ONCE:
                self._take(one.topic, stored_ms)

    def close(self) -> None:
        """What is left is taken, too."""
        for topic in list(self._taken):
            self._take(topic, self._last_ms)
        self._messages.close()
        self._actions.close()

    def _take(self, topic: str, stored_ms: int) -> None:
        taken = self._taken.pop(topic)
        first, count = taken[0][0], len(taken)
        for group in GROUPS[topic]:
            runs = [journal.HandedRun(first, count, 1, 1)]
            at_ms = stored_ms + 8
            self._actions.add(
                journal.Handed(topic=topic, group=group, at_ms=at_ms, visible_at_ms=at_ms + 30_000, runs=runs)
            )
            self._actions.add(journal.Settled(topic=topic, group=group, at_ms=at_ms + 20, runs=[(first, count)]))
        _handled(self._shop, ((id_, topic, stored_ms + 13) for _, id_ in taken))


class LogWriter:
    """A log of segments in a broker's folder: each action in a block of its own, messages of one time together."""

    def __init__(self, folder: Path, kind: SegmentKind, segment_bytes: int) -> None:
        self._name, self._kind, self._segment_bytes = kind.name.lower(), kind, segment_bytes
        self._folder = folder / self._name
        self._folder.mkdir(parents=True)
        self._offset, self._parts, self._bytes = 0, list[bytes](), 0
        self._segments, self._frames_before, self._begun_ms = 0, 0, START_MS
        self._together: list[LoggedMessage] = []

    def add(self, one: Any) -> None:
        """Append a record."""
        if isinstance(one, LoggedMessage):
            if self._together and self._together[0].stored_at_ms != one.stored_at_ms:
                self._append_messages()
            self._together.append(one)
            if len(self._together) == MESSAGES_A_BLOCK:
                self._append_messages()
        else:
            frames, copies = framed_changes([journal.encode_record(one)])
            frames.extend(copies)
            self._append(frames, at_ms=one.at_ms)

    def close(self) -> None:
        """Write what is left."""
        self._append_messages()
        if self._parts or not self._segments:
            self._write()

    def _append_messages(self) -> None:
        if not self._together:
            return
        self._append(framed_messages(self._together), at_ms=self._together[0].stored_at_ms)
        self._together = []

    def _append(self, frames: Framed, *, at_ms: int) -> None:
        if self._segments and not self._parts:
            self._begun_ms = at_ms  # as the broker has it: what is older is looked for in earlier segments alone
        data = block(
            frames, offset=self._offset + self._bytes, durable=0, at_ms=at_ms, frames_before=self._frames_before
        )  # fmt: skip
        self._frames_before = len(frames)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes >= self._segment_bytes:
            self._write()

    def _write(self) -> None:
        """Write the segment, and begin another."""
        self._segments += 1
        head = SegmentHead(kind=self._kind, epoch=1, first=self._offset, created_at_ms=self._begun_ms)
        path = self._folder / f"{self._name}-{self._segments:012d}.segment"
        path.write_bytes(head.encode() + b"".join(self._parts))
        self._offset, self._parts, self._bytes = self._offset + self._bytes, [], 0
        self._frames_before = 0


def _bulk(duck: duckdb.DuckDBPyConnection) -> Iterator[list[Message]]:
    found = duck.execute("select id, topic, key, created_ms, body from message where not flawed order by i")
    while rows := found.fetchmany(ROWS_AT_ONCE):
        yield [Message(*row) for row in rows]


def open_shop(path: Path) -> sqlite3.Connection:
    """A new SQLite database with the outbox's tables and the business's."""
    engine = create_engine(f"sqlite:///{path}")
    outbox_tables(SQLITE_NAMESPACE).metadata.create_all(engine)
    engine.dispose()
    shop = sqlite3.connect(path)
    shop.execute("pragma synchronous = off")
    shop.executescript(_TRIP)
    return shop


def insert_planted(shop: sqlite3.Connection, planted: Planted) -> None:
    """Business rows, rows of the outbox and of the inbox."""
    _business(shop, planted.business)
    shop.executemany(
        "insert into outbox_message (id, kind, state, due_at_us, attempts, topic, message_key, body, body_sha256, "
        "deliver_at_ms, created_at_us) values (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?)",
        [
            (one.id, one.kind, state, one.created_ms * 1000, one.topic, one.key, one.body.encode(), one.sha256,
             one.due_ms, one.created_ms * 1000)
            for one, state in planted.outbox
        ],
    )  # fmt: skip
    _handled(shop, planted.inbox)


def write_desk(path: Path, planted: Planted) -> None:
    """A second database in which the same group notes what it has handled."""
    with closing(open_shop(path)) as desk:
        _handled(desk, planted.second_inbox)
        desk.commit()


def _business(shop: sqlite3.Connection, rows: Iterable[Message]) -> None:
    shop.executemany(
        "insert into trip (topic, booking, at_ms, remind_at_ms) values (?, ?, ?, ?)",
        [(one.topic, one.key, one.created_ms, one.due_ms) for one in rows],
    )


def _handled(shop: sqlite3.Connection, rows: Iterable[tuple[str, str, int]]) -> None:
    shop.executemany(
        "insert into outbox_inbox (consumer_group, message_id, topic, handled_at_us) values (?, ?, ?, ?)",
        [(TICKETS, id_, topic, at_ms * 1000) for id_, topic, at_ms in rows],
    )


def main() -> None:
    chosen = arguments(__doc__)
    faults = chosen.faults or max(2 * len(ALL_KINDS), chosen.messages // MESSAGES_A_FAULT)
    planted = write_sources(chosen.folder, messages=chosen.messages, faults=faults)
    print(json.dumps({"messages": chosen.messages, "faults": faults, "kinds": len(planted["kinds"])}))


if __name__ == "__main__":
    main()
