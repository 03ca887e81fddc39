"""The same run, unchanged, on a standalone cluster (one master, two workers) and through Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from messaging.errors import OutboxError
from tests.fixtures.databases import Database
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, World

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LINES_MAX = 2_000
RUN_SECONDS_MAX = 280
DEFAULTS = "spark.sql.shuffle.partitions 2\nspark.sql.adaptive.enabled false\nspark.executor.memory 600m\n"
CONNECT = ("spark-submit", "--master", "local[2]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
# The session of the other tests lives in this process, and Spark keeps one a process: so a process of its own.
PROGRAM = """
import json, sys
from pathlib import Path
from spark_reconcile import run_windows
from spark_reconcile.config_file import read_config, settings_of
from dataclasses import replace
path, master, now_ms, since_ms = sys.argv[1:]
settings = settings_of(read_config(Path(path)), folder=Path(path).parent)
summary = run_windows(settings, since_ms=int(since_ms), now_ms=int(now_ms), master=master, pause=lambda _: None)
print(json.dumps(summary.as_dict()["sentence"]))
"""
CONFIG = """
[database]
url = "{url}"
[broker]
data = "broker"
[[rules]]
name = "paid orders are announced"
table = "orders"
where = {{ status = "PAID" }}
key_column = "id"
time_column = "paid_at_us"
topic = "order.paid"
[[rules]]
name = "travellers are reminded"
table = "orders"
where = {{ status = "BOOKED" }}
key_column = "id"
time_column = "paid_at_us"
topic = "trip.reminder"
deliver_at_column = "remind_at_us"
[[inboxes]]
group = "tickets"
[grace]
late_after_seconds = 120
"""
SENTENCE = '"Not balanced: 1 unsent, 3 lost, 10 phantom, 3 duplicate, 1 early, 5 mismatch."'


def test_a_standalone_cluster_of_a_master_and_two_workers(sqlite: Database, tmp_path: Path) -> None:
    config = _written(sqlite, tmp_path)
    with (
        _started("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
                 until="Starting Spark master at ") as master,
        _started("org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0", master,
                 until="Successfully registered with master"),
        _started("org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0", master,
                 until="Successfully registered with master"),
    ):  # fmt: skip
        assert _run(config, master) == SENTENCE


def test_spark_connect(sqlite: Database, tmp_path: Path) -> None:
    config = _written(sqlite, tmp_path)
    options = (
        "--conf", "spark.connect.grpc.binding.port=0", "--conf", "spark.sql.shuffle.partitions=2",
        "--conf", "spark.ui.enabled=false",
    )  # fmt: skip
    with _started(*CONNECT[1:], *options, program=CONNECT[0], until="Spark Connect server started at: ") as told:
        port = told.rpartition(":")[2]
        assert _run(config, f"sc://127.0.0.1:{port}") == SENTENCE


def _written(database: Database, folder: Path) -> Path:
    world = World()
    world.groups()
    for number in range(60):
        world.settled(age_ms=4 * HOUR_MS - number * 2 * MINUTE_MS)
    plant_all(world)
    with_timed_ids(world)
    world.write(database, folder, records_a_segment=40)
    config = folder / "reconcile.toml"
    config.write_text(CONFIG.format(url=database.url))
    (folder / "spark-defaults.conf").write_text(DEFAULTS)
    return config


def _run(config: Path, master: str) -> str:
    arguments = [str(config), master, str(NOW_MS), str(NOW_MS - 5 * HOUR_MS)]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=RUN_SECONDS_MAX,
        env={**_environment(), "SPARK_CONF_DIR": str(config.parent)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3_000:]
    return ended.stdout.strip().splitlines()[-1]


@contextmanager
def _started(*arguments: str, until: str, program: str = "spark-class") -> Iterator[str]:
    """A Java process of Spark; yields what it said behind `until`, its address."""
    import pyspark

    command = Path(pyspark.__file__).parent / "bin" / program
    process = subprocess.Popen(
        [str(command), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    )
    try:
        yield _told(process, until)
    finally:
        process.kill()
        process.wait(30)
        if process.stdout:
            process.stdout.close()


def _told(process: subprocess.Popen[str], until: str) -> str:
    heard = []
    for line in process.stdout or ():
        heard.append(line)
        if until in line:
            return line.partition(until)[2].strip()
        if len(heard) > LINES_MAX:
            break
    raise OutboxError(f"Spark did not say {until!r}: {''.join(heard[-20:])}")


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
