"""The last step of a run: writes its page, its numbers and its line of the run log, then publishes the run.

Few rows, so they are written without Spark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from outbox_core.runtime.build_info import build
from spark_reconcile.core.settings import Settings
from spark_reconcile.report.page import page_of
from spark_reconcile.results.output_folder import Staging
from spark_reconcile.results.run_figures import verdict_count
from spark_reconcile.results.summary import Summary
from spark_reconcile.rules.verdict_rule import Scope

if TYPE_CHECKING:
    import pyarrow as pa

REPORT: Final = "report.html"
NUMBERS: Final = "run.json"
_FILE: Final = "part-0.parquet"
_COUNTED: Final = ("business_rows", "messages", "message_groups", "findings")
_OF_SUMMARY: Final = ("run_id", "judged_at_ms", *_COUNTED, "balanced", "sentence")
_PASSWORD: Final = re.compile(r"//[^@/]*@")


def publish(summary: Summary, settings: Settings, *, stage: Staging) -> None:
    """Write the report and the numbers of a run, and publish them with the tables that are staged already."""
    (stage.folder / REPORT).write_text(page_of(summary), encoding="utf-8")
    (stage.folder / NUMBERS).write_text(json.dumps(summary.as_dict(), indent=2), encoding="utf-8")
    _write(stage.folder / "run_log", [_logged(summary, settings)], _run_log_schema())
    stage.publish({"balanced": summary.balanced, "sentence": summary.sentence, "judged_at_ms": summary.judged_at_ms})


def write_aggregates(folder: Path, results: Mapping[int, Mapping[str, Any]]) -> None:
    """Write counts of messages and deliveries by hour, from the windows' results, in the columns of a full run."""
    _write(
        folder,
        [row for start, result in sorted(results.items()) for row in _counts(start, result)],
        _aggregates_schema(),
    )


def _counts(hour_ms: int, result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for scope, topic, of, rule, count in result["verdict_counts"]:
        if scope != Scope.BUSINESS:
            state = verdict_count(Scope(scope), topic, of, rule, count=count).state
            yield {
                "scope": str(scope), "topic": topic, "consumer_group": of or None, "state": state.value, "rule": rule,
                "hour_ms": hour_ms, "count": count,
            }  # fmt: skip


def _logged(summary: Summary, settings: Settings) -> dict[str, Any]:
    hours = summary.windows
    return {
        **{name: getattr(summary, name) for name in _OF_SUMMARY},
        "since_ms": hours and hours.since_ms,
        "until_ms": hours and hours.until_ms,
        "hours": hours and hours.windows,
        "hours_judged": hours and hours.judged,
        "version": build().version or None,
        "config_sha256": _hash_of(settings),
        "inputs": [asdict(extent) for extent in summary.inputs],
        "seconds": list(summary.took_seconds.items()),
    }


def _aggregates_schema() -> pa.Schema:
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("scope", "topic", "consumer_group", "state", "rule")]
    return pa.schema([*texts, ("hour_ms", pa.int64()), ("count", pa.int64())])


def _run_log_schema() -> pa.Schema:
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("source", "what")]
    numbers = ("rows", "first_ms", "last_ms", "complete_since_ms", "complete_until_ms")
    source = pa.struct([*texts, *((name, pa.int64()) for name in numbers)])
    return pa.schema(
        [
            ("run_id", pa.string()),
            *((name, pa.int64()) for name in ("judged_at_ms", "since_ms", "until_ms", "hours", "hours_judged")),
            ("version", pa.string()),
            ("config_sha256", pa.string()),
            ("inputs", pa.list_(source)),
            ("seconds", pa.map_(pa.string(), pa.float64())),
            *((name, pa.int64()) for name in _COUNTED),
            ("balanced", pa.bool_()),
            ("sentence", pa.string()),
        ]
    )


def _hash_of(settings: Settings) -> str:
    """Returns a hash of the configuration, without passwords."""
    text = msgspec.json.encode(settings, enc_hook=str, order="sorted").decode()
    return hashlib.sha256(_PASSWORD.sub("//", text).encode()).hexdigest()


def _write(folder: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), folder / _FILE)
