"""One Spark session for all tests of this room."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from spark_reconcile.load.spark_session import Size, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of so few rows, half of a run's time goes into saying what was planned, and into tasks that have no rows. Java has its
# second compiler, which a run of its own is too short for: in a session of many, each takes half the time.
QUICK = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.lightweightPlanChangeValidation": "false",
}

SPARK_LOG: Final = pytest.StashKey[Path]()
LOG_BYTES_SHOWN: Final = 4_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the shared session's Java process has ended, every test that follows fails: say how it ended."""
    report = yield
    log = item.config.stash.get(SPARK_LOG, None)
    if report.failed and log is not None and (status := _java_status()) is not None:
        said = log.read_bytes()[-LOG_BYTES_SHOWN:].decode(errors="replace")
        report.sections.append(("Spark's Java process", f"it ended with status {status}; its last words:\n{said}"))
    return report


def _java_status() -> int | None:
    """The exit status of the Java process of this process's session; None where it runs, or there is none."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    status: int | None = None if gateway is None else gateway.proc.poll()
    return status


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """A local session with two workers."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # The workers are processes of their own: they look for our packages and for these tests where pytest did.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    log = request.config.stash[SPARK_LOG] = tmp_path_factory.mktemp("spark") / "spark.log"
    with spark_session("local[2]", log=log, size=Size.LARGE) as session:
        for name, value in QUICK.items():
            session.conf.set(name, value)
        yield session
