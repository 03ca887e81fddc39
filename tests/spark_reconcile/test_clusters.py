"""The same run, unchanged, on a standalone cluster (one master, two workers) and through Spark Connect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from spark_reconcile import run_windows
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.fixtures.spark_classes import archive_options
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, SETTINGS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
START_SECONDS_MAX = 300
END_SECONDS_MAX = 120
RUN_SECONDS_MAX = 1_200
QUICK_JAVA = f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC {archive_options()}"
# Of so few rows all time is starting, compiling and planning: as of small runs in spark_reconcile.load.spark_session.
QUICK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.shuffle.compress": "false",
    "spark.ui.enabled": "false",
    "spark.executor.memory": "600m",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.executor.extraJavaOptions": QUICK_JAVA,
}
CONNECT = ("spark-submit", "--master", "local[2]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
# The session of the other tests lives in this process, and Spark keeps one a process: so a process of its own.
PROGRAM = """
import sys
from pathlib import Path
from spark_reconcile import run_windows
from spark_reconcile.core.settings_file import read_config, settings_of
path, master, now_ms, since_ms = sys.argv[1:]
settings = settings_of(read_config(Path(path)), folder=Path(path).parent)
summary = run_windows(settings, since_ms=int(since_ms), now_ms=int(now_ms), master=master, pause=lambda _: None)
print(summary.sentence)
"""
PROPERTIES = "spark.properties"
CONFIG = f'{SETTINGS}[output]\nfolder = "here"\n'
SINCE_MS = NOW_MS - 5 * HOUR_MS
Findings = set[tuple[str, str | None, str]]


@dataclass(frozen=True, slots=True)
class Records:
    """What all clusters read, and what the local session of the other tests finds in it."""

    folder: Path
    config: Path
    wanted: tuple[str, Findings]

    def output(self, name: str) -> Path:
        """A file of settings whose results go to a folder of their own."""
        path = self.folder / f"{name}.toml"
        path.write_text(self.config.read_text().replace('"here"', f'"{name}"'))
        return path


@pytest.fixture(scope="module")
def records(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Every fault once, in two segments of each log, and judged here."""
    folder = tmp_path_factory.mktemp("records")
    config = _written(Database(name="sqlite", url=f"sqlite:///{folder / 'shop.db'}", schema=None), folder)
    return Records(folder, config, _run_here(config, spark))


def test_a_standalone_cluster_of_a_master_and_two_workers(records: Records, tmp_path: Path) -> None:
    config = records.output("cluster")
    master = ("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")

    with _started(*master, until="Starting Spark master at ") as told:
        url = told()
        workers = [
            (
                "org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0",
                "--work-dir", str(tmp_path / name), url,
            )
            for name in ("one", "two")
        ]  # fmt: skip
        registered = "Successfully registered with master"
        with _started(*workers[0], until=registered) as first, _started(*workers[1], until=registered) as second:
            first(), second()
            sentence = _run(config, url)

    assert (sentence, _findings(records.folder / "cluster")) == records.wanted
    for worker in ("one", "two"):
        assert list((tmp_path / worker).glob("app-*/*/stderr")), f"worker {worker} had no executor"


def test_spark_connect(records: Records) -> None:
    config = records.output("connect")
    options = [word for name, value in QUICK.items() for word in ("--conf", f"{name}={value}")]
    options += ["--conf", "spark.connect.grpc.binding.port=0"]

    with _started(*CONNECT[1:], *options, program=CONNECT[0], until="Spark Connect server started at: ") as told:
        sentence = _run(config, f"sc://127.0.0.1:{told().rpartition(':')[2]}")

    assert (sentence, _findings(records.folder / "connect")) == records.wanted


def _run_here(config: Path, spark: SparkSession) -> tuple[str, Findings]:
    """What the local session of all other tests finds in the same records."""
    settings = settings_of(read_config(config), folder=config.parent)
    summary = run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=lambda _: None)
    found = _findings(settings.output)
    assert len(found) > 20
    return summary.sentence, found


def _findings(output: Path) -> Findings:
    """Every verdict that was given row by row."""
    store = WindowStore(output)
    folders = [store.folder(start) / "verdicts" for start in store.windows]
    columns = ["message_id", "consumer_group", "rule"]
    rows = [row for one in folders if one.exists() for row in pq.read_table(one, columns=columns).to_pylist()]
    return {(row["message_id"], row["consumer_group"], row["rule"]) for row in rows}


def _written(database: Database, folder: Path) -> Path:
    world = World()
    world.groups()
    for number in range(20):
        world.settled(age_ms=4 * HOUR_MS - number * 2 * MINUTE_MS)
    plant_all(world)
    with_timed_ids(world)
    world.write(database, folder, records_a_segment=(len(world.actions) + 1) // 2)
    config = folder / "here.toml"
    config.write_text(CONFIG.format(url=database.url))
    (folder / PROPERTIES).write_text("".join(f"{name} {value}\n" for name, value in QUICK.items()))
    return config


def _run(config: Path, master: str) -> str:
    arguments = [str(config), master, str(NOW_MS), str(SINCE_MS)]
    # A folder of settings would be on the class path, which the archive of Spark's classes must be made for.
    submitted = f"--properties-file {config.parent / PROPERTIES} pyspark-shell"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=RUN_SECONDS_MAX,
        env={**_environment(), "PYSPARK_SUBMIT_ARGS": submitted},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3_000:]
    return ended.stdout.strip().splitlines()[-1]


@contextmanager
def _started(*arguments: str, until: str, program: str = "spark-class") -> Iterator[Callable[[], str]]:
    """A Java process of Spark. What is yielded waits for what it says behind `until`: its address. All that it starts
    ends with it.
    """
    import pyspark

    command = Path(pyspark.__file__).parent / "bin" / program
    process = subprocess.Popen(
        [str(command), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(),
        start_new_session=True,
    )  # fmt: skip
    told: Queue[str] = Queue()
    reader = threading.Thread(target=_tell, args=(process, until, told))
    reader.start()
    try:
        yield lambda: told.get(timeout=START_SECONDS_MAX)
    finally:
        _end(process)
        reader.join(END_SECONDS_MAX)
        if process.stdout:
            process.stdout.close()


def _tell(process: subprocess.Popen[str], until: str, told: Queue[str]) -> None:
    """Read all that it says, so that it never waits for a reader."""
    for line in process.stdout or ():
        if until in line:
            told.put(line.partition(until)[2].strip())


def _end(process: subprocess.Popen[str]) -> None:
    """End it with all that it started: they are a group of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS_MAX)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
    }  # fmt: skip
