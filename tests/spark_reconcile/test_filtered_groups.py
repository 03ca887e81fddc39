"""What a group with a filter was never handed is judged by the filter, as far as the log tells which one was asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.evidence.delivery_evidence import GroupFacts, GroupFilter, filters_in_force
from spark_reconcile.evidence.filter_evaluation import FilterEvaluation, evaluate
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.sources.broker_logs import survey
from tests.fixtures.databases import Database
from tests.spark_reconcile.message_log import LoggedMessage
from tests.spark_reconcile.timed_ids import timed_id
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, SECOND_MS, World, no_wait, write_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEWS = "newsletter"
URGENT, PLAIN = "type = 'urgent'", "type = 'plain'"
GROUPS = ("picky", "changed", "freed", "sought")
BEGAN_MS = NOW_MS - 3 * HOUR_MS
Verdict = tuple[str, str, str]
"""(message, state, rule)"""


def _late(*names: str) -> set[Verdict]:
    return {(name, "late", "not_delivered") for name in names}


def _not_wanted(*names: str) -> set[Verdict]:
    return {(name, "settled", "filtered_out") for name in names}


def _changed(*names: str) -> set[Verdict]:
    return {(name, "unknown", "filter_changed") for name in names}


WANTED: dict[str, set[Verdict]] = {
    "picky": {
        ("a-urgent", "settled", "done"), *_not_wanted("b-plain", "d-plain"),
        *_late("c-urgent", "scheduled-urgent", "smuggled-urgent"),
    },
    "changed": {
        *_changed("a-urgent", "b-plain"), *_not_wanted("c-urgent", "scheduled-urgent", "smuggled-urgent"),
        *_late("d-plain"),
    },
    "freed": {
        *_changed("a-urgent", "b-plain"), *_late("c-urgent", "d-plain", "scheduled-urgent", "smuggled-urgent"),
    },
    "sought": {
        *_not_wanted("a-urgent", "c-urgent", "scheduled-urgent", "smuggled-urgent"), *_late("b-plain", "d-plain"),
    },
}  # fmt: skip


@pytest.mark.spark
def test_each_message_is_judged_by_the_one_filter_that_was_asked_about_it(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    names = _work(world, tmp_path / "engine")
    settings = replace(
        world.write(sqlite, tmp_path), broker_data=tmp_path / "engine", archive_days=30, rules=[], inboxes=[]
    )

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    run_windows(replace(settings, output=tmp_path / "hourly"), since_ms=NOW_MS - 4 * HOUR_MS, now_ms=NOW_MS,
                session=spark, pause=no_wait)  # fmt: skip

    assert summary.sentence == "Not balanced: 1 phantom.", "it is looked at twice, with its deliveries"
    waiting = {"picky": ("pending", "waiting"), "changed": ("settled", "filtered_out"), "freed": ("pending", "waiting"),
               "sought": ("settled", "filtered_out")}  # fmt: skip
    found = _verdicts(_tables(summary), names)
    assert found == {group: {*rows, ("fresh-urgent", *waiting[group])} for group, rows in WANTED.items()}
    assert _verdicts(_hours(replace(settings, output=tmp_path / "hourly")), names) == WANTED


@pytest.mark.spark
@pytest.mark.parametrize("is_few", [True, False])
def test_what_was_evaluated_once_is_not_read_again(spark: SparkSession, tmp_path: Path, is_few: bool) -> None:
    records = [_record(number, kind) for number, kind in enumerate(("urgent", "plain"))]
    (path,) = write_log(tmp_path / "messages", records, 10)
    evaluation = FilterEvaluation(survey(tmp_path, "messages"))
    groups = [
        GroupFacts(topic=NEWS, consumer_group="picky", filtered=1, filter=URGENT),
        GroupFacts(topic=NEWS, consumer_group="odd", filtered=1, filter="type = "),
    ]
    schema = (
        "topic string, consumer_group string, sequence bigint, stored_ms bigint, deliver_at_ms bigint, wanted bigint"
    )
    asked = [(NEWS, group, place, NOW_MS, 0, -1) for group in ("picky", "odd") for place in (0, 1, 2)]
    deliveries = spark.createDataFrame(asked, schema)

    def answers() -> set[tuple[str, int, int]]:
        rows = evaluation.with_wanted(deliveries, groups, skew_ms=0, is_few=is_few).collect()
        return {(row["consumer_group"], row["sequence"], row["wanted"]) for row in rows}

    first = answers()
    path.unlink()

    assert answers() == first
    assert first == {
        ("picky", 0, 1), ("picky", 1, 0), ("picky", 2, -1), ("odd", 0, -1), ("odd", 1, -1), ("odd", 2, -1),
    }  # fmt: skip


def test_filters_are_evaluated_by_number_and_what_cannot_be_read_has_no_answer() -> None:
    packed = [msgspec.msgpack.encode(one) for one in ({"type": "urgent"}, {"type": "plain"}, {})]
    asked = [(0, packed[0]), (0, packed[1]), (0, packed[2]), (1, packed[0]), (1, packed[1]), (2, packed[0]),
             (0, None), (0, b"\xc1")]  # fmt: skip
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": [NEWS] * len(asked), "consumer_group": ["g"] * len(asked), "sequence": list(range(len(asked))),
            "filter_number": [number for number, _ in asked],
            "headers": pa.array([headers for _, headers in asked], pa.binary()),
        }
    )  # fmt: skip

    (answers,) = evaluate(iter([batch]), texts=(URGENT, f"NOT {URGENT}", "type ="))

    assert answers.column("wanted").to_pylist() == [1, 0, 0, 0, 1, -1, -1, -1]
    assert answers.column("sequence").to_pylist() == list(range(len(asked)))


def test_a_filter_is_in_force_since_the_group_began_or_its_filter_was_changed_or_it_was_sought() -> None:
    events = [
        ("declared", NEWS, "same", 0, 1, 1_000, URGENT), ("declared", NEWS, "same", 0, 2, 2_000, URGENT),
        ("declared", NEWS, "changed", 0, 3, 1_000, URGENT), ("declared", NEWS, "changed", 0, 4, 2_000, PLAIN),
        ("declared", NEWS, "freed", 0, 5, 1_000, URGENT), ("declared", NEWS, "freed", 0, 6, 2_000, None),
        ("declared", NEWS, "sought", 0, 7, 1_000, None), ("declared", NEWS, "sought", 0, 8, 2_000, PLAIN),
        ("sought", NEWS, "sought", 3, 9, 3_000, None),
        ("declared", NEWS, "made again", 0, 10, 1_000, URGENT), ("deleted", NEWS, "made again", None, 11, 2_000, None),
        ("declared", NEWS, "made again", 5, 12, 3_000, PLAIN),
        ("paused", NEWS, "undeclared", None, 13, 1_000, None), ("sought", NEWS, "undeclared", 3, 14, 2_000, None),
        ("paused", NEWS, "declared late", None, 15, 1_000, None),
        ("declared", NEWS, "declared late", 3, 16, 2_000, PLAIN),
        ("declared", NEWS, "old", 3, 17, 2_000, PLAIN),
    ]  # fmt: skip

    found = filters_in_force(events, acting={(NEWS, "old"): 1_500, (NEWS, "silent"): 1_000})

    assert {group: one for (_, group), one in found.items()} == {
        "same": GroupFilter(URGENT, 0), "changed": GroupFilter(PLAIN, 2_000), "freed": GroupFilter("", 2_000),
        "sought": GroupFilter(PLAIN, 0), "made again": GroupFilter(PLAIN, 0), "undeclared": GroupFilter("", -1),
        "declared late": GroupFilter(PLAIN, 2_000), "old": GroupFilter(PLAIN, 2_000), "silent": GroupFilter("", -1),
    }  # fmt: skip


def _work(world: World, folder: Path) -> dict[str, str]:
    """Groups that take some, and stop; the filters of three are changed, and one of these is moved back to the start.

    Returns the names of the messages by their ids.
    """
    clock = ManualClock(BEGAN_MS)
    engine = Engine.open(folder, clock=clock)
    names: dict[str, str] = {}

    def publish(name: str, *, archived: bool = True, deliver_at_ms: int | None = None) -> None:
        now_ms = clock.now_ms()
        id_ = timed_id(name, now_ms)
        names[id_] = name
        if archived:
            world.sent(id_, key=None, topic=NEWS, age_ms=NOW_MS - now_ms, deliver_at_ms=deliver_at_ms)
        message = Message(id=id_, topic=NEWS, headers={"type": name.partition("-")[2]}, body=id_.encode(),
                          created_at_ms=now_ms, deliver_at_ms=deliver_at_ms)  # fmt: skip
        assert [one.status for one in engine.publisher.publish([message])] == ["stored"]

    def take(group: str) -> list[str]:
        deliveries = engine.puller.pull(NEWS, group, max_messages=100)
        assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)
        return [names[one.id] for one in deliveries]

    try:
        for group in GROUPS:
            engine.admin.declare_group(NEWS, group, GroupConfig(filter=URGENT))
        publish("a-urgent")
        publish("b-plain")
        assert take("picky") == ["a-urgent"]
        clock.advance(MINUTE_MS)
        for group, text in {"changed": PLAIN, "freed": None, "sought": PLAIN}.items():
            engine.admin.declare_group(NEWS, group, GroupConfig(filter=text))
        clock.advance(MINUTE_MS)
        engine.admin.seek(NEWS, "sought", to_offset=0)
        publish("c-urgent")
        publish("d-plain")
        publish("smuggled-urgent", archived=False)
        publish("scheduled-urgent", deliver_at_ms=clock.now_ms() + 10 * MINUTE_MS)
        clock.advance(10 * MINUTE_MS)
        assert len(take("reader")) == 6, "what is due is placed"
        clock.advance(NOW_MS - 10 * SECOND_MS - clock.now_ms())
        publish("fresh-urgent")
        take("reader")
    finally:
        engine.close()
    return names


def _record(sequence: int, kind: str) -> LoggedMessage:
    return LoggedMessage(
        sequence=sequence, id=f"m-{sequence}", topic=NEWS, key=None, headers={"type": kind}, body=b"",
        created_at_ms=NOW_MS, stored_at_ms=NOW_MS,
    )  # fmt: skip


def _tables(summary: Summary) -> list[Path]:
    return [Path(summary.folder) / "verdicts"]


def _hours(settings: Settings) -> list[Path]:
    store = WindowStore(settings.output)
    return [path for start in store.windows if (path := store.folder(start) / "verdicts").exists()]


def _verdicts(tables: list[Path], names: dict[str, str]) -> dict[str, set[Verdict]]:
    found: dict[str, set[Verdict]] = {group: set() for group in GROUPS}
    for table in tables:
        for row in pq.read_table(table).to_pylist():
            if row["consumer_group"] in found:
                found[row["consumer_group"]].add((names[row["message_id"]], row["state"], row["rule"]))
    return found
