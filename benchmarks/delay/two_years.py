"""Many messages scheduled over two years: write rate beside a plain publish, memory, restart, segments, disk bytes.

    python -m benchmarks.delay.two_years [--messages 1000000] [--batch 500] [--body-bytes 512]

The plain publish is the embedded engine's, with the same bodies and batches, in turns of a tenth with the schedule, so
that both meet the same machine. CPU rates are messages a second of processor time, which a busy disk does not touch.
The restart is of a fresh process. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.harness.report import machine
from broker.delay.local_segments import LocalSegmentStore
from broker.delay.store import DelayStore, Timed
from broker.engine import Engine
from messaging import Message
from messaging.limits import DELAY_MAX_MS

NOW_MS = 1_800_000_000_000
TURNS = 10


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--body-bytes", type=int, default=512)
    parser.add_argument("--phase", choices=("write", "plain", "restart"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.phase == "write":
        print(json.dumps(_write(chosen)))
    elif chosen.phase == "restart":
        print(json.dumps(_restart(chosen.folder)))
    else:
        _all(chosen)


def _all(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {"write": _in_process("write", chosen, folder), "restart": _in_process("restart", chosen, folder)}
    print(json.dumps({"benchmark": "delay.two_years", "machine": machine(), **results}, indent=2))


def _in_process(phase: str, chosen: argparse.Namespace, folder: Path) -> object:
    """Each phase has a process of its own, so that memory is its own too."""
    options = ["--messages", chosen.messages, "--batch", chosen.batch, "--body-bytes", chosen.body_bytes]
    command = [sys.executable, "-m", "benchmarks.delay.two_years", "--phase", phase, "--folder", folder, *options]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _write(chosen: argparse.Namespace) -> dict[str, object]:
    """Turns of schedule and plain publish; memory is read before the first plain turn loads an engine's index."""
    random, body = Random(1), b"x" * chosen.body_bytes
    store = LocalSegmentStore.open(chosen.folder / "delay")
    schedule = DelayStore.open(store)
    made = 0

    def scheduled(count: int) -> None:
        nonlocal made
        for _ in range(0, count, chosen.batch):
            batch = [
                Timed(NOW_MS + random.randrange(DELAY_MAX_MS), f"0197f3e2-{made + at:027d}", "trips", body)
                for at in range(chosen.batch)
            ]
            made += chosen.batch
            schedule.schedule(batch, now_ms=NOW_MS)

    share = chosen.messages // TURNS
    timed = [_timed(scheduled, share) for _ in range(TURNS - 2)]
    engine = Engine.open(chosen.folder / "plain")
    plain_made = 0

    def published(count: int) -> None:
        nonlocal plain_made
        for _ in range(0, count, chosen.batch):
            due_ms = random.randrange(DELAY_MAX_MS)  # as much work to make the batch
            engine.publish(
                [
                    Message(id=f"0197f3e2-{plain_made + at + due_ms * 0:027d}", topic="trips", body=body)
                    for at in range(chosen.batch)
                ]
            )
            plain_made += chosen.batch

    memory = _memory()
    plain = []
    for _ in range(2):
        plain.append(_timed(published, share))
        timed.append(_timed(scheduled, share))
    engine.close()
    while schedule.maintain(NOW_MS):
        pass
    figures = schedule.figures()
    schedule.close()
    store.close()
    return {
        "messages": made,
        "scheduled_per_s": _rate(timed, share, 0), "scheduled_per_cpu_s": _rate(timed, share, 1),
        "beside_plain_per_s": _rate(timed[-2:], share, 0), "beside_plain_per_cpu_s": _rate(timed[-2:], share, 1),
        "plain_per_s": _rate(plain, share, 0), "plain_per_cpu_s": _rate(plain, share, 1),
        "memory_mib": memory, "figures": figures, "files": len(list((chosen.folder / "delay").iterdir())),
        "bytes_per_message": _size(chosen.folder / "delay") / made,
        "bytes_per_message_plain": _size(chosen.folder / "plain") / plain_made,
    }  # fmt: skip


def _restart(folder: Path) -> dict[str, object]:
    started = time.perf_counter()
    store = LocalSegmentStore.open(folder / "delay")
    schedule = DelayStore.open(store)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    ids = [f"0197f3e2-{at:027d}" for at in range(0, schedule.count(), max(1, schedule.count() // 1_000))]
    found = sum(schedule.find(one) is not None for one in ids)
    look_up_ms = (time.perf_counter() - started) * 1000 / len(ids)
    started = time.perf_counter()
    days = schedule.histogram(topic=None, from_ms=0, to_ms=1 << 62, bucket_ms=86_400_000)
    result = {
        "restart_s": round(seconds, 3), "scheduled": schedule.count(), "memory_mib": _memory(),
        "looked_up": len(ids), "found": found, "look_up_ms": round(look_up_ms, 3),
        "days_counted": len(days), "counted": sum(count for _, count in days),
        "count_s": round(time.perf_counter() - started, 3),
    }  # fmt: skip
    schedule.close()
    store.close()
    return result


def _timed(work: Callable[[int], None], count: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(count)
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
