"""Publishes to NATS JetStream by the adapter, and by the plainest fast program with its client, at equal durability.

    python -m benchmarks.broker_adapter.nats --json > nats.json

Both publish 512 bytes with a Nats-Msg-Id to one stream on files (`sync_interval: always`), in batches of 500 whose
acknowledgements are awaited together, and one at a time. Rounds are rotated, figures are medians, in messages a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
from nats.js.api import StreamConfig

from benchmarks.broker_adapter.publish_rounds import BODY, TOPIC, arguments, compare, report

READY_SECONDS_MAX = 30


class Plain:
    """nats-py: asynchronous publishes, their acknowledgements awaited together."""

    name = "plain"

    def __init__(self, address: str, ids: Iterator[int]) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(nats.connect(f"nats://{address}"))
        self._stream = self._client.jetstream()
        self._ids = ids

    def publish(self, count: int) -> None:
        self._runner.run(self._publish(count))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    async def _publish(self, count: int) -> None:
        if count == 1:
            await self._stream.publish(TOPIC, BODY, headers={"Nats-Msg-Id": f"p{next(self._ids)}"}, timeout=60)
            return
        headers = ({"Nats-Msg-Id": f"p{next(self._ids)}"} for _ in range(count))
        await asyncio.gather(*[await self._stream.publish_async(TOPIC, BODY, headers=one) for one in headers])


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server on this folder; gives its address."""
    program = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or "nats-server"
    settings = {"jetstream": {"store_dir": str(folder / "store"), "sync_interval": "always"}}
    (folder / "server.conf").write_text(json.dumps(settings))
    command = [
        program,
        "-c",
        str(folder / "server.conf"),
        "-a",
        "127.0.0.1",
        "-p",
        "-1",
        "--ports_file_dir",
        str(folder),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _address(folder, process)
    finally:
        process.terminate()
        process.wait()


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < deadline:
        for found in folder.glob("*.ports"):
            if text := found.read_text():
                return str(json.loads(text)["nats"][0]).partition("://")[2]
        try:
            raise RuntimeError(f"the server ended with {process.wait(0.01)}")
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError("the server did not write its port")


async def make_stream(address: str) -> None:
    client = await nats.connect(f"nats://{address}")
    await client.jetstream().add_stream(StreamConfig(name="BENCH", subjects=["bench.>"]))
    await client.close()


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on a server of their own."""
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder, server(Path(folder)) as address:
        asyncio.run(make_stream(address))
        return compare(f"nats://{address}", lambda ids: [Plain(address, ids)], chosen)


def main() -> None:
    chosen = arguments(__doc__, batches=10, singles=500).parse_args()
    report("NATS JetStream", run(chosen), chosen)


if __name__ == "__main__":
    main()
