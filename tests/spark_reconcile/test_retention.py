"""What the broker's retention has dropped: its groups are still known, and nothing that is gone becomes a finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.messages.message import GroupConfig, Message
from spark_reconcile import InboxSource, Summary, run
from spark_reconcile.evidence.delivery_evidence import GroupFacts, group_facts
from spark_reconcile.sources.broker_logs import begins_whole, survey
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import actions_of
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, REMINDER, TICKETS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = 80
BEGAN_MS = NOW_MS - 3 * HOUR_MS
LOST, CANCELED, IDLE = "message-70", "canceled-in-time", "idle"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "messages_whole"),
    [
        ({"segment_bytes": 4096, "checkpoint_bytes": 1024, "retention_drops_unread": True}, False),
        ({"segment_bytes": 1 << 28, "checkpoint_bytes": 1024}, True),
    ],
    ids=["both logs", "the action log"],
)
def test_a_loss_is_found_and_nothing_else_after_the_logs_have_lost_their_beginning(
    spark: SparkSession, sqlite: Database, tmp_path: Path, options: dict[str, int], messages_whole: bool
) -> None:
    world = World()
    _work(world, tmp_path / "engine", EngineOptions(retention_ms=HOUR_MS, retention_check_ms=1 << 50, **options))
    inboxes = [InboxSource(group=TICKETS), InboxSource(group=IDLE)]
    settings = replace(
        world.write(sqlite, tmp_path), broker_data=tmp_path / "engine", archive_days=30, inboxes=inboxes, inbox_days=30
    )
    assert TICKETS not in _declared(tmp_path / "engine"), "its declaration is what was dropped"
    assert begins_whole(survey(tmp_path / "engine", "messages")) is messages_whole

    summary = run(settings, session=spark, now_ms=NOW_MS)

    found = _verdicts(summary)
    assert {one for one in found if one[2] not in {"settled", "unknown"}} == {
        (LOST, TICKETS, "lost", "acknowledged_not_handled")
    }
    assert ("message-79", TICKETS, "settled", "done") in found
    assert ("message-79", MAIL, "settled", "done") in found
    assert ("message-79", IDLE, "unknown", "filtered_out_or_waiting") in found
    whole = {("message-1", TICKETS, "unknown", "action_log_out_of_reach"), (CANCELED, "", "settled", "stored"),
             (CANCELED, MAIL, "unknown", "cancel_out_of_reach")}  # fmt: skip
    cut = {("message-1", TICKETS, "unknown", "message_out_of_reach"), (CANCELED, "", "unknown", "cancel_out_of_reach")}
    assert found >= (whole if messages_whole else cut)


def test_a_group_that_acted_before_it_was_declared_is_an_old_one_declared_again() -> None:
    again = [("declared", PAID, MAIL, 7, 0, 5_000, None), ("declared", PAID, TICKETS, 7, 1, 5_000, None)]

    found = group_facts(
        again, inboxes={}, until={}, acting={(PAID, MAIL): 4_999, (PAID, TICKETS): 5_000, (PAID, IDLE): 9_000}
    )

    assert found == [
        GroupFacts(topic=PAID, consumer_group=IDLE, filtered=1, filter_since_ms=-1),
        GroupFacts(topic=PAID, consumer_group=MAIL, filter_since_ms=5_000),
        GroupFacts(topic=PAID, consumer_group=TICKETS, floor=7, since_ms=5_000),
    ]


def _work(world: World, folder: Path, options: EngineOptions) -> None:
    """Two groups at work for hours, one of them declared once only, and a third that stopped long ago."""
    clock = ManualClock(BEGAN_MS)
    engine = Engine.open(folder, clock=clock, options=options)
    try:
        for topic, group in ((PAID, TICKETS), (PAID, MAIL), (PAID, IDLE), (REMINDER, MAIL)):
            engine.admin.declare_group(topic, group, GroupConfig())
        _cancel(world, engine, clock)
        for number in range(ORDERS):
            clock.advance(2 * MINUTE_MS)
            if number == ORDERS - 20:
                engine.admin.declare_group(PAID, MAIL, GroupConfig())
            _settle(world, engine, f"message-{number}", now_ms=clock.now_ms(), idle=number > 4)
            engine.retention.drop_outdated()
        _remind(world, engine, now_ms=clock.now_ms())
    finally:
        engine.close()


def _cancel(world: World, engine: Engine, clock: ManualClock) -> None:
    due_ms, age_ms = NOW_MS - 50 * MINUTE_MS, NOW_MS - clock.now_ms()
    key = str(world.order(age_ms=age_ms, status="BOOKED", remind_at_ms=due_ms))
    world.sent(CANCELED, key=key, age_ms=age_ms, topic=REMINDER, deliver_at_ms=due_ms)
    engine.publisher.publish([_message(CANCELED, REMINDER, key, now_ms=clock.now_ms(), deliver_at_ms=due_ms)])
    clock.advance(MINUTE_MS)
    engine.publisher.cancel([CANCELED])


def _remind(world: World, engine: Engine, *, now_ms: int) -> None:
    key = str(world.order(age_ms=NOW_MS - now_ms, status="BOOKED"))
    world.sent("reminder", key=key, age_ms=NOW_MS - now_ms, topic=REMINDER)
    engine.publisher.publish([_message("reminder", REMINDER, key, now_ms=now_ms)])
    engine.settler.ack([one.receipt for one in engine.puller.pull(REMINDER, MAIL, max_messages=10)])


def _settle(world: World, engine: Engine, name: str, *, now_ms: int, idle: bool) -> None:
    age_ms = NOW_MS - now_ms
    key = str(world.order(age_ms=age_ms))
    world.sent(name, key=key, age_ms=age_ms)
    engine.publisher.publish([_message(name, PAID, key, now_ms=now_ms)])
    for group in (TICKETS, MAIL) if idle else (TICKETS, MAIL, IDLE):
        engine.settler.ack([one.receipt for one in engine.puller.pull(PAID, group, max_messages=10)])
        if group != MAIL and name != LOST:
            world.handle(name, age_ms=age_ms - 5, group=group)


def _message(name: str, topic: str, key: str, *, now_ms: int, deliver_at_ms: int | None = None) -> Message:
    return Message(
        id=name,
        topic=topic,
        key=key,
        headers={"padding": "." * 500},
        body=name.encode(),
        created_at_ms=now_ms,
        deliver_at_ms=deliver_at_ms,
    )


def _declared(folder: Path) -> set[str]:
    return {action.group for action in actions_of(folder) if isinstance(action, journal.Declared)}


def _verdicts(summary: Summary) -> set[tuple[str, str, str, str]]:
    rows = pq.read_table(Path(summary.folder) / "verdicts").to_pylist()
    return {(row["message_id"], row["consumer_group"] or "", row["state"], row["rule"]) for row in rows}
