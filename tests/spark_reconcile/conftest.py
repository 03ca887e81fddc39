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


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session with two workers."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # The workers are processes of their own: they look for our packages and for these tests where pytest did.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with spark_session("local[2]", log=tmp_path_factory.mktemp("spark") / "spark.log", size=Size.SMALL) as session:
        # Of a few hundred rows half of the time goes into empty parts; the clusters' tests have several.
        session.conf.set("spark.sql.shuffle.partitions", "1")
        yield session
