"""A delay cluster in front of the broker: what it holds, the due times of what it passed on, and its settings."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.delay_service.exported_segments import ExportedSegments
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from outbox_core.messages.message import DUE_HEADER
from spark_reconcile.core.settings_file import settings_of
from spark_reconcile.rules.delivery_rules import DELIVERY_RULES
from spark_reconcile.sources.broker_logs import header_rows, message_rows, survey
from spark_reconcile.sources.log_source import LogReader, SegmentPart
from tests.spark_reconcile.world import NOW_MS

TABLES: dict[str, Any] = {"database": {"url": "sqlite:///shop.db"}, "broker": {"data": "broker"}}


def record(name: str, *, headers: dict[str, str], deliver_at_ms: int | None = None) -> bytes:
    return journal.encode_record(
        journal.MessageRecord(
            sequence=0, id=name, topic="t", key=None, headers=headers, body=b"b", created_at_ms=NOW_MS,
            stored_at_ms=NOW_MS, deliver_at_ms=deliver_at_ms,
        )
    )  # fmt: skip


@pytest.mark.parametrize("is_usual", [True, False], ids=["by the column", "one by one"])
def test_the_due_time_of_a_message_that_was_passed_on_when_due_is_in_its_header(tmp_path: Path, is_usual: bool) -> None:
    files = ExportedSegments(tmp_path / "messages", kind=journal.SegmentKind.MESSAGES, created_at_ms=NOW_MS)
    files.append(
        [
            record("passed-on", headers={"h": "v", DUE_HEADER: "123456"}),
            record("plain", headers={"h": "v"}),
            record("own", headers={DUE_HEADER: "123456"}, deliver_at_ms=99),
            record("no-number", headers={DUE_HEADER: "-1"}),
            record("too-long", headers={DUE_HEADER: "9" * 16}),
            *([] if is_usual else [record("unusual", headers={str(number): "v" for number in range(20)})]),
        ]
    )

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
