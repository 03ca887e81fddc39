"""Measures the broker's start-up time after kill -9, and its memory, with a backlog of many messages.

    python benchmarks/broker/recovery.py [--messages 10000000] [--body-bytes 512] [--folder FOLDER] [--keep]

A process fills a folder, tells its resident memory with the backlog in hand, half of which it then consumes, and is
killed; another opens the folder. JSON: seconds to open with its footers, and once with all damaged; resident megabytes
of the first process and of the second, after a pull from the beginning and one from the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outbox_broker.engine.engine import Engine
from outbox_core import Message
from outbox_core.messages.message import GroupConfig
from tests.outbox_broker.message_log import flip_directory, footers_of

BATCH = 500
TOPIC, GROUP = "bench", "group"
CONSUMED = 20


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--body-bytes", type=int, default=512)
    parser.add_argument("--topics", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--open", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.fill:
        _fill(chosen)
    elif chosen.open:
        _open(chosen)
    else:
        with tempfile.TemporaryDirectory() as name:
            chosen.folder = chosen.folder or Path(name)
            print(json.dumps(_measure(chosen), indent=2))


def _measure(chosen: argparse.Namespace) -> dict[str, object]:
    filled = _child(chosen, "--fill", killed=True)
    killed = _child(chosen, "--open")
    for footer in footers_of(chosen.folder):
        flip_directory(footer)
    bare = _child(chosen, "--open")
    return {
        "messages": chosen.messages, "body_bytes": chosen.body_bytes, "topics": chosen.topics, "filled": filled,
        "after_kill": killed, "after_kill_without_footers": bare,
    }  # fmt: skip


def _child(chosen: argparse.Namespace, what: str, *, killed: bool = False) -> object:
    command = [sys.executable, __file__, what, "--messages", str(chosen.messages), "--topics", str(chosen.topics)]
    command += ["--body-bytes", str(chosen.body_bytes), "--folder", str(chosen.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if killed:
            process.kill()
    return json.loads(line)


def _fill(chosen: argparse.Namespace) -> None:
    engine = Engine.open(chosen.folder)
    engine.admin.declare_group("t0", GROUP, GroupConfig())
    body = b"x" * chosen.body_bytes
    started = time.perf_counter()
    for start in range(0, chosen.messages, BATCH):
        topic = f"t{start // BATCH % chosen.topics}"
        engine.publisher.publish(
            [Message(id=f"{number:032x}", topic=topic, body=body) for number in range(start, start + BATCH)]
        )
    seconds = time.perf_counter() - started
    resident = _resident_mb()
    for _ in range(CONSUMED):
        engine.settler.ack([one.receipt for one in engine.puller.pull("t0", GROUP, max_messages=BATCH)])
    _tell(published_per_second=round(chosen.messages / seconds), resident_mb=resident)
    time.sleep(60)


def _open(chosen: argparse.Namespace) -> None:
    started = time.perf_counter()
    engine = Engine.open(chosen.folder)
    seconds = time.perf_counter() - started
    figures = engine.admin.group_figures("t0", GROUP)
    opened = _resident_mb()
    first = engine.puller.pull("t0", "new", max_messages=BATCH)
    engine.admin.declare_group("t0", "late", GroupConfig())
    engine.admin.seek("t0", "late", to_offset=figures["stored"] - BATCH)
    last = engine.puller.pull("t0", "late", max_messages=BATCH)
    stored = sum(engine.admin.topic_figures(topic)["stored"] for topic in engine.admin.topics())
    assert len(first) == len(last) == BATCH
    assert stored == chosen.messages
    _tell(
        open_seconds=round(seconds, 2), resident_mb=opened, resident_after_pulls_mb=_resident_mb(),
        backlog=figures["backlog"],
    )  # fmt: skip
    engine.close()


def _resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
