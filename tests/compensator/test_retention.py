"""Retention: old evidence goes, in small batches; young evidence and everything unsent stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, func, insert, select

from compensator.retention.retention import BATCH_ROWS, DAY_US, HEAD_SWEEP_EVERY_MS, Retention, RetentionOptions
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine, open_engine
from outbox.store.databases.supported import database_of
from outbox.store.order_table import OrderStore
from outbox.store.schema import OutboxTables, outbox_tables
from outbox_core import ManualClock
from outbox_core.runtime.retention_hold import RetentionHold
from tests.fixtures.databases import Database


@dataclass
class Evidence:
    """A database with evidence of chosen ages."""

    engine: Engine
    schema: str | None
    tables: OutboxTables
    clock: ManualClock

    def add(self, count: int, *, age_days: float) -> None:
        at = database_of(self.engine.dialect).now_us() - int(age_days * DAY_US)
        names = [f"m{age_days}-{number}" for number in range(count)]
        with self.engine.begin() as connection:
            for name in names:
                sent = {"kind": "publish", "topic": "t", "body_sha256": "0", "attempts": 1, "outcome": "stored"}
                connection.execute(insert(self.tables.archive).values(id=name, sent_at_us=at, created_at_us=at, **sent))
                handled = {"consumer_group": f"g{len(name) % 2}", "topic": "t"}
                connection.execute(insert(self.tables.inbox).values(message_id=name, handled_at_us=at, **handled))

    def add_heads(self, count: int, *, age_days: float) -> None:
        seq = database_of(self.engine.dialect).now_us() - int(age_days * DAY_US)
        with self.engine.begin() as connection:
            for number in range(count):
                key = f"{age_days:010.3f}-{number}"
                connection.execute(insert(self.tables.order_head).values(order_key=key, seq=seq))

    def heads(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(self.tables.order_head)) or 0

    def counts(self) -> tuple[int, int]:
        with self.engine.connect() as connection:
            tables = (self.tables.archive, self.tables.inbox)
            archived, handled = (connection.scalar(select(func.count()).select_from(table)) for table in tables)
        return archived or 0, handled or 0

    def retention(self, **options: Any) -> Retention:
        dialect = self.engine.dialect
        return Retention(
            engine=self.engine,
            archive=ArchiveStore(dialect=dialect, schema=self.schema),
            inbox=InboxStore(dialect=dialect, schema=self.schema),
            order=OrderStore(dialect=dialect, schema=self.schema),
            clock=self.clock,
            options=RetentionOptions(**options),
        )


@pytest.fixture
def evidence(database: Database) -> Iterator[Evidence]:
    upgrade(database.url, schema=database.schema)
    first = open_engine(database.url)
    engine = background_engine(first)
    yield Evidence(engine, database.schema, outbox_tables(database.namespace), ManualClock())
    engine.dispose()
    first.dispose()


def test_only_what_is_older_than_its_age_goes(evidence: Evidence) -> None:
    evidence.add(BATCH_ROWS + 30, age_days=10)
    evidence.add(5, age_days=1)

    gone = evidence.retention(archive_days=7, inbox_days=30).run()

    assert (gone.archive_rows, gone.inbox_rows, gone.more) == (BATCH_ROWS + 30, 0, False)
    assert evidence.counts() == (5, BATCH_ROWS + 35)


def test_an_inbox_with_several_groups_is_purged_by_age(evidence: Evidence) -> None:
    evidence.add(20, age_days=10)
    evidence.add(5, age_days=1)

    gone = evidence.retention(inbox_days=7).run()

    assert (gone.archive_rows, gone.inbox_rows) == (0, 20)
    assert evidence.counts() == (25, 5)


def test_nothing_goes_unless_an_age_was_given(evidence: Evidence) -> None:
    evidence.add(3, age_days=10_000)

    gone = evidence.retention().run()

    assert not gone
    assert evidence.counts() == (3, 3)


def test_a_service_that_stops_ends_the_round(evidence: Evidence) -> None:
    evidence.add(3, age_days=10)
    stopping = threading.Event()
    stopping.set()

    gone = evidence.retention(archive_days=1).run(stopping=stopping)

    assert not gone
    assert evidence.counts() == (3, 3)


def test_what_was_not_judged_yet_is_kept_for_twice_as_long_and_no_longer(evidence: Evidence, tmp_path: Path) -> None:
    for age_days in (15, 10, 8):
        evidence.add(3, age_days=age_days)
    retention = evidence.retention(archive_days=7, inbox_days=4, judged_file=tmp_path / "judged.json")
    left = []

    for needed_days in (30, 9, 1):
        since_ms = evidence.clock.now_ms() - needed_days * 24 * 60 * 60 * 1000
        needed = {"archive": since_ms, "inbox": since_ms}
        judged = RetentionHold(written_at_ms=evidence.clock.now_ms(), needed_since_ms=needed)
        (tmp_path / "judged.json").write_bytes(msgspec.json.encode(judged))
        retention.run()
        left.append(evidence.counts())

    assert left == [(6, 0), (3, 0), (0, 0)], "of 15, 10 and 8 days: inboxes go after 8 days, whatever was judged"


def test_nothing_waits_for_a_judgement_that_nobody_asked_for(evidence: Evidence, tmp_path: Path) -> None:
    evidence.add(3, age_days=10)

    unreadable = evidence.retention(archive_days=7, inbox_days=7, judged_file=tmp_path / "judged.json").run()
    plain = evidence.retention(archive_days=7, inbox_days=7).run()

    assert (bool(unreadable), plain.archive_rows, plain.inbox_rows) == (False, 3, 3)


def test_heads_of_keys_that_were_idle_for_days_go_and_the_others_stay(evidence: Evidence) -> None:
    evidence.add_heads(BATCH_ROWS + 30, age_days=8)
    evidence.add_heads(5, age_days=6)

    gone = evidence.retention(order_head_days=7).run()

    assert gone.order_heads == BATCH_ROWS + 30
    assert evidence.heads() == 5


def test_heads_are_looked_at_once_an_hour(evidence: Evidence) -> None:
    retention = evidence.retention(order_head_days=7)
    retention.run()
    evidence.add_heads(3, age_days=8)

    early = retention.run()
    evidence.clock.advance(HEAD_SWEEP_EVERY_MS)
    late = retention.run()

    assert (early.order_heads, late.order_heads) == (0, 3)


def test_no_head_goes_where_none_is_to_go(evidence: Evidence) -> None:
    evidence.add_heads(3, age_days=10_000)

    gone = evidence.retention(order_head_days=None).run()

    assert not gone
    assert evidence.heads() == 3
