"""Measures attacks on the broker by large requests: its memory, and the latency of other clients meanwhile.

    python -m benchmarks.broker.attacks
    python -m benchmarks.broker.attacks --only batch_packed,unread_pulls --rounds 3
    python -m benchmarks.broker.attacks --json > attacks.json

Each attack has a server process of its own, `outbox broker serve` with its defaults, on a new folder. A probe process
requests GET /livez 20 times a second, and records the longest response time; RSS is the server's peak above its memory
before the attack. A batch of 63 MiB and the like is sent as fast as the loopback takes it, so on a machine with few
processors a part of the longest answer is the attackers' own work: `idle` has what the probe sees beside a client that
keeps two processors busy, and sends nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.broker.probe import Probe
from benchmarks.harness import servers
from benchmarks.harness.report import machine, progress, table
from tests.outbox_broker.http.attacks import ATTACKS, MIB, Attack

IDLE: Final = "idle"
IDLE_SECONDS: Final = 3.0
HELD_SECONDS: Final = 1.0
"""Time for which the data of an attack is held, while the probe goes on."""
_PEAK_RESET: Final = "5"


def main() -> None:
    """Measure, and print."""
    chosen = _arguments()
    results: dict[str, list[dict[str, Any]]] = {}
    with progress() as bar:
        task = bar.add_task("attacks", total=chosen.rounds * len(chosen.only))
        for name in chosen.only:
            bar.update(task, description=name)
            for _ in range(chosen.rounds):
                found = _idle(chosen) if name == IDLE else _attacked(ATTACKS[name], chosen)
                results.setdefault(name, []).append(found)
                bar.advance(task)
    worst = {name: _worst(rounds) for name, rounds in results.items()}
    _print(worst)
    if chosen.json:
        options = {"only": chosen.only, "rounds": chosen.rounds, "per_second": chosen.per_second}
        print(json.dumps(
            {
                "benchmark": "broker.attacks", "options": options, "machine": machine(), "results": worst,
                "largest": {name: max(one[name] for one in worst.values()) for name in ("rss_mib", "longest_probe_ms")},
            },
            indent=2,
        ))  # fmt: skip


def _arguments() -> argparse.Namespace:
    names = [IDLE, *ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: _named(parser, text.split(","), names), default=names, metavar="NAMES",
        help=f"some of {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="the worst of so many is told (1)")
    parser.add_argument("--per-second", type=int, default=20, help="how often the probe asks (20)")
    parser.add_argument("--json", action="store_true", help="all figures on stdout; the table goes to stderr as ever")
    return parser.parse_args()


def _named(parser: argparse.ArgumentParser, wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    for one in wanted:
        if one not in names:
            parser.error(f"there is no attack {one!r}; there are {', '.join(names)}")
    return list(wanted)


def _attacked(attack: Attack, chosen: argparse.Namespace) -> dict[str, Any]:
    with servers.broker() as server:
        prepared = attack.prepare(server.url)
        probe = Probe(server.url, per_second=chosen.per_second)
        try:
            before = _begin(server.pid, probe)
            start = time.perf_counter()
            with attack.played(server.url, prepared) as outcome:
                seconds = time.perf_counter() - start
                threading.Event().wait(HELD_SECONDS)
            return {**_end(server.pid, probe, before), "seconds": round(seconds, 1), "statuses": outcome.statuses}
        finally:
            probe.close()


def _idle(chosen: argparse.Namespace) -> dict[str, Any]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    with servers.broker() as server:
        probe = Probe(server.url, per_second=chosen.per_second)
        try:
            before = _begin(server.pid, probe)
            threading.Event().wait(IDLE_SECONDS)
            return {**_end(server.pid, probe, before), "seconds": IDLE_SECONDS, "statuses": {}}
        finally:
            probe.close()
            for one in busy:
                one.kill()
                one.wait()


def _begin(pid: int, probe: Probe) -> int:
    """Reset the server's peak memory; returns its present memory."""
    Path(f"/proc/{pid}/clear_refs").write_text(_PEAK_RESET)
    probe.times_ms()
    return memory(pid, "VmRSS")


def _end(pid: int, probe: Probe, before: int) -> dict[str, Any]:
    times = probe.times_ms()
    return {"rss_mib": (memory(pid, "VmHWM") - before) // MIB, "longest_probe_ms": max(times), "probes": len(times)}


def memory(pid: int, name: str) -> int:
    """Returns a memory figure of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name}: this needs Linux")


def _worst(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: rounds[-1][name] if name == "statuses" else max(one[name] for one in rounds) for name in rounds[0]
    }  # fmt: skip


def _print(worst: dict[str, dict[str, Any]]) -> None:
    rows = [
        [
            name, one["rss_mib"], one["longest_probe_ms"], one["seconds"],
            ", ".join(f"{count} x {status or 'closed'}" for status, count in one["statuses"].items()),
        ]
        for name, one in worst.items()
    ]  # fmt: skip
    table("attacks", ["attack", "RSS above start, MiB", "longest probe, ms", "seconds", "answers"], rows)


if __name__ == "__main__":
    main()
