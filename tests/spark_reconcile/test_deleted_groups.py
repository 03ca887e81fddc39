"""From its deletion on a group owes nothing, nor does a topic; what is made again under its name is judged anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from spark_reconcile import Summary, run
from spark_reconcile.evidence.delivery_evidence import GroupFacts, group_facts
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEGAN_MS = NOW_MS - 3 * HOUR_MS
NEWS, OLD, PURGED = "newsletter", "old", "purged"
type_of_verdict = tuple[str, str, str, str]


@pytest.mark.spark
def test_deleted_groups_and_topics_and_purged_ones_are_no_finding_and_those_made_again_are_judged(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    _work(world, tmp_path / "engine")
    settings = replace(world.write(sqlite, tmp_path), broker_data=tmp_path / "engine", archive_days=30, inboxes=[])

    summary = run(settings, session=spark, now_ms=NOW_MS)

    found = _verdicts(summary)
    assert summary.balanced
    assert {one for one in found if one[1] == "stays"} == {_done(f"m{number}", "stays") for number in range(4)}
    assert {one for one in found if one[1] == "again"} == {_done(f"m{number}", "again") for number in range(3)} | {
        ("m3", "again", "late", "not_delivered")
    }
    assert {one for one in found if one[1] == "gone"} == {_done("m0", "gone")} | {
        (f"m{number}", "gone", "settled", "group_deleted") for number in (1, 2, 3)
    }
    assert {one for one in found if one[1] == "reader"} == {
        _done("o0", "reader"), ("o1", "reader", "settled", "skipped"),
        ("o2", "reader", "canceled", "canceled"), _done("o3", "reader"),
    }  # fmt: skip
    assert ("o2", "", "canceled", "canceled") in found
    assert {one for one in found if one[1] in {"one", "two"}} == {
        _done("p0", "one"), _done("p3", "one"), _done("p3", "two"), ("p0", "two", "settled", "skipped"),
        *((name, group, "settled", "skipped") for name in ("p1", "p2") for group in ("one", "two")),
    }  # fmt: skip


def test_a_group_that_is_made_again_begins_anew() -> None:
    events = [
        ("declared", NEWS, "g", 0, 10, 1_000, "type = 'a'"), ("sought", NEWS, "g", 5, 20, 2_000, None),
        ("deleted", NEWS, "g", None, 30, 3_000, None), ("declared", NEWS, "again", 0, 40, 1_000, None),
        ("deleted", NEWS, "again", None, 50, 3_000, None), ("declared", NEWS, "again", 7, 60, 4_000, None),
        ("deleted", NEWS, "unknown", None, 70, 5_000, None),
    ]  # fmt: skip

    found = group_facts(events, inboxes={}, until={}, acting={})

    assert found == [
        GroupFacts(topic=NEWS, consumer_group="again", floor=7, since_ms=4_000, seeks=1, deleted_position=50),
        GroupFacts(topic=NEWS, consumer_group="g", seeks=2, deleted=1, deleted_position=30),
        GroupFacts(topic=NEWS, consumer_group="unknown", seeks=1, deleted=1, deleted_position=70),
    ]


def _work(world: World, folder: Path) -> None:
    """Groups in the middle of everything as they are deleted; one is made again; then a topic, which is made again."""
    clock = ManualClock(BEGAN_MS)
    engine = Engine.open(folder, clock=clock)
    try:
        for group in ("stays", "gone", "again"):
            engine.admin.declare_group(NEWS, group, GroupConfig(max_attempts=1))
        for number in range(4):
            _publish(world, engine, f"m{number}", NEWS, now_ms=clock.now_ms())
        _ack(engine, NEWS, "stays", 4)
        for group in ("gone", "again"):
            _ack(engine, NEWS, group, 1)
            engine.settler.nack(
                [one.receipt for one in engine.puller.pull(NEWS, group, max_messages=1)]
            )  # a dead letter
            engine.puller.pull(NEWS, group, max_messages=1)  # held
            clock.advance(MINUTE_MS)
            engine.deletion.delete_group(NEWS, group, force=True)
        engine.admin.declare_group(NEWS, "again", GroupConfig())
        _ack(engine, NEWS, "again", 3)

        engine.admin.declare_group(OLD, "reader", GroupConfig())
        for name in ("o0", "o1"):
            _publish(world, engine, name, OLD, now_ms=clock.now_ms())
        _publish(world, engine, "o2", OLD, now_ms=clock.now_ms(), deliver_at_ms=clock.now_ms() + HOUR_MS)
        _ack(engine, OLD, "reader", 1)
        clock.advance(MINUTE_MS)
        engine.deletion.delete_topic(OLD, force=True)
        _publish(world, engine, "o3", OLD, now_ms=clock.now_ms())
        _ack(engine, OLD, "reader", 1)
        _purge(world, engine, clock)
        clock.advance(2 * HOUR_MS)
    finally:
        engine.close()


def _purge(world: World, engine: Engine, clock: ManualClock) -> None:
    """A topic of two groups, one of which holds a message, is purged; both go on."""
    for group in ("one", "two"):
        engine.admin.declare_group(PURGED, group, GroupConfig())
    for name in ("p0", "p1", "p2"):
        _publish(world, engine, name, PURGED, now_ms=clock.now_ms())
    _ack(engine, PURGED, "one", 1)
    engine.puller.pull(PURGED, "one", max_messages=1)
    clock.advance(MINUTE_MS)
    engine.purger.purge_topic(PURGED)
    _publish(world, engine, "p3", PURGED, now_ms=clock.now_ms())
    for group in ("one", "two"):
        _ack(engine, PURGED, group, 1)


def _publish(
    world: World, engine: Engine, name: str, topic: str, *, now_ms: int, deliver_at_ms: int | None = None
) -> None:
    world.sent(name, key=None, topic=topic, age_ms=NOW_MS - now_ms, deliver_at_ms=deliver_at_ms)
    [result] = engine.publisher.publish(
        [Message(id=name, topic=topic, body=name.encode(), created_at_ms=now_ms, deliver_at_ms=deliver_at_ms)]
    )
    assert result.status == "stored"


def _ack(engine: Engine, topic: str, group: str, count: int) -> None:
    deliveries = engine.puller.pull(topic, group, max_messages=count)
    assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * count


def _done(message: str, group: str) -> type_of_verdict:
    return message, group, "settled", "done"


def _verdicts(summary: Summary) -> set[type_of_verdict]:
    rows = pq.read_table(Path(summary.folder) / "verdicts").to_pylist()
    return {(row["message_id"], row["consumer_group"] or "", row["state"], row["rule"]) for row in rows}
