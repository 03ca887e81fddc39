"""Runs Spark jobs concurrently: those of small data leave most of a cluster idle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

JOBS_AT_ONCE_MAX: Final = 3


def in_parallel(*jobs: Callable[[], Any]) -> list[Any]:
    """Run Spark jobs concurrently, each from a thread of its own; returns their results in order."""
    with ThreadPoolExecutor(max_workers=JOBS_AT_ONCE_MAX, thread_name_prefix="reconcile") as pool:
        return [started.result() for started in [pool.submit(job) for job in jobs]]
