"""Outbox(timing=...): scheduled messages wait in their table, go out when due, and are withdrawn from the table."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, func, literal_column, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox, Telemetry
from outbox.migrate import schema_upgrade
from outbox.producer.timing_store_feeder import TimerLimits, TimingStoreFeeder
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox.store.schema import message_table
from outbox.telemetry.metrics import OutboxMetrics
from outbox_core import Message, PublishResult
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotSupported
from outbox_core.messages.ids import new_token
from outbox_core.messages.message import DUE_HEADER
from outbox_core.messages.timing_port import TimedRow, Timer
from spark_reconcile.sources.sql_statements import WITHDRAWN, WITHDREW, archive_note
from tests.fixtures.databases import Database
from tests.fixtures.forks import FORKS
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

HOUR = timedelta(hours=1)
WAIT_SECONDS = 120


class KeptTimers:
    """A TimerSink that keeps what it is given, once `rule` has let it through."""

    def __init__(self, rule: Callable[[], None] = lambda: None) -> None:
        self._rule = rule
        self._changed = threading.Condition()
        self.timers: list[Timer] = []

    def add(self, timers: Sequence[Timer], *, only_missing: bool = False) -> int:
        self._rule()
        with self._changed:
            self.timers += timers
            self._changed.notify_all()
        return len(timers)

    def wait_for(self, count: int) -> list[Timer]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.timers) >= count, WAIT_SECONDS)
            return self.timers

    def close(self) -> None: ...


@pytest.fixture
def prompt() -> PromptBroker:
    return PromptBroker()


@pytest.fixture
def timers() -> KeptTimers:
    return KeptTimers()


def publish(box: Outbox, topic: str = "reminder", **options: Any) -> Message:
    with box.begin():
        return box.publish(topic, {"n": 1}, **options)


def rolled_back(box: Outbox, act: Callable[[], object]) -> None:
    def fail() -> None:
        with box.begin():
            act()
            raise LookupError

    with pytest.raises(LookupError):
        fail()


def come_due(shop: Shop) -> None:
    """As if the time of every row had come."""
    message = shop.tables.message
    past_us = time.time_ns() // 1_000 - 2_000
    with shop.engine.begin() as connection:
        connection.execute(update(message).values(due_at_us=past_us, deliver_at_ms=past_us // 1_000))


def outcomes(shop: Shop) -> list[tuple[str, str]]:
    archive = shop.tables.archive
    with shop.engine.connect() as connection:
        found = connection.execute(select(archive.c.kind, archive.c.outcome).order_by(archive.c.kind))
        return [(row.kind, row.outcome) for row in found]


def test_a_scheduled_message_waits_unowned_in_its_table_until_its_time(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    message = publish(box, deliver_at=datetime.now(UTC) + HOUR)

    [row] = shop.rows()
    assert (row["token"], row["attempts"], row["state"]) == (None, 0, "pending")
    assert row["due_at_us"] == message.deliver_at_ms * 1_000  # type: ignore[operator]
    assert timers.wait_for(1) == [Timer(TimedRow(shop.store.table.name, message.id), message.deliver_at_ms or 0)]
    assert shop.scan(prompt).run().claimed == 0
    assert prompt.stored == []


def test_a_message_that_is_due_goes_out_for_now_with_its_due_time_as_a_header(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    publish(shop.box(prompt, timing=timers), delay=HOUR, headers={"a": "b"})
    come_due(shop)
    [row] = shop.rows()

    assert shop.scan(prompt).run().accepted == 1
    [sent] = prompt.stored
    assert sent.deliver_at_ms is None
    assert sent.headers["a"] == "b"
    assert sent.headers[DUE_HEADER] == str(row["deliver_at_ms"])
    assert shop.rows() == []


def test_a_row_that_is_claimed_before_its_time_is_put_back_and_not_parked(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    message = publish(shop.box(prompt, timing=timers), deliver_at=datetime.now(UTC) + HOUR)
    shop.end_leases()

    assert shop.scan(prompt).run().retried == 1
    [row] = shop.rows()
    assert prompt.stored == []
    assert (row["state"], row["token"], row["attempts"]) == ("pending", None, 0)
    assert row["due_at_us"] >= (message.deliver_at_ms or 0) * 1_000


def test_a_time_in_the_past_is_now(shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    publish(shop.box(prompt, timing=timers), deliver_at=datetime.now(UTC) - HOUR)

    [row] = shop.rows()
    assert row["due_at_us"] >= row["created_at_us"] - 1_000, "not below the low-water mark of a compensator"
    shop.end_delays()
    assert shop.scan(prompt).run().accepted == 1


def test_a_delay_counts_by_the_clock_of_the_database(shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    publish(shop.box(prompt, timing=timers), delay=HOUR)

    [row] = shop.rows()
    assert row["due_at_us"] == row["deliver_at_ms"] * 1_000
    assert abs(row["due_at_us"] - row["created_at_us"] - 3_600_000_000) < 60_000_000


def test_what_is_for_now_goes_out_at_once_beside_what_is_scheduled(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    with box.begin():
        now = box.publish("paid", {})
        later = box.publish("reminder", {}, delay=HOUR)
    prompt.wait_for(lambda one: len(one.stored) == 1)

    assert [one.id for one in prompt.stored] == [now.id]
    assert [one.row.id for one in timers.wait_for(1)] == [later.id]
    assert box.close()
    assert [row["id"] for row in shop.rows()] == [later.id]


def test_what_was_rolled_back_has_no_timer(shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    box = shop.box(prompt, timing=timers)
    rolled_back(box, lambda: box.publish("reminder", {}, delay=HOUR))
    kept = publish(box, delay=HOUR)

    assert [one.row.id for one in timers.wait_for(1)] == [kept.id]
    assert [row["id"] for row in shop.rows()] == [kept.id]


def test_a_dead_store_costs_commits_and_sends_nothing(shop: Shop, prompt: PromptBroker) -> None:
    metrics = OutboxMetrics()
    url = "redis://127.0.0.1:1/?name=shop"  # where nobody listens
    box = shop.box(prompt, timing=url, telemetry=Telemetry(metrics=metrics))
    for number in range(20):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish("reminder", {}, delay=HOUR, session=session)
            box.publish("paid", {}, session=session)
    prompt.wait_for(lambda one: len(one.stored) == 20)

    assert {one.topic for one in prompt.stored} == {"paid"}
    assert box.close()
    assert shop.payments() == list(range(20))
    assert shop.row_topics() == ["reminder"] * 20
    assert (metrics.registry.get_sample_value("outbox_sender_dropped_rows_total") or 0) >= 1
    come_due(shop)
    assert shop.scan(prompt).run().accepted == 20


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_adds_the_timers_of_its_own_commits(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers, tmp_path: Path, fork: Callable[[], int]
) -> None:
    box = shop.box(prompt, timing=timers)
    first = publish(box, delay=HOUR)
    timers.wait_for(1)

    child = fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # which ends a child that waits for a thread of its parent's
        try:
            shop.engine.dispose(close=False)
            timers.timers.clear()
            published = publish(box, delay=HOUR)
            (tmp_path / "added").write_text(str([one.row.id for one in timers.wait_for(1)] == [published.id]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    last = publish(box, delay=HOUR)

    assert (tmp_path / "added").read_text() == "True"
    assert [one.row.id for one in timers.wait_for(2)] == [first.id, last.id]
    assert len(shop.rows()) == 3


def test_a_full_queue_of_timers_drops_and_a_failure_ends_no_thread() -> None:
    hold, failures = threading.Event(), iter([True])

    def rule() -> None:
        assert hold.wait(WAIT_SECONDS)
        if next(failures, False):
            raise BrokerUnavailable("once")

    kept, metrics = KeptTimers(rule), OutboxMetrics()
    adder = TimingStoreFeeder(
        kept,
        store=MessageStore(dialect=create_engine("sqlite://").dialect),
        limits=TimerLimits(queue_timers_max=3, batch_timers_max=1, pause_ms=1),
        telemetry=Telemetry(metrics=metrics),
    )
    rows = [publish_row(Message(id=f"m{n}", topic="t", body=b"", deliver_at_ms=n), is_timed=True) for n in range(9)]
    adder.offer(rows[:1])
    adder.offer(rows[1:])
    hold.set()

    assert {one.row.table for one in kept.wait_for(1)} == {"outbox_message"}
    adder.close(timeout_ms=WAIT_SECONDS * 1_000)
    adder.offer(rows)
    assert 2 <= len(kept.timers) <= 3
    assert metrics.registry.get_sample_value("outbox_sender_dropped_rows_total") == 9 + 9 - len(kept.timers)


# -- withdrawing -------------------------------------------------------------------------------------------------------


def cancel(box: Outbox, message_id: str) -> None:
    with box.begin():
        box.cancel(message_id)


def test_a_cancel_withdraws_the_row_with_its_transaction(shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    box = shop.box(prompt, timing=timers)
    message = publish(box, delay=HOUR)
    rolled_back(box, lambda: box.cancel(message.id))
    assert len(shop.rows()) == 1, "the transaction was rolled back"

    cancel(box, message.id)
    assert shop.rows() == []
    assert outcomes(shop) == [("cancel", "canceled"), ("publish", "withdrawn")]
    cancel(box, message.id)
    assert outcomes(shop)[:2] == [("cancel", "canceled")] * 2


def test_a_withdrawal_is_archived_as_the_reconciliation_reads_it(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    cancel(box, publish(box, delay=HOUR).id)

    with shop.engine.connect() as connection:
        notes = connection.scalars(select(literal_column(archive_note())).select_from(shop.tables.archive)).all()

    assert sorted(notes) == sorted([WITHDREW, WITHDRAWN])


def test_the_command_says_that_a_withdrawn_message_was_canceled(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    message = publish(box, delay=HOUR)
    cancel(box, message.id)
    text, as_json = shop.command("messages", "show", message.id), shop.command("messages", "show", message.id, "--json")

    assert re.fullmatch(rf"{message.id} for {message.topic} was canceled at \S+Z, before it was sent\n", text.stdout)
    assert json.loads(as_json.stdout)["state"] == "canceled"


def test_a_cancel_finds_what_its_own_transaction_published(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    with box.begin():
        box.cancel(box.publish("reminder", {}, delay=HOUR).id)

    assert shop.rows() == []
    assert prompt.stored == []


def test_a_cancel_finds_what_was_committed_since_its_transaction_first_read(
    mysql_shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = mysql_shop.box(prompt, timing=timers)

    with Session(mysql_shop.engine) as session, session.begin():
        with suppress(DBAPIError):  # of some releases of MariaDB; on, the cancel's commit fails with error 1020
            session.execute(text("SET SESSION innodb_snapshot_isolation = OFF"))
        assert session.scalars(select(Payment.id)).all() == []
        message = publish(box, delay=HOUR)
        box.cancel(message.id, session=session)
        box.cancel("never-seen", session=session)

    assert mysql_shop.rows() == []
    assert sorted(outcomes(mysql_shop)) == [("cancel", "canceled"), ("cancel", "unknown"), ("publish", "withdrawn")]


def test_a_cancel_is_too_late_for_what_is_being_sent_or_was(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    message = publish(box, delay=HOUR)
    come_due(shop)
    with shop.background_engine().begin() as connection:
        assert shop.store.claim(connection, [message.id], token=new_token(), lease_us=60_000_000) == 1
    cancel(box, message.id)
    assert len(shop.rows()) == 1
    assert outcomes(shop) == [("cancel", "too_late")]

    come_due(shop)
    assert shop.scan(prompt).run().accepted == 1
    cancel(box, message.id)
    assert outcomes(shop) == [("cancel", "too_late"), ("cancel", "too_late"), ("publish", "stored")]


class Unanswered(PromptBroker):
    """It stores what it gets, and its first answer is lost."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        results = super().publish(batch)
        if len(self.batches) == 1:
            raise BrokerUnavailable("no answer")
        return results


