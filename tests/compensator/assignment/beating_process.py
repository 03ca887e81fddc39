"""An instance in a process of its own, to be killed. Run as a module; not imported.

Arguments: `URL SCHEMA SOURCES BEAT_MS LEASE_MS`. Prints what it holds after each beat, as JSON, and
leaves in order at SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from compensator.assignment import LeaseOptions, open_assignment
from outbox_core.assignment.even_assignment import Resource


def main() -> None:
    """Beat until told to stop."""
    url, schema, sources, beat_ms, lease_ms = sys.argv[1:6]
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    options = LeaseOptions(beat_ms=int(beat_ms), lease_ms=int(lease_ms))
    assignment = open_assignment(url, schema=schema or None, options=options)
    known = [Resource(name) for name in sources.split(",")]
    while True:
        print(json.dumps(sorted(assignment.beat(known))), flush=True)
        if told.wait(options.beat_ms / 1000):
            break
    assignment.leave()


main()
