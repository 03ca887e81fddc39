"""Measures what an online backup costs: publishing in batches and lateness of scheduled messages, with and without it.

    python -m benchmarks.broker.backup [--rounds 5] [--rate 16MiB] [--quick]

One broker, `outbox broker serve` on a folder, holds `--stored-mib` of messages. In each round it is measured twice, in
rotated order: alone, and while `outbox broker backup` copies all of the folder into a new one at its rate, the default
by default. A backup that ends before the measurement does is followed by the next, so the start of its process counts
as well. Publishing is by batches of 500 messages of 512 bytes, one on its way; lateness is that of delay.lateness at
1,000 messages a second. A ratio is the median of the rounds' ratios, with the backup to without: of a rate the less
the worse, of a lateness the more.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.delay.lateness import measured
from benchmarks.harness import report
from benchmarks.harness.rounds import ratio, rotated, spread
from benchmarks.harness.servers import BrokerProcess, broker, outbox_process
from broker_adapter.http import HttpBroker
from outbox_core import Message

KINDS: Final = ("alone", "backup")
BATCH: Final = 500
BODY: Final = b"x" * 512
STORED_BODY: Final = b"x" * 65_536
STORED_BATCH: Final = 64
START_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.02


class Backups:
    """Backups of one broker, one after the other, each into a new folder, until it is closed."""

    def __init__(self, process: BrokerProcess, target: Path, *, rate: str | None) -> None:
        self._process = process
        self._target = target
        self._options = [] if rate is None else ["--rate", rate]
        self._is_over = threading.Event()
        self.taken = 0
        self._thread = threading.Thread(target=self._take_all, daemon=True)
        self._thread.start()

    def wait_until_copying(self) -> None:
        """Wait until the first one has begun to copy. Raises RuntimeError if it does not."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not any(self._target.glob("*/contents/*")):
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("no backup was begun")
            self._is_over.wait(_POLL_SECONDS)

    def close(self) -> None:
        """End the one that runs."""
        self._is_over.set()
        self._thread.join()

    def _take_all(self) -> None:
        while not self._is_over.is_set():
            to = self._target / str(self.taken)
            command = ["broker", "backup", str(self._process.data), "--to", str(to), "--url", self._process.url]
            with outbox_process([*command, *self._options]) as backup:
                while not self._is_over.is_set() and backup.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        backup.wait(_POLL_SECONDS)
                if backup.poll() not in {None, 0}:
                    return
            self.taken += 1


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    parser.add_argument("--rate", help="of the backup; by default the command's own")
    parser.add_argument("--stored-mib", type=int, default=384, help="what the broker holds before")
    parser.add_argument("--messages", type=int, default=100_000, help="published a round, in batches of 500")
    parser.add_argument("--seconds", type=int, default=8, help="of lateness a round")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.stored_mib, chosen.messages, chosen.seconds = 1, 8, 1_000, 1
    found: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    with broker() as process, contextlib.closing(HttpBroker(process.url)) as client, report.progress() as bar:
        _store(client, chosen.stored_mib)
        task = bar.add_task("rounds", total=chosen.rounds * len(KINDS))
        for number in range(chosen.rounds):
            for kind in rotated(KINDS, number):
                with _beside(kind, process, rate=chosen.rate):
                    for name, value in _measure(client, process, f"{kind}-{number}", chosen).items():
                        found[kind][name].append(value)
                bar.advance(task)
    results = {kind: {name: spread(values) for name, values in of.items()} for kind, of in found.items()}
    to_alone = {name: ratio(values, found["alone"][name]) for name, values in found["backup"].items()}
    rows = [(name, *(results[kind][name]["median"] for kind in KINDS), to_alone[name]) for name in to_alone]
    report.table("a broker on a folder, alone and beside a backup", ("figure", *KINDS, "ratio"), rows)
    report.emit("broker.backup", chosen=chosen, server={}, results={"results": results, "to_alone": to_alone})


def _store(client: HttpBroker, mib: int) -> None:
    for first in range(0, mib * 16, STORED_BATCH):
        client.publish([Message(id=f"s{first + at}", topic="stored", body=STORED_BODY) for at in range(STORED_BATCH)])


@contextlib.contextmanager
def _beside(kind: str, process: BrokerProcess, *, rate: str | None) -> Iterator[None]:
    if kind == "alone":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="outbox-bench-backup-", dir=process.data.parent) as target:
        backups = Backups(process, Path(target), rate=rate)
        try:
            backups.wait_until_copying()
            yield
        finally:
            backups.close()


def _measure(client: HttpBroker, process: BrokerProcess, topic: str, chosen: argparse.Namespace) -> dict[str, float]:
    batches = [
        [Message(id=f"m{first + at}", topic=f"{topic}-batches", body=BODY) for at in range(BATCH)]
        for first in range(0, chosen.messages, BATCH)
    ]
    began = time.perf_counter()
    for batch in batches:
        client.publish(batch)
    rate = chosen.messages / (time.perf_counter() - began)
    with contextlib.closing(HttpBroker(process.url)) as consumer:
        late = measured(client, consumer, per_second=1_000, seconds=chosen.seconds, topic=f"{topic}-late")["late_ms"]
    return {"publish_500": rate, "late_p50_ms": late["p50"], "late_p99_ms": late["p99"]}


if __name__ == "__main__":
    main()