def test_a_cancel_is_too_late_for_what_the_broker_may_have(shop: Shop, timers: KeptTimers) -> None:
    broker = Unanswered()
    box = shop.box(broker, timing=timers)
    message = publish(box, delay=HOUR)
    come_due(shop)
    assert shop.scan(broker).run().retried == 1

    cancel(box, message.id)
    assert broker.ids == [message.id]
    assert outcomes(shop) == [("cancel", "too_late")]
    shop.end_delays()
    assert shop.scan(broker).run().accepted == 1
    assert broker.duplicates == [message.id]


def test_a_cancel_is_too_late_for_what_was_parked_or_discarded_when_the_broker_may_have_it(
    shop: Shop, timers: KeptTimers
) -> None:
    broker = Unanswered()
    box = shop.box(broker, timing=timers)
    message, untried = publish(box, delay=HOUR), publish(box, "other", delay=HOUR)
    come_due(shop)
    shop.command("messages", "park", untried.id)
    assert shop.scan(broker).run().retried == 1

    for _ in range(2):
        shop.command("messages", "park", message.id)
        [row] = [row for row in shop.rows() if row["id"] == message.id]
        assert re.fullmatch("parked by an operator, before: .*no answer.*", row["last_error"])
        shop.command("messages", "retry", message.id)
    shop.command("messages", "park", message.id)
    cancel(box, message.id)
    cancel(box, untried.id)
    shop.command("messages", "discard", message.id, "--yes")
    cancel(box, message.id)

    assert broker.ids == [message.id]
    assert sorted(outcomes(shop)) == [
        ("cancel", "canceled"), ("cancel", "too_late"), ("cancel", "too_late"), ("publish", "discarded"),
        ("publish", "withdrawn"),
    ]  # fmt: skip


