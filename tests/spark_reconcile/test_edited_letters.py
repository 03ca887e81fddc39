"""What a broker's logs have of edited dead letters: each edit answers for its message, and nothing is invented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import DeadEdit, GroupConfig, Message
from spark_reconcile import run
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, TICKETS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EDIT = DeadEdit(body=b"corrected", headers={"region": "eu"})


@pytest.mark.spark
def test_an_edit_answers_for_its_message_in_the_group_in_which_that_died_and_nothing_is_invented(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    _work(world, tmp_path / "engine")
    settings = replace(world.write(sqlite, tmp_path), broker_data=tmp_path / "engine")

    summary = run(settings, session=spark, now_ms=NOW_MS)

    rows = pq.read_table(Path(summary.folder) / "verdicts").to_pylist()
    assert summary.balanced
    assert {row["message_id"] for row in rows if row["message_id"]} == {f"m{number}" for number in range(4)}
    assert {
        (row["message_id"], row["consumer_group"], row["state"], row["rule"]) for row in rows if row["consumer_group"]
    } == {
        *((f"m{number}", MAIL, "settled", "done") for number in range(4)), ("m0", TICKETS, "settled", "done"),
        ("m1", TICKETS, "settled", "edited"), ("m2", TICKETS, "dead", "dead"), ("m3", TICKETS, "settled", "edited"),
    }  # fmt: skip


def _work(world: World, folder: Path) -> None:
    """Three of four messages die in a group with an inbox, and are edited; one of them dies again."""
    clock = ManualClock(NOW_MS - HOUR_MS)
    engine = Engine.open(folder, clock=clock)
    for group in (TICKETS, MAIL):
        engine.admin.declare_group(PAID, group, GroupConfig(max_attempts=1))
    for number in range(4):
        order, message_id = world.order(), f"m{number}"
        world.sent(message_id, key=str(order))
        message = Message(
            id=message_id, topic=PAID, key=str(order), body=message_id.encode(), created_at_ms=clock.now_ms()
        )
        engine.publisher.publish([message])
    engine.settler.ack([one.receipt for one in engine.puller.pull(PAID, MAIL)])
    first, *failed = engine.puller.pull(PAID, TICKETS)
    _handle(engine, world, clock, first.id, first.receipt)
    engine.settler.nack([one.receipt for one in failed], reason="no region")
    clock.advance(MINUTE_MS)
    operation = EditOperation(name="op", by="ops", why="region was missing")
    engine.dead_letters.edit(PAID, TICKETS, dict.fromkeys(("m1", "m2"), EDIT), operation=operation)
    engine.dead_letters.edit(PAID, TICKETS, {"m3": EDIT}, operation=operation)
    corrected, worse, again = engine.puller.pull(PAID, TICKETS)
    _handle(engine, world, clock, corrected.id, corrected.receipt)
    engine.settler.nack([worse.receipt, again.receipt], reason="still none")
    engine.dead_letters.edit(PAID, TICKETS, {again.id: EDIT}, operation=operation)
    [twice] = engine.puller.pull(PAID, TICKETS)
    _handle(engine, world, clock, twice.id, twice.receipt)
    engine.close()


def _handle(engine: Engine, world: World, clock: ManualClock, message_id: str, receipt: str) -> None:
    """An effect in the group's inbox, and the acknowledgement."""
    world.handle(message_id, age_ms=NOW_MS - clock.now_ms())
    assert engine.settler.ack([receipt]) == ["acked"]
