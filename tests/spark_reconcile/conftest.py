"""One Spark session for all tests of this room."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile.session import Size, spark_session

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


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session with two workers."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # The workers are processes of their own: they look for our packages and for these tests where pytest did.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with spark_session("local[2]", log=tmp_path_factory.mktemp("spark") / "spark.log", size=Size.LARGE) as session:
        for name, value in QUICK.items():
            session.conf.set(name, value)
        yield session
