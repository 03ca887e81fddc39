"""One Spark session for all tests of this folder: its start costs more than all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from spark_reconcile.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two local threads."""
    session = spark_session("local[2]")
    yield session
    session.stop()
