"""The age of what waits counts from when it was wanted: an outage that puts rows off does not make them young."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import select

from compensator.service.source_upkeep import UpkeepOptions
from outbox.migrate import upgrade
from outbox.store.databases.supported import database_of
from outbox.store.message_table import Backlog
from outbox.store.row import OutboxRow, publish_row
from outbox_core import Message
from outbox_core.common.errors import BrokerUnavailable
from tests.compensator.serving import HOUR_US, Serve, WatchedMetrics
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

MINUTE_US = 60_000_000
COUNT_OFTEN = UpkeepOptions(gauges_ms=1, gauges_idle_ms=1, gauges_check_ms=20)


def add(shop: Shop, row: OutboxRow, *, committed_for_us: int, due_in_us: int) -> None:
    """A row that was committed some time ago, and was put off since."""
    with shop.engine.begin() as connection:
        shop.store.insert(connection, [row], token="d" * 32, lease_us=due_in_us)
    shop.execute(f"UPDATE {shop.tables.message.fullname} SET created_at_us = created_at_us - {committed_for_us}")


def row(deliver_at_ms: int | None = None, *, is_timed: bool = False) -> OutboxRow:
    message = Message(id="m-1", topic="topic", body=b"x", deliver_at_ms=deliver_at_ms)
    return publish_row(message, is_timed=is_timed)


def database_now_ms(shop: Shop) -> int:
    with shop.engine.begin() as connection:
        return int(connection.scalar(select(database_of(shop.engine.dialect).now_us())) or 0) // 1000


def test_a_row_that_an_outage_has_put_off_is_as_old_as_its_commit(shop: Shop) -> None:
    add(shop, row(), committed_for_us=HOUR_US, due_in_us=MINUTE_US)

    backlog = backlog_of(shop)

    assert (backlog.pending, backlog.due) == (1, 0)
    assert HOUR_US <= backlog.oldest_due_age_us <= HOUR_US + 10 * MINUTE_US


def test_a_scheduled_message_is_as_old_as_its_due_time_and_before_that_not_at_all(shop: Shop) -> None:
    now_ms = database_now_ms(shop)
    add(shop, row(now_ms + 86_400_000, is_timed=True), committed_for_us=HOUR_US, due_in_us=0)
    before = backlog_of(shop).oldest_due_age_us
    shop.execute(
        f"UPDATE {shop.tables.message.fullname} "
        f"SET deliver_at_ms = {now_ms - 60_000}, due_at_us = {(now_ms + 60_000) * 1000}"
    )

    assert before == 0
    assert MINUTE_US <= backlog_of(shop).oldest_due_age_us <= 11 * MINUTE_US


def test_a_message_that_the_broker_is_to_delay_is_as_old_as_its_commit(shop: Shop) -> None:
    add(shop, row(database_now_ms(shop) + 86_400_000), committed_for_us=HOUR_US, due_in_us=MINUTE_US)

    assert HOUR_US <= backlog_of(shop).oldest_due_age_us <= HOUR_US + 10 * MINUTE_US


def test_an_outbox_without_waiting_messages_is_young(shop: Shop) -> None:
    assert backlog_of(shop).oldest_due_age_us == 0


def test_status_is_overdue_in_an_outage_of_a_few_rows(sqlite_shop: Shop) -> None:
    add(sqlite_shop, row(), committed_for_us=HOUR_US, due_in_us=MINUTE_US)
    upgrade(sqlite_shop.engine)

    done = sqlite_shop.command("status", "--json")

    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["oldest_due_age_us"] >= HOUR_US
    assert [reason for reason in found["reasons"] if "since it was committed or due" in reason]


def test_the_metric_counts_from_the_commit_while_the_broker_is_out(
    shop: Shop, serve: Serve, metrics: WatchedMetrics
) -> None:
    def refuse(_batch: Sequence[Message]) -> None:
        raise BrokerUnavailable("down")

    add(shop, row(), committed_for_us=HOUR_US, due_in_us=-1)
    serve(shop, RecordingBroker(refuse), upkeep=COUNT_OFTEN).start()

    metrics.wait_for(lambda it: "open" in it.breakers)
    metrics.wait_for(lambda it: any(counts.oldest_due_age_us >= HOUR_US for counts in it.counts.values()))
    (source,) = metrics.counts
    assert (metrics.value("outbox_oldest_due_age_seconds", source=source) or 0) >= HOUR_US / 1_000_000
    assert (metrics.value("outbox_oldest_pending_timestamp_seconds", source=source) or 0) > 0


def backlog_of(shop: Shop) -> Backlog:
    engine = shop.background_engine()
    with engine.connect() as connection:
        return shop.store.backlog(connection)
