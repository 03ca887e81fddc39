"""The process of a contestant: executes rounds by commands, lines of JSON on stdin, and reports their durations.

    python -m benchmarks.contestants.process MODULE --url URL --async-url URL --schema SCHEMA

Each contestant has its own process, so that no hooks and threads slow the others down. Runs in the peers' Python as
well, so it imports the standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

STRIDE = 7_919
"""Workers begin this far apart in the accounts, so that they do not queue for one row's lock."""


class Contestant(Protocol):
    """What a module's `make(url=, async_url=, schema=)` returns."""

    cases: dict[str, Callable[[int], Any]]
    """A business transaction each, a plain function or `async def`, called with a number that no other call gets."""

    def wait(self) -> Any:
        """Until all is sent that will be sent. May be `async def`, as the others below."""

    def close(self) -> Any:
        """Let go of threads and connections."""


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    for name in ("--url", "--async-url", "--schema"):
        parser.add_argument(name, required=True)
    chosen = parser.parse_args()
    with asyncio.Runner() as runner:
        module = importlib.import_module(f"benchmarks.contestants.{chosen.module}")
        contestant = module.make(url=chosen.url, async_url=chosen.async_url, schema=chosen.schema)
        _say({"cases": list(contestant.cases)})
        numbers = 0
        for line in sys.stdin:
            asked = json.loads(line)
            case, workers, count = contestant.cases[asked["case"]], asked["workers"], asked["count"]
            run = _run_async if inspect.iscoroutinefunction(case) else _run_threads
            used = time.process_time()
            seconds = run(runner, case, workers=workers, count=count, first=numbers)
            numbers += count
            # What still has to be sent is this round's, and costs this round's processor time.
            _finish(runner, contestant.wait)
            used = time.process_time() - used
            _say({"seconds": seconds, "cpu_seconds": used})
        _finish(runner, contestant.close)


def _run_threads(
    _runner: asyncio.Runner, case: Callable[[int], None], *, workers: int, count: int, first: int
) -> float:
    failures: list[BaseException] = []

    def work(place: int) -> None:
        try:
            for number in range(count // workers):
                case(first + number + place * STRIDE)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(place,)) for place in range(workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if failures:
        raise failures[0]
    return seconds


def _run_async(
    runner: asyncio.Runner, case: Callable[[int], Awaitable[None]], *, workers: int, count: int, first: int
) -> float:
    async def work(place: int) -> None:
        for number in range(count // workers):
            await case(first + number + place * STRIDE)

    async def all_of_them() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(work(place) for place in range(workers)))
        return time.perf_counter() - started

    return runner.run(all_of_them())


def _finish(runner: asyncio.Runner, function: Callable[[], Any]) -> None:
    if inspect.iscoroutinefunction(function):
        runner.run(function())
    else:
        function()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
