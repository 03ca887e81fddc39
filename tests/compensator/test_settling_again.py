"""What the broker has accepted and the database refused to settle is settled by a later turn, and not sent again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compensator.entry.single_pass import run_single_pass
from compensator.work.source_turn import TurnOptions
from outbox_core import ManualClock, Message
from outbox_core.common.errors import DatabaseUnavailable, OutboxError, SchemaMissing
from tests.compensator.serving import Sources, turns_of
from tests.outbox.deadlock import short_lock_waits
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

LEASE_MS = 600_000


class Archive:
    """The shop's archive, which can be taken away, so that no settlement can be written, and brought back."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._prefix = f"{shop.database.schema}." if shop.database.schema else ""
        self._name = "archive" if shop.database.schema else "outbox_archive"

    def hide(self, _batch: Sequence[Message] = ()) -> None:
        self._shop.execute(f"ALTER TABLE {self._prefix}{self._name} RENAME TO {self._prefix}hidden")

    def bring_back(self) -> None:
        self._shop.execute(f"ALTER TABLE {self._prefix}hidden RENAME TO {self._prefix}{self._name}")


def test_a_turn_settles_first_what_the_turn_before_could_not(shop: Shop, sources: Sources, clock: ManualClock) -> None:
    archive = Archive(shop)
    broker = RecordingBroker(archive.hide)
    shop.add_due(3)
    turns = turns_of(sources(shop, broker), clock=clock)

    with pytest.raises(SchemaMissing):
        turns.take(going_on=lambda: True)
    with pytest.raises(SchemaMissing):
        turns.take(going_on=lambda: True)
    left = len(shop.rows())
    archive.bring_back()
    report = turns.take(going_on=lambda: True).report

    assert left == 3
    assert (report.accepted, report.stale) == (3, 0)
    assert shop.rows() == []
    assert [len(batch) for batch in broker.batches] == [3]
    assert shop.archived() == 3


def test_a_turn_settles_what_the_turn_before_waited_for_in_vain(
    mysql_shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    """Rows that an operator's transaction holds (1205)."""
    holder = mysql_shop.closing.enter_context(mysql_shop.other_engine(isolation_level="READ COMMITTED").connect())
    message = f"{mysql_shop.database.schema}.message"
    broker = RecordingBroker(lambda _: holder.exec_driver_sql(f"UPDATE {message} SET last_error = 'held'") and None)
    mysql_shop.add_due(3)
    turns = turns_of(sources(mysql_shop, broker), clock=clock)

    with short_lock_waits(), pytest.raises(DatabaseUnavailable, match="1205"):
        turns.take(going_on=lambda: True)
    holder.rollback()
    report = turns.take(going_on=lambda: True).report

    assert (report.accepted, report.stale) == (3, 0)
    assert mysql_shop.rows() == []
    assert [len(batch) for batch in broker.batches] == [3]


def test_what_could_not_be_settled_while_the_lease_lasted_is_sent_again(
    shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    archive = Archive(shop)
    broker = RecordingBroker(archive.hide)
    shop.add_due(3)
    turns = turns_of(sources(shop, broker), clock=clock)
    with pytest.raises(SchemaMissing):
        turns.take(going_on=lambda: True)
    archive.bring_back()

    clock.advance(LEASE_MS)
    shop.end_leases()
    broker.rule = None
    report = turns.take(going_on=lambda: True).report

    assert report.accepted == 3
    assert shop.rows() == []
    assert [len(batch) for batch in broker.batches] == [3, 3]


def test_a_single_pass_settles_before_it_ends_what_a_database_refused(
    shop: Shop, sources: Sources, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    archive = Archive(shop)
    broker = RecordingBroker(archive.hide)
    shop.add_due(3)
    source = sources(shop, broker)
    settle_again = source.batches.settle_again
    refusals: list[OutboxError] = []

    def refused_once_more() -> object:
        try:
            return settle_again()
        except OutboxError as error:
            refusals.append(error)
            archive.bring_back()
            raise

    source.batches.settle_again = refused_once_more  # type: ignore[assignment,method-assign]
    totals, errors = run_single_pass([source], options=TurnOptions(), clock=clock)

    assert (totals.accepted, len(errors), len(refusals)) == (3, 1, 1)
    assert shop.rows() == []
    assert [len(batch) for batch in broker.batches] == [3]
