"""A probe process: requests GET /livez of a broker at a constant rate, and reports response times until stdin ends.

    python -m benchmarks.broker.probe http://127.0.0.1:7788 20

One line of JSON on stdout for each line on stdin: the answers' times in milliseconds since the line before.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from typing import Final
from urllib.parse import urlsplit

from benchmarks.harness.servers import environment

_TIMEOUT_S: Final = 120.0


class Probe:
    """Controls the probe process."""

    def __init__(self, url: str, *, per_second: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.broker.probe", url, str(per_second)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        self.times_ms()

    def times_ms(self) -> list[float]:
        """Returns the response times since the last call; waits for the request in flight."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main() -> None:
    """Ask until stdin ends."""
    url, per_second = sys.argv[1], int(sys.argv[2])
    asker = _Asker(url, per_second=per_second)
    thread = threading.Thread(target=asker.run, daemon=True)
    thread.start()
    for _ in sys.stdin:
        print(json.dumps(asker.taken()), flush=True)


class _Asker:
    def __init__(self, url: str, *, per_second: int) -> None:
        self._place = urlsplit(url)
        self._every_s = 1 / per_second
        self._idle = threading.Lock()
        self._times_ms: list[float] = []

    def taken(self) -> list[float]:
        """The times so far, and no more of them."""
        with self._idle:
            found, self._times_ms = self._times_ms, []
            return found

    def run(self) -> None:
        """Ask, on one connection as long as the server keeps it; a refusal is an answer, and takes its time."""
        pause = threading.Event()
        connection: http.client.HTTPConnection | None = None
        while True:
            with self._idle:
                start = time.perf_counter()
                try:
                    if connection is None:
                        connection = http.client.HTTPConnection(self._place.netloc, timeout=_TIMEOUT_S)
                    connection.request("GET", "/livez")
                    connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    connection = None
                took = time.perf_counter() - start
                self._times_ms.append(round(took * 1000, 2))
            pause.wait(max(0.001, self._every_s - took))


if __name__ == "__main__":
    main()
