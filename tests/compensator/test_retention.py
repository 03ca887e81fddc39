"""Retention: old evidence goes, in small batches; young evidence and everything unsent stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, func, insert, select

from compensator.retention import BATCH_ROWS, DAY_US, Retention, RetentionOptions
from outbox.archive import ArchiveStore
from outbox.database import background_engine, now_us, open_engine
from outbox.inbox import InboxStore
from outbox.migrating import upgrade
from outbox.schema import OutboxTables, outbox_tables
from tests.fixtures.databases import Database


@dataclass
class Evidence:
    """A database with evidence of chosen ages."""

    engine: Engine
    schema: str | None
    tables: OutboxTables

    def add(self, count: int, *, age_days: float) -> None:
        at = now_us(self.engine.dialect) - int(age_days * DAY_US)
        names = [f"m{age_days}-{number}" for number in range(count)]
        with self.engine.begin() as connection:
            for name in names:
                sent = {"kind": "publish", "topic": "t", "body_sha256": "0", "attempts": 1, "outcome": "stored"}
                connection.execute(insert(self.tables.archive).values(id=name, sent_at_us=at, created_at_us=at, **sent))
                handled = {"consumer_group": f"g{len(name) % 2}", "topic": "t"}
                connection.execute(insert(self.tables.inbox).values(message_id=name, handled_at_us=at, **handled))

    def counts(self) -> tuple[int, int]:
        with self.engine.connect() as connection:
            tables = (self.tables.archive, self.tables.inbox)
            archived, handled = (connection.scalar(select(func.count()).select_from(table)) for table in tables)
        return archived or 0, handled or 0

    def retention(self, **days: float | None) -> Retention:
        dialect = self.engine.dialect
        return Retention(
            engine=self.engine,
            archive=ArchiveStore(dialect=dialect, schema=self.schema),
            inbox=InboxStore(dialect=dialect, schema=self.schema),
            options=RetentionOptions(**days),
        )


@pytest.fixture
def evidence(database: Database) -> Iterator[Evidence]:
    upgrade(database.url, schema=database.schema)
    first = open_engine(database.url)
    engine = background_engine(first)
    yield Evidence(engine, database.schema, outbox_tables(database.schema))
    engine.dispose()
    first.dispose()


def test_only_what_is_older_than_its_age_goes(evidence: Evidence) -> None:
    evidence.add(BATCH_ROWS + 30, age_days=10)
    evidence.add(5, age_days=1)

    gone = evidence.retention(archive_days=7, inbox_days=30).run()

    assert gone == (BATCH_ROWS + 30, 0)
    assert evidence.counts() == (5, BATCH_ROWS + 35)


def test_an_inbox_with_several_groups_is_purged_by_age(evidence: Evidence) -> None:
    evidence.add(20, age_days=10)
    evidence.add(5, age_days=1)

    gone = evidence.retention(inbox_days=7).run()

    assert gone == (0, 20)
    assert evidence.counts() == (25, 5)


def test_nothing_goes_unless_an_age_was_given(evidence: Evidence) -> None:
    evidence.add(3, age_days=10_000)

    gone = evidence.retention().run()

    assert gone == (0, 0)
    assert evidence.counts() == (3, 3)


def test_a_service_that_stops_ends_the_round(evidence: Evidence) -> None:
    evidence.add(3, age_days=10)
    stopping = threading.Event()
    stopping.set()

    gone = evidence.retention(archive_days=1).run(stopping=stopping)

    assert gone == (0, 0)
    assert evidence.counts() == (3, 3)
