"""The output folder of a reconciliation of a given format is read, and reports of it say what the run said."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from outbox_core.common.clock import ManualClock
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable
from spark_reconcile.results.source_history import read_totals
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.runs.stored_run import stored_hours, stored_run, write_anew
from tests.golden.make_results import ARCHIVE, SINCE_MS, SUMMARY, said
from tests.spark_reconcile.world import HOUR_MS, NOW_MS

SAID: dict[str, Any] = json.loads(SUMMARY.read_text())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The folder as it was written once."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have no filters
        archive.extractall(tmp_path)
    return tmp_path / "results"


def test_the_run_is_read_as_it_was(output: Path, tmp_path: Path) -> None:
    found = stored_run(output)

    assert said(found.as_dict()) == SAID
    assert SAID["sentence"] in write_anew(found, tmp_path / "anew").read_text()


def test_its_hours_add_up_to_the_run(output: Path) -> None:
    found = said(stored_hours(output, since_ms=SINCE_MS, until_ms=NOW_MS).as_dict())

    same = (
        "messages",
        "business_rows",
        "message_groups",
        "verdict_counts",
        "verdicts",
        "business_verdicts",
        "latencies",
    )
    assert {name: found[name] for name in same} == {name: SAID[name] for name in same}


def test_every_finding_is_in_the_tables_of_its_hour(output: Path) -> None:
    store = WindowStore(output)
    tables = [
        pq.read_table(path).to_pylist() for start in store.windows for path in store.folder(start).rglob("*.parquet")
    ]

    rows = [row for table in tables for row in table if row["severity"] == "finding"]
    verdict_counts = [one for one in SAID["verdict_counts"] if one["severity"] == "finding"]
    assert Counter((row["state"], row["rule"]) for row in rows) == sum(
        (Counter({(one["state"], one["rule"]): one["count"]}) for one in verdict_counts), Counter()
    )
    assert len(rows) > SAID["findings"] > 30


def test_what_the_sources_had_and_since_when_evidence_is_needed_is_known(output: Path) -> None:
    totals = read_totals(output)
    known = EvidenceRetention(output / "judged.json", clock=ManualClock(NOW_MS))

    assert len(totals.sources) >= 4
    assert all(one.noted_at_ms == NOW_MS for one in totals.sources.values())
    assert [known.age_ms(one, keep_ms=HOUR_MS) for one in Purgeable] == [HOUR_MS * 3 // 2 + 1] * 3
