"""Publishes at a constant rate, and summarizes results. Standard library only: the peers' interpreter imports it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

BATCH: Final = 10
_SHARES: Final = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def paced(publish: Callable[[int, int], None], *, total: int, per_second: int) -> None:
    """Call publish(first, count) for batch after batch, so many messages a second; a late one is made up for."""
    pause, started = threading.Event(), time.perf_counter()
    for first in range(0, total, BATCH):
        publish(first, min(BATCH, total - first))
        pause.wait(max(0.0, started + first / per_second - time.perf_counter()))


def figures(late_ms: list[float]) -> dict[str, Any]:
    """Quantiles of lateness; a negative minimum would be an early message."""
    found = sorted(late_ms)
    shares = {name: round(found[min(len(found) - 1, int(share * len(found)))], 2) for name, share in _SHARES.items()}
    return {"messages": len(found), "late_ms": {**shares, "max": round(found[-1], 2), "min": round(found[0], 2)}}
