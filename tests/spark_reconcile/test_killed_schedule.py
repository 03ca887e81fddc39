"""What a real broker wrote that was killed between the steps of scheduling and firing: nothing in it is amiss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from outbox_core.journal.block import FrameKind
from spark_reconcile import Settings, run
from tests.fixtures.databases import Database
from tests.outbox_broker.message_log import messages_of
from tests.spark_reconcile import killed_schedule
from tests.spark_reconcile.world import NOW_MS, REMINDER, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
HOUR_S = 3_600.0  # no lateness of a broker that is killed again and again is a finding here


@pytest.mark.spark
def test_a_message_whose_arrival_a_power_cut_took_is_settled_or_waits_for_its_time(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    written = _published(sqlite, tmp_path)
    grace = replace(written.grace, late_after_seconds=HOUR_S)
    settings = replace(written, broker_data=tmp_path / "broker", grace=grace)
    records = _records(tmp_path / "broker")
    noteless = {one for one, copies in records.items() if copies == [FrameKind.DISPATCHED]}
    missing = {row["id"] for row in _told(tmp_path)} - set(records)

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert noteless
    assert missing
    found = {row["message_id"]: row["rule"] for row in _rows(Path(summary.folder)) if row["scope"] == "message"}
    assert summary.sentence.startswith("Balanced")
    assert Counter(found[one] for one in noteless) == {"stored": len(noteless)}
    assert Counter(found[one] for one in missing) == {"schedule_not_in_log": len(missing)}
    assert set(found.values()) == {"stored", "schedule_not_in_log"}
    deliveries = [row["rule"] for row in _rows(Path(summary.folder)) if row["message_id"] in noteless]
    assert set(deliveries) == {"stored", "done"}


def _published(database: Database, folder: Path) -> Settings:
    """The broker's folder, and the tables that its producer has by then."""
    subprocess.run([sys.executable, "-m", killed_schedule.__name__, str(folder)], check=True, cwd=ROOT, timeout=600)
    world = World()
    for told in _told(folder):
        due_ms = killed_schedule.due_ms(told["id"])
        order = killed_schedule.key(told["id"])
        paid_at_us = (due_ms - killed_schedule.SOON_MS) * 1000
        world.orders.append(
            {"id": order, "status": "BOOKED", "paid_at_us": paid_at_us, "remind_at_us": due_ms * 1000}
        )  # fmt: skip
        world.sent(
            told["id"], key=str(order), age_ms=NOW_MS - told["sent_ms"], topic=REMINDER, deliver_at_ms=due_ms,
            outcome=told["outcome"],
        )  # fmt: skip
    return replace(world.write(database, folder / "unused"), inboxes=[])


def _told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def _records(data: Path) -> dict[str, list[int]]:
    """The kinds of the frames that the message log has of each message."""
    found: dict[str, list[int]] = {}
    for stored in messages_of(data):
        found.setdefault(stored.record.id, []).append(stored.kind)
    return found


def _rows(folder: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(folder / "verdicts").to_pylist()
    return rows
