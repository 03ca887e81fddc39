"""The Spark session: quiet, UTC, workers on this interpreter. Jobs use only the DataFrame API on it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from messaging.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def spark_session(master: str) -> SparkSession:
    """A session on this master. Raises ConfigurationError where there is no Java to run it."""
    _check_java()
    # Workers start `python3` from PATH unless told otherwise, and would miss our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("outbox-reconcile").master(master)
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if not master.startswith("local"):
        del settings["spark.driver.bindAddress"], settings["spark.driver.host"]
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    from spark_reconcile.sources.broker_log import BrokerActions, BrokerMessages
    from spark_reconcile.sources.sql import SqlSource

    for source in (BrokerMessages, BrokerActions, SqlSource):
        session.dataSource.register(source)
    return session


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if (home and (Path(home) / "bin" / "java").exists()) or shutil.which("java"):
        return
    raise ConfigurationError(
        "Spark needs Java 17 or newer: install openjdk-17-jre-headless (./scripts/test does), or set JAVA_HOME"
    )
