"""Measures messages scheduled over two years: write rate vs. a plain publish, memory, restart, segments, disk bytes.

    python -m benchmarks.delay.two_years [--messages 1000000] [--batch 500] [--body-bytes 512]

All of it is an embedded broker's: the last turns of a tenth alternate with plain publishes to a second one, with the
same bodies and batches, so that both meet the same machine. CPU rates are messages a second of processor time, which a
busy disk does not touch. The restart is of a fresh process. HTTP: two turns of each, to two `outbox broker serve`, one
request in flight, by one process. JSON on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.broker import servers
from benchmarks.harness.report import machine
from broker_adapter.http import HttpBroker
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.publisher import Publisher
from outbox_core import Broker, Message
from outbox_core.messages.limits import DELAY_MAX_MS

AHEAD_MS_MIN = 3_600_000
"""None falls due while it is measured."""
TURNS = 10


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--body-bytes", type=int, default=512)
    parser.add_argument("--phase", choices=("write", "restart", "http"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.phase == "write":
        print(json.dumps(_write(chosen)))
    elif chosen.phase == "restart":
        print(json.dumps(_restart(chosen.folder)))
    elif chosen.phase == "http":
        print(json.dumps(_http(chosen)))
    else:
        _all(chosen)


def _all(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {phase: _in_process(phase, chosen, folder) for phase in ("write", "restart", "http")}
    print(json.dumps({"benchmark": "delay.two_years", "machine": machine(), **results}, indent=2))


def _in_process(phase: str, chosen: argparse.Namespace, folder: Path) -> object:
    """Each phase has a process of its own, so that memory is its own too."""
    options = ["--messages", chosen.messages, "--batch", chosen.batch, "--body-bytes", chosen.body_bytes]
    command = [sys.executable, "-m", "benchmarks.delay.two_years", "--phase", phase, "--folder", folder, *options]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _write(chosen: argparse.Namespace) -> dict[str, object]:
    """Turns of scheduling and of plain publishing; memory is read before the first plain turn."""
    broker = Engine.open(chosen.folder / "scheduled")
    broker.publisher.publish([Message(id="first", topic="trips", body=b"x")])
    scheduled, share = _scheduling(broker.publisher, chosen), _share(chosen)
    made = [_timed(scheduled, range(turn * share, (turn + 1) * share, chosen.batch)) for turn in range(TURNS - 2)]
    memory = _memory()
    plain_broker = Engine.open(chosen.folder / "plain")
    published = _publishing(plain_broker.publisher, chosen)
    plain = []
    for turn in (TURNS - 2, TURNS - 1):
        turns = range(turn * share, (turn + 1) * share, chosen.batch)
        plain.append(_timed(published, turns))
        made.append(_timed(scheduled, turns))
    figures = broker.log_figures()
    broker.close()
    plain_broker.close()
    size, plain_size = _size(chosen.folder / "scheduled"), _size(chosen.folder / "plain")
    return {
        "messages": share * TURNS,
        "scheduled_per_s": _rate(made, share, 0), "scheduled_per_cpu_s": _rate(made, share, 1),
        "beside_plain_per_s": _rate(made[-2:], share, 0), "beside_plain_per_cpu_s": _rate(made[-2:], share, 1),
        "plain_per_s": _rate(plain, share, 0), "plain_per_cpu_s": _rate(plain, share, 1),
        "share": round(_rate(made[-2:], share, 0) / _rate(plain, share, 0), 2),
        "memory_mib": memory, "figures": figures,
        "segments": len(list((chosen.folder / "scheduled" / "schedule").glob("l[01]*.segment"))),
        "bytes_per_message": round(size / share / TURNS), "bytes_per_message_plain": round(plain_size / share / 2),
    }  # fmt: skip


def _http(chosen: argparse.Namespace) -> dict[str, object]:
    """Two turns of each over HTTP, to a server each."""
    share = _share(chosen)
    made, plain = [], []
    with (
        servers.outbox_http() as first, servers.outbox_http() as second,
        contextlib.closing(HttpBroker(first.address)) as broker,
        contextlib.closing(HttpBroker(second.address)) as plain_broker,
    ):  # fmt: skip
        broker.publish([Message(id="first", topic="trips", body=b"x")])
        scheduled, published = _scheduling(broker, chosen), _publishing(plain_broker, chosen)
        for turn in range(2):
            turns = range(turn * share, (turn + 1) * share, chosen.batch)
            plain.append(_timed(published, turns))
            made.append(_timed(scheduled, turns))
    return {
        "messages": 2 * share, "scheduled_per_s": _rate(made, share, 0), "plain_per_s": _rate(plain, share, 0),
        "share": round(_rate(made, share, 0) / _rate(plain, share, 0), 2),
    }  # fmt: skip


def _scheduling(broker: Publisher | Broker, chosen: argparse.Namespace) -> Callable[[int], None]:
    """A batch for later, from a number on."""
    random, body = Random(1), b"x" * chosen.body_bytes

    def scheduled(first: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        broker.publish(
            [
                Message(
                    id=f"0197f3e2-{first + at:027d}", topic="trips", body=body,
                    deliver_at_ms=now_ms + AHEAD_MS_MIN + random.randrange(DELAY_MAX_MS - AHEAD_MS_MIN),
                )
                for at in range(chosen.batch)
            ]
        )  # fmt: skip

    return scheduled


def _publishing(broker: Publisher | Broker, chosen: argparse.Namespace) -> Callable[[int], None]:
    """A batch for now, which is as much work to make."""
    random, body = Random(1), b"x" * chosen.body_bytes

    def published(first: int) -> None:
        ahead_ms = [random.randrange(DELAY_MAX_MS) for _ in range(chosen.batch)]
        broker.publish(
            [
                Message(id=f"0197f3e2-{first + at + ms * 0:027d}", topic="trips", body=body)
                for at, ms in enumerate(ahead_ms)
            ]
        )

    return published


def _share(chosen: argparse.Namespace) -> int:
    """The messages of a turn, in whole batches."""
    return int(chosen.messages // TURNS // chosen.batch * chosen.batch)


def _restart(folder: Path) -> dict[str, object]:
    before = _memory()
    started = time.perf_counter()
    broker = Engine.open(folder / "scheduled")
    seconds = time.perf_counter() - started
    count = broker.admin.topic_figures("trips")["scheduled"]
    started = time.perf_counter()
    ids = [f"0197f3e2-{at:027d}" for at in range(0, count, max(1, count // 1_000))]
    found = sum(broker.publisher.scheduled_message(one) is not None for one in ids)
    look_up_ms = (time.perf_counter() - started) * 1000 / len(ids)
    started = time.perf_counter()
    days = broker.publisher.scheduled(bucket="day")
    result = {
        "restart_s": round(seconds, 3), "scheduled": count, "memory_mib_before": before, "memory_mib": _memory(),
        "looked_up": len(ids), "found": found, "look_up_ms": round(look_up_ms, 3),
        "days_counted": len(days), "counted": sum(number for _, number in days),
        "count_s": round(time.perf_counter() - started, 3),
    }  # fmt: skip
    broker.close()
    return result


def _timed(work: Callable[[int], None], turns: range) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for first in turns:
        work(first)
    return time.perf_counter() - wall, time.process_time() - cpu


def _rate(timed: list[tuple[float, float]], share: int, which: int) -> int:
    return round(share * len(timed) / sum(one[which] for one in timed))


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": int(found["VmRSS"]) // 1024, "highest": int(found["VmHWM"]) // 1024}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
