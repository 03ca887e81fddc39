"""The client process of a contestant: executes commands, lines of JSON on stdin, and reports their durations.

    python -m benchmarks.broker.client MODULE ADDRESS

Runs in the peers' Python as well, so it imports the standard library only.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

from benchmarks.broker.contestants.shape import Contestant


def main() -> None:
    """Serve until stdin ends."""
    module, address = sys.argv[1:]
    contestant: Contestant = importlib.import_module(f"benchmarks.broker.contestants.{module}").make(address)
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        used, started = time.process_time(), time.perf_counter()
        found = _do(contestant, asked.pop("do"), asked)
        seconds = time.perf_counter() - started
        _say({"seconds": seconds, "cpu_seconds": time.process_time() - used, "found": found})
    contestant.close()


def _do(contestant: Contestant, what: str, arguments: dict[str, Any]) -> Any:
    if what == "receive":
        return contestant.receive(**arguments, on_waiting=lambda: _say({"waiting": True}))
    return getattr(contestant, what)(**arguments)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
