"""Compares a run's verdicts with the planted ones: each at its id or key, by its rule, and no others. No Spark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.reconcile.records import HOUR_MS
from spark_reconcile.classify.classification import RULES
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.results.window_totals import BULK_RULES

Verdict = tuple[str, str, str, str]
"""(scope, message id or business key, group or business rule, rule)"""
PLAIN: Final = frozenset(BULK_RULES.values())
"""Rules by which all is well."""
_TABLES: Final = ("verdicts", "business_verdicts")


def planted_in(folder: Path) -> dict[str, Any]:
    """What was planted in the records of a folder."""
    found: dict[str, Any] = json.loads((folder / "planted.json").read_text())
    return found


def also_changed(planted: dict[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Note that these messages, for which all was well, were stored with another body."""
    for row in rows:
        planted["ids"].append(row["id"])
        planted["kinds"]["changed"] = planted["kinds"].get("changed", 0) + 1
        at_ms = row["created_ms"]
        planted["expected"].append(["message", row["id"], "", "body_differs", at_ms])
        planted["expected"].append(["business", row["message_key"], row["topic"], "message_mismatch", at_ms])


def check(planted: dict[str, Any], found: Counter[Verdict], *, before_ms: int | None = None) -> int:
    """How many verdicts were planted, of messages made `before_ms`. Exits where any is missing, wrong or too many."""
    wanted = wanted_of(planted, before_ms=before_ms)
    if found != wanted:
        raise SystemExit(
            f"wrong verdicts: {sorted((found - wanted).items())[:5]} too many, "
            f"{sorted((wanted - found).items())[:5]} missing"
        )
    return wanted.total()


def wanted_of(planted: dict[str, Any], *, before_ms: int | None = None) -> Counter[Verdict]:
    """The verdicts that were planted, of messages made `before_ms`: rows without a key are one a rule and hour."""
    expected = {
        (*one[:4], 0 if one[1] else one[4] // HOUR_MS)
        for one in planted["expected"]
        if before_ms is None or one[4] < before_ms
    }
    return Counter(one[:4] for one in expected)


def found_in_windows(output: Path) -> Counter[Verdict]:
    """Every verdict that is not plainly settled, of the hours in an output folder."""
    store = WindowStore(output)
    return _found(store.folder(start) for start in store.windows)


def found_in_run(folder: Path) -> Counter[Verdict]:
    """The same of a whole run's folder."""
    return _found([folder])


def rules_planted(planted: dict[str, Any]) -> dict[tuple[str, str], int]:
    """How often each rule is expected, by scope and name; 0 of those that no record here can meet."""
    counts = Counter((scope, rule) for scope, _, _, rule, _ in planted["expected"])
    return {(scope, rule.name): counts[scope, rule.name] for scope, rules in RULES.items() for rule in rules}


def _found(folders: Iterable[Path]) -> Counter[Verdict]:
    found: Counter[Verdict] = Counter()
    for folder in folders:
        for name in _TABLES:
            if (folder / name).exists():
                found.update(_verdict(row) for row in _unsettled(folder / name))
    return found


def _unsettled(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder, filters=[("rule", "not in", sorted(PLAIN))]).to_pylist()
    return rows


def _verdict(row: dict[str, Any]) -> Verdict:
    if "business_rule" in row:
        return "business", row["message_key"] or "", row["business_rule"], row["rule"]
    return row["scope"], row["message_id"], row["consumer_group"] or "", row["rule"]