def test_a_cancel_is_too_late_for_what_was_withdrawn_and_published_again_and_sent(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    cancel(box, publish(box, delay=HOUR, message_id="trip-17").id)
    publish(box, delay=HOUR, message_id="trip-17")
    come_due(shop)
    assert shop.scan(prompt).run().accepted == 1

    cancel(box, "trip-17")

    assert sorted(outcomes(shop)) == [
        ("cancel", "canceled"), ("cancel", "too_late"), ("publish", "stored"), ("publish", "withdrawn"),
    ]  # fmt: skip


def test_a_cancel_withdraws_what_was_claimed_too_early_or_refused_for_good(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers)
    early = publish(box, delay=HOUR)
    shop.end_leases()
    assert shop.scan(prompt).run().retried == 1
    cancel(box, early.id)

    refused = publish(box, delay=HOUR)
    prompt.rejects[refused.id] = "never"
    come_due(shop)
    assert shop.scan(prompt).run().parked == 1
    cancel(box, refused.id)

    assert outcomes(shop) == [("cancel", "canceled")] * 2 + [("publish", "withdrawn")] * 2
    assert prompt.stored == []


def test_a_cancel_of_nothing_is_unknown_and_one_of_what_is_for_now_withdraws_nothing(
    shop: Shop, prompt: PromptBroker, timers: KeptTimers
) -> None:
    box = shop.box(prompt, timing=timers, sender=NO_SENDER)
    now = publish(box)
    cancel(box, "never-seen")
    cancel(box, now.id)

    assert outcomes(shop) == [("cancel", "unknown")] * 2
    assert [row["id"] for row in shop.rows()] == [now.id]


def test_without_an_archive_a_cancel_leaves_no_trace(shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    from outbox import RelayPolicy

    box = shop.box(prompt, timing=timers, policy=RelayPolicy(keep_archive=False))
    cancel(box, publish(box, delay=HOUR).id)

    assert shop.rows() == []
    assert shop.archived() == 0


def test_with_split_tables_a_timer_names_the_table_and_a_cancel_finds_it(
    mysql_like: Database, prompt: PromptBroker, timers: KeptTimers
) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema, tables=4)
    box = Outbox(mysql_like.url, broker=prompt, schema=mysql_like.schema, tables=4, timing=timers)
    messages = [publish(box, key=f"key-{number}", delay=HOUR) for number in range(12)]
    added = timers.wait_for(12)
    assert {(one.row.table, one.row.id) for one in added} == {
        (box.placement.tables[box.placement.number(str(message.key))].name, message.id) for message in messages
    }
    assert len({one.row.table for one in added}) > 1

    for message in messages:
        cancel(box, message.id)
    left = [message_table(mysql_like.schema, one.row.table) for one in added]
    with box.engine.connect() as connection:
        assert sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in left) == 0
    box.close()
    box.engine.dispose()


def test_several_schemas_have_no_common_timing_store(mysql_like: Database, timers: KeptTimers) -> None:
    with pytest.raises(ConfigurationError, match="one message schema"):
        Outbox(mysql_like.url, broker=PromptBroker(), schema=["a", "b"], tables=4, timing=timers)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_ordered_topic_holds_nothing_back(sqlite_shop: Shop, prompt: PromptBroker, timers: KeptTimers) -> None:
    box = sqlite_shop.box(prompt, timing=timers, ordered=["account"])
    with pytest.raises(NotSupported, match="younger messages would wait"), box.begin():
        box.publish("account", {}, key="k", delay=HOUR)


def test_without_timing_a_broker_that_cannot_delay_refuses_as_before(sqlite_shop: Shop, prompt: PromptBroker) -> None:
    box = sqlite_shop.box(prompt)
    with pytest.raises(NotSupported, match="delay"), box.begin():
        box.publish("reminder", {}, delay=HOUR)
    with pytest.raises(NotSupported, match="cancel"), box.begin():
        box.cancel("one")
