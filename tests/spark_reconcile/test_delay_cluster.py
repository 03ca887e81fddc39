"""A delay cluster in front of the broker: what it holds, the due times of what it passed on, and its settings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox_broker.delay_service.cluster_export import ClusterExport, ExportOptions
from outbox_broker.delay_service.target_publisher import timed
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.segments.ledger_view import LedgerView
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.message import DUE_HEADER
from spark_reconcile.core.settings import LedgerSource
from spark_reconcile.core.settings_file import settings_of
from spark_reconcile.load.delay_records import DelayExport, read_delay
from spark_reconcile.rules.delivery_rules import DELIVERY_RULES
from spark_reconcile.sources.broker_logs import header_rows, message_rows, survey
from spark_reconcile.sources.log_source import LogReader, SegmentPart
from tests.outbox_broker.segments.ledger_cluster import SHARD, LedgerCluster
from tests.spark_reconcile.message_log import LoggedMessage
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, write_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES: dict[str, Any] = {"database": {"url": "sqlite:///shop.db"}, "broker": {"data": "broker"}}


def record(name: str, *, headers: dict[str, str], deliver_at_ms: int | None = None) -> LoggedMessage:
    return LoggedMessage(
        sequence=0, id=name, topic="t", key=None, headers=headers, body=b"b", created_at_ms=NOW_MS, stored_at_ms=NOW_MS,
        deliver_at_ms=deliver_at_ms,
    )  # fmt: skip


@pytest.mark.parametrize("is_usual", [True, False], ids=["by the column", "one by one"])
def test_the_due_time_of_a_message_that_was_passed_on_when_due_is_in_its_header(tmp_path: Path, is_usual: bool) -> None:
    records = [
        record("passed-on", headers={"h": "v", DUE_HEADER: "123456"}),
        record("plain", headers={"h": "v"}),
        record("own", headers={DUE_HEADER: "123456"}, deliver_at_ms=99),
        record("no-number", headers={DUE_HEADER: "-1"}),
        record("too-long", headers={DUE_HEADER: "9" * 16}),
        *([] if is_usual else [record("unusual", headers={str(number): "v" for number in range(20)})]),
    ]
    write_log(tmp_path / "messages", records, len(records))

    names = ["id", "deliver_at_ms", "body_sha256", "damage"]
    for rows_of in (message_rows, header_rows):
        reader = LogReader(survey(tmp_path, "messages"), rows_of=rows_of, columns=names)
        rows = [row for batch in reader.read(SegmentPart(0)) for row in batch.to_pylist()]

        assert {row["id"]: row["deliver_at_ms"] for row in rows} == {
            "passed-on": 123456, "plain": None, "own": 99, "no-number": None, "too-long": None,
            **({} if is_usual else {"unusual": None}),
        }  # fmt: skip
        assert {row["body_sha256"] for row in rows} == {hashlib.sha256(b"b").hexdigest()}
        assert {row["damage"] for row in rows} == {None}


def test_a_message_that_the_cluster_holds_though_it_was_for_now_is_late_and_not_lost() -> None:
    names = [rule.name for rule in DELIVERY_RULES]
    [held] = [rule for rule in DELIVERY_RULES if rule.name == "held_by_delay_cluster"]

    assert names.index(held.name) < names.index("placing_in_grace") < names.index("never_placed")
    assert (str(held.state), str(held.severity)) == ("late", "attention")


def test_the_cluster_is_named_in_the_file_and_another_store_is_refused(tmp_path: Path) -> None:
    named = settings_of(
        {**TABLES, "delay": {"store": "bookkeeper://zk1,zk2/outbox/delay", "config": "cluster.toml"}}, folder=tmp_path
    )

    assert named.delay is not None
    assert (named.delay.store, named.delay.config) == ("bookkeeper://zk1,zk2/outbox/delay", tmp_path / "cluster.toml")
    assert settings_of(TABLES).delay is None
    with pytest.raises(ConfigurationError, match="bookkeeper://zk1,zk2,zk3/outbox/delay") as refused:
        settings_of({**TABLES, "delay": {"store": "/var/lib/delay"}})
    assert "what waits in it is not_in_broker until it is due" in str(refused.value)


@pytest.mark.spark
@pytest.mark.parametrize("stopped", [[], ["one", "two"]], ids=["no cancel", "cancels"])
def test_an_export_is_read_with_cancels_and_without(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: list[str]
) -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open(), options=DelayOptions())
    waiting = Message(id="m", topic="t", body=b"b", created_at_ms=NOW_MS, deliver_at_ms=NOW_MS + HOUR_MS)
    owner.schedule([timed(waiting, NOW_MS)], now_ms=NOW_MS)
    owner.cancel(stopped, now_ms=NOW_MS)
    cluster.ledgers.say_confirmed()

    def exported(_: LedgerSource, folder: Path, *, seconds_max: int) -> DelayExport:
        assert seconds_max
        folder.parent.mkdir(parents=True, exist_ok=True)
        options = ExportOptions(cancels_max=9)
        export = ClusterExport(
            shards=[SHARD], views=Views(cluster), clock=ManualClock(NOW_MS), options=options
        )  # fmt: skip
        report = export.write(folder)
        return DelayExport(
            begun_ms=report.begun_ms, messages=report.messages, cancels=report.cancels,
            cancels_since_ms=report.cancels_since_ms,
        )  # fmt: skip

    monkeypatch.setattr("spark_reconcile.load.delay_records.export_delay", exported)
    source = LedgerSource(store="bookkeeper://zk/outbox/delay")

    delayed = read_delay(spark, settings_of(TABLES, folder=tmp_path), source)

    assert [row["id"] for row in delayed.messages.collect()] == ["m"]
    assert sorted(row["id"] for row in delayed.actions.collect() if row["kind"] == "canceled") == sorted(stopped)
    assert delayed.rows == 1 + len(stopped)


class Views:
    """Views of a cluster's shards."""

    def __init__(self, cluster: LedgerCluster) -> None:
        self._cluster = cluster

    def view(self, shard: str) -> LedgerView:
        return LedgerView.open(self._cluster.shard(shard))
