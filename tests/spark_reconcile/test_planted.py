"""Faults of every kind, planted at known ids among consistent records: exactly these are found, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from messaging.errors import StorageFailed
from spark_reconcile.config import Settings
from spark_reconcile.job import run
from spark_reconcile.summary import Summary
from tests.fixtures.databases import Database
from tests.spark_reconcile.ledger import LEDGER, MAIL, NOW_MS, Story, settled, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
Change = Callable[[Story], Story]

FAULTS: dict[str, tuple[Change, dict[str, str]]] = {
    "lost at the broker": (
        lambda one: replace(one, stored=0, delivered_ms={}, acked=set()),
        {LEDGER: "lost", MAIL: "lost"},
    ),
    "nobody sends it": (
        lambda one: replace(one, outbox="pending", archived=False, stored=0, delivered_ms={}, acked=set()),
        {LEDGER: "unsent", MAIL: "unsent"},
    ),
    "parked": (
        lambda one: replace(one, outbox="parked", archived=False, stored=0, delivered_ms={}, acked=set()),
        {LEDGER: "parked", MAIL: "parked"},
    ),
    "acknowledged to nobody's table": (
        lambda one: replace(one, archived=False),
        {LEDGER: "phantom", MAIL: "phantom"},
    ),
    "no business row": (lambda one: replace(one, paid=False), {LEDGER: "phantom", MAIL: "phantom"}),
    "stored twice": (lambda one: replace(one, stored=2), {LEDGER: "duplicate", MAIL: "duplicate"}),
    "other body": (lambda one: replace(one, stored_body=b"[]"), {LEDGER: "mismatch", MAIL: "mismatch"}),
    "handed out early": (
        lambda one: replace(one, deliver_at_ms=one.delivered_ms[MAIL][0] - 5),
        {LEDGER: "early", MAIL: "settled"},
    ),
    "handed out late": (
        lambda one: replace(one, delivered_ms={**one.delivered_ms, MAIL: [one.at_ms + 120_000]}),
        {LEDGER: "settled", MAIL: "late"},
    ),
    "dead": (lambda one: replace(one, acked={LEDGER}, dead={MAIL}), {LEDGER: "settled", MAIL: "dead"}),
    "acknowledged without its effect": (lambda one: replace(one, handled=False), {LEDGER: "lost", MAIL: "settled"}),
    "canceled": (
        lambda one: replace(one, canceled=True, deliver_at_ms=NOW_MS + 9_999, delivered_ms={}, acked=set()),
        {LEDGER: "canceled", MAIL: "canceled"},
    ),
    "canceled and delivered all the same": (
        lambda one: replace(one, canceled=True),
        {LEDGER: "phantom", MAIL: "phantom"},
    ),
    "scheduled": (
        lambda one: replace(one, deliver_at_ms=NOW_MS + 9_999, delivered_ms={}, acked=set()),
        {LEDGER: "pending", MAIL: "pending"},
    ),
    "too young to be judged": (
        lambda one: replace(
            one, at_ms=NOW_MS - 1_000, outbox="pending", archived=False, stored=0, delivered_ms={}, acked=set()
        ),
        {LEDGER: "pending", MAIL: "pending"},
    ),
    "in flight": (
        lambda one: replace(
            one,
            at_ms=NOW_MS - 9_000,
            delivered_ms={LEDGER: [NOW_MS - 10], MAIL: [NOW_MS - 9]},
            acked=set(),
            handled=False,
        ),
        {LEDGER: "pending", MAIL: "pending"},
    ),
    "delivered again, turned away by the inbox": (
        lambda one: replace(one, delivered_ms={**one.delivered_ms, LEDGER: [one.at_ms + 20, one.at_ms + 31_000]}),
        {LEDGER: "settled", MAIL: "settled"},
    ),
    "in the outbox still, although the broker has it": (
        lambda one: replace(one, outbox="pending", archived=False),
        {LEDGER: "settled", MAIL: "settled"},
    ),
}
NEVER_ENQUEUED = 900


def test_exactly_the_planted_faults_are_found(spark: SparkSession, tmp_path: Path) -> None:
    stories, expected = _planted(consistent=200)
    never = replace(settled(NEVER_ENQUEUED), archived=False, stored=0, delivered_ms={}, acked=set())
    settings = write([*stories, never], folder=tmp_path, url=f"sqlite:///{tmp_path / 'b.db'}", schema=None)

    summary = run(settings, session=spark)

    assert _verdicts(spark, summary) == expected
    business = _read(spark, summary, "business_verdicts")
    assert {row["key"]: row["verdict"] for row in business if row["verdict"] != "settled"} == {
        str(NEVER_ENQUEUED): "lost"
    }
    assert summary.unexplained == 0
    assert summary.deduplicated == 1
    assert not summary.balanced
    assert json.loads((Path(summary.folder) / "run.json").read_text())["unexplained"] == 0


def test_tables_on_a_real_server_are_judged_the_same(spark: SparkSession, tmp_path: Path, mysql_like: Database) -> None:
    stories, expected = _planted(consistent=20)
    settings = write(stories, folder=tmp_path, url=mysql_like.url, schema=mysql_like.schema)

    summary = run(settings, session=spark)

    assert _verdicts(spark, summary) == expected


def test_consistent_records_balance_and_a_second_run_says_the_same(spark: SparkSession, tmp_path: Path) -> None:
    settings = _write_consistent(tmp_path, count=50)

    first = run(settings, session=spark)
    second = run(settings, session=spark)

    assert first.balanced
    assert first.sentence.startswith("Balanced")
    assert _verdicts(spark, first) == _verdicts(spark, second)
    assert json.loads((tmp_path / "results" / "manifest.json").read_text())["newest"] == second.run_id
    assert not list((tmp_path / "results").glob(".staging*"))


def test_a_torn_tail_of_a_running_broker_is_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    settings = _write_consistent(tmp_path, count=10)
    with next((tmp_path / "broker" / "actions").glob("*.log")).open("ab") as segment:
        segment.write(b"\x40\x00\x00\x00half a frame")

    summary = run(settings, session=spark)

    assert summary.balanced


def test_a_flipped_bit_is_named_and_nothing_is_judged(spark: SparkSession, tmp_path: Path) -> None:
    settings = _write_consistent(tmp_path, count=10)
    segment = next((tmp_path / "broker" / "messages").glob("*.log"))
    data = bytearray(segment.read_bytes())
    data[200] ^= 0x10
    segment.write_bytes(data)

    with pytest.raises(StorageFailed, match=segment.name):
        run(settings, session=spark)

    assert not (tmp_path / "results" / "manifest.json").exists()
    assert not list((tmp_path / "results").glob("*"))


def test_the_report_is_one_safe_page(spark: SparkSession, tmp_path: Path) -> None:
    story = replace(settled(1), id="m:1", stored=0, delivered_ms={}, acked=set())
    settings = write([story, settled(2)], folder=tmp_path, url=f"sqlite:///{tmp_path / 'b.db'}", schema=None)

    summary = run(settings, session=spark)
    page = (Path(summary.folder) / "report.html").read_text()

    assert len(page) < 300_000
    assert "<script" not in page
    assert "Not balanced: 2 lost" in page
    assert "m:1" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def _planted(*, consistent: int) -> tuple[list[Story], dict[tuple[str, str], str]]:
    stories = [settled(number) for number in range(consistent)]
    expected = {(one.id, group): "settled" for one in stories for group in (LEDGER, MAIL)}
    for number, (change, verdicts) in enumerate(FAULTS.values(), start=consistent):
        story = change(settled(number))
        stories.append(story)
        expected.update({(story.id, group): verdict for group, verdict in verdicts.items()})
    return stories, expected


def _write_consistent(folder: Path, *, count: int) -> Settings:
    stories = [settled(number) for number in range(count)]
    return write(stories, folder=folder, url=f"sqlite:///{folder / 'b.db'}", schema=None)


def _verdicts(spark: SparkSession, summary: Summary) -> dict[tuple[str, str], str]:
    return {(row["id"], row["group"]): row["verdict"] for row in _read(spark, summary, "verdicts")}


def _read(spark: SparkSession, summary: Summary, name: str) -> list[Any]:
    return spark.read.parquet(str(Path(summary.folder) / name)).collect()
