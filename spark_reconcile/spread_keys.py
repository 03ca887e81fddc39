"""Keys that stand in several windows, and which closed windows are judged again because of them. It judges none.

The verdict on a key is of the hour of its latest row, and says something of the messages under it in its other hours.
So a key that is looked at opens these, but for those that were judged when it looked as it does now.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from spark_reconcile.digests import Legs, union
from spark_reconcile.in_memory import few
from spark_reconcile.parts import among
from spark_reconcile.slots import HOUR_MS, hour
from spark_reconcile.window_store import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS_MAX: Final = 10_000
"""Up to so many such keys are remembered with the windows that are judged together; of more, none is."""
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadKeys:
    """Keys by number: the windows of each, and all that stands under it, in short."""

    windows: Mapping[str, set[int]] = field(default_factory=dict)
    looks: Mapping[str, str] = field(default_factory=dict)

    def within(self, window_ms: int) -> dict[str, str]:
        """How the keys look that stand in a window."""
        return {key: look for key, look in self.looks.items() if window_ms in self.windows[key]}


def spread_keys(legs: Legs, *, covered: Sequence[str]) -> SpreadKeys | None:
    """The keys that stand in several windows; None where they are too many, or the rows are Spark's."""
    found = defaultdict[tuple[str, str], list[tuple[str, Any]]](list)
    for frame in (legs.rows, legs.messages):
        here = few(frame)
        if here is None:
            return None
        names = sorted(here.columns)
        for row in here.where(_keyed(covered)).select(*names).rows():
            facts = dict(zip(names, row, strict=True))
            found[facts["topic"], facts["message_key"]].append((repr(row), facts["created_ms"]))
    placed = {key: {made // HOUR_MS * HOUR_MS for _, made in rows if made is not None} for key, rows in found.items()}
    spread = {key: windows for key, windows in placed.items() if len(windows) > 1}
    if len(spread) > KEYS_MAX:
        return None
    return SpreadKeys(
        windows={_short(repr(key)): windows for key, windows in spread.items()},
        looks={_short(repr(key)): _short(repr(sorted(told for told, _ in found[key]))) for key in spread},
    )


def reopened(
    keys: SpreadKeys, batch: Sequence[int], closed: Collection[int], shown: Mapping[int, Window]
) -> list[int]:  # fmt: skip
    """Of the closed windows those whose verdicts a key may change that stands in the batch, too."""
    asked, found = set(batch), set[int]()
    for key, windows in keys.windows.items():
        if not asked.isdisjoint(windows):
            near = windows.intersection(closed)
            found.update(start for start in near if shown[start].keys.get(key) != keys.looks[key])
    return sorted(found)


def all_beside(legs: Legs, batch: str, *, covered: Sequence[str]) -> set[int]:
    """All windows in which something stands under a key that stands in the batch, too; that as a condition in SQL."""
    placed = [
        frame.where(_keyed(covered)).selectExpr("topic", "message_key", f"{hour('created_ms')} as window_ms")
        for frame in (legs.rows, legs.messages)
    ]
    windows = union(*placed).distinct()
    looked_at = windows.where(batch).select("topic", "message_key")
    found: DataFrame = windows.join(looked_at, ["topic", "message_key"], "left_semi").select("window_ms").distinct()
    return {row["window_ms"] for row in found.collect()}


def _keyed(covered: Sequence[str]) -> str:
    return f"{among('topic', covered)} and coalesce(message_key, '') != ''"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
