"""Runs programs of consumers by seed: python -m tests.outbox.consumer_model WORLD FIRST COUNT.

The world is `in-process` or `processes`. Each seed that fails is named with what does not hold, and the rest are run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.fixtures.local_server import Durability
from tests.fixtures.servers import local_server
from tests.outbox.consumer_model import in_process, processes
from tests.outbox.consumer_model.handlers import SERVER_OPTIONS


def main(world: str, first: int, count: int) -> int:
    """Run `count` seeds from `first` on; returns 1 if one failed."""
    failed: list[int] = []
    counted: Counter[str] = Counter()
    began = time.monotonic()
    logging.getLogger("outbox").setLevel(logging.CRITICAL + 1)
    with ExitStack() as closing:
        if world == "processes":
            server = closing.enter_context(local_server("mariadb", Durability.FULL, *SERVER_OPTIONS))
        for seed in range(first, first + count):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    if world == "processes":
                        calls = processes.run(seed, Path(folder), server)
                    else:
                        calls = in_process.run(seed, Path(folder))
                    counted.update({what: counts.total() for what, counts in calls.counted.items()})
                except Exception:
                    failed.append(seed)
                    print(f"seed {seed} failed:\n{traceback.format_exc()}", flush=True)
                    if world == "processes":
                        server.start()
            print(f"seed {seed}: {time.monotonic() - began:.0f} s, {dict(counted)}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    seeds = f"{world}, seeds {first} to {first + count - 1}"
    print(f"{seeds}: {len(failed)} failed {failed}, {dict(counted)}, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
