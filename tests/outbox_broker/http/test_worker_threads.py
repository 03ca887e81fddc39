"""Work in threads: its result, its error, and that nothing it had stays behind either."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_broker.http.worker_threads import in_thread
from tests.outbox_broker.polling import until


class Batch:
    """Something large that a request has."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def test_a_result_is_given_back_and_an_error_is_raised(pool: ThreadPoolExecutor) -> None:
    def fail() -> int:
        raise ValueError("no")

    assert asyncio.run(in_thread(pool, lambda: 7)) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(pool, fail))


def test_what_failed_work_had_is_let_go_of_with_its_error_without_a_look_for_garbage(pool: ThreadPoolExecutor) -> None:
    held: list[weakref.ref[Batch]] = []

    def fail() -> int:
        batch = Batch()
        held.append(weakref.ref(batch))
        raise ValueError("no")

    async def ask() -> None:
        try:
            await in_thread(pool, fail)
        except ValueError:
            return

    gc.disable()
    try:
        asyncio.run(ask())
        until(lambda: held[0]() is None)  # the thread may still be on its way out of the work
    finally:
        gc.enable()
