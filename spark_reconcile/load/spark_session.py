"""Creates the Spark session: local by default, UTC, logs in a file, workers on this Python interpreter."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.settings import MASTER_DEFAULT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECT: Final = "sc://"
PINNED: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # A damaged or deleted file would be no rows, and what it held lost, or, worse, never asked for.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreInvalidPartitionPaths": "false",
    # Pages whose checksum is wrong are damage, not values; writers that have no checksums lose nothing.
    "parquet.page.verify-checksum.enabled": "true",
    "spark.sql.parquet.mergeSchema": "false",
    "spark.sql.parquet.respectSummaryFiles": "false",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.fieldId.read.enabled": "false",
    # It alone widens an INT32 to a BIGINT.
    "spark.sql.parquet.enableVectorizedReader": "true",
    # A topic `007` in the name of a folder would be 7.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # What expressions mean.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.ansi.enforceReservedKeywords": "false",
    "spark.sql.caseSensitive": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.function.concatBinaryAsString": "false",
    "spark.sql.legacy.sizeOfNull": "false",
    "spark.sql.legacy.exponentLiteralAsDecimal.enabled": "false",
    "spark.sql.legacy.collationAwareHashFunctions": "false",
    "spark.sql.retainGroupColumns": "true",
    # Without it, a source with pushFilters() raises an error.
    "spark.sql.python.filterPushdown.enabled": "true",
}
"""The settings on which a verdict depends, whatever the configuration of a shop's Spark says."""
_EVERYWHERE: Final = {
    **PINNED,
    # Verdict tables are long expressions over few columns: inferring filters from them fills the driver's memory.
    "spark.sql.constraintPropagation.enabled": "false",
    # Sums have very many groups: look-ups in the first-level map fail, and it is more code to compile.
    "spark.sql.codegen.aggregate.map.twolevel.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
_LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    # Each sort, aggregation and broadcast table takes one page of the heap, 64 MiB by default, however few rows it
    # has: a dozen of them fill it, and Spark exits if a task finds no memory.
    "spark.buffer.pageSize": "4m",
    "spark.sql.shuffle.partitions": "4",
    "spark.default.parallelism": "4",
    # A loop lists some hundred files in less time than a job.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "5000",
    # A run has more queries than the default cache of generated code: the next run would compile all of it again.
    "spark.sql.codegen.cache.maxEntries": "2000",
}
# With one compiler the code cache has 48 MiB, which is full after half a minute; then nothing is compiled.
_ONE_COMPILER: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
_SMALL: Final = {
    # A small run is mostly start-up: the second compiler and parallel collection pay only in long runs.
    "spark.driver.extraJavaOptions": f"{_ONE_COMPILER} -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.shuffle.compress": "false",
}
_MEDIUM: Final = {
    # For some million rows the second compiler takes more time than its code saves: a run by the hour over 1,000,000
    # messages, forty queries with a plan each, took 46 s of processor time instead of 76.
    "spark.driver.extraJavaOptions": f"{_ONE_COMPILER} -XX:+UseParallelGC",
}
_LARGE: Final = {
    # Sums of millions of rows fill the heap with long-lived objects: on two processors, concurrent marking costs more
    # (10,000,000 messages: 77 s instead of 92). Scanning that many rows pays for the second compiler: an outer join of
    # them took 107 s of processor time with it, and 147 without.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
}
_FEW: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""With few rows, adaptive planning and compilation take most of the time: both are disabled. Of a run over a million
messages most was planning seventy stages, each once the one before it was done, for a few thousand rows."""
_ONE_PARTITION: Final = {
    **_FEW,
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    # Both sides of a join are in one place already; a broadcast would be a job of its own.
    "spark.sql.optimizer.disableHints": "true",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}


class Size(StrEnum):
    """The expected amount of work of a run, for which a local session's Java is configured."""

    SMALL = "small"
    """Start-up takes longer than the work."""
    MEDIUM = "medium"
    """Up to some ten million rows."""
    LARGE = "large"


_SIZED: Final[Mapping[Size, Mapping[str, str]]] = {
    Size.SMALL: _SMALL, Size.MEDIUM: _MEDIUM, Size.LARGE: _LARGE,
}  # fmt: skip


@contextmanager
def spark_session(master: str | None, *, log: Path, size: Size = Size.LARGE) -> Iterator[SparkSession]:
    """Yields a session for this run, see pinned_session(), stopped at the end. Spark's output goes to the file `log`.

    `master` is `local[N]`, `spark://...`, `k8s://...`, or a Spark Connect address `sc://host:port`. `size`: a
    short local run spends less on compilation. Raises ConfigurationError without Java.
    """
    master_url = master or MASTER_DEFAULT
    session = _start(master_url, log=log, size=size)
    with _released_by_the_end() if master_url.startswith(_CONNECT) else nullcontext():
        try:
            yield pinned_session(session)
        finally:
            session.stop()


@contextmanager
def _released_by_the_end() -> Iterator[None]:
    """Release a Connect session's checkpoints only by the end of the session.

    When one is garbage collected, it calls the server without a deadline, and may wait forever (SPARK-58846).
    """
    from pyspark.sql.connect.plan import CachedRemoteRelation

    release = CachedRemoteRelation.__del__
    CachedRemoteRelation.__del__ = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachedRemoteRelation.__del__ = release  # type: ignore[method-assign]


def is_of_this_process(session: object) -> bool:
    """Whether a session's Java runs beside this process; that of Spark Connect runs at the other end of a network."""
    from pyspark.sql import SparkSession as ClassicSession

    return isinstance(session, ClassicSession)


def running_session() -> SparkSession | None:
    """Returns the session that this process already uses, if any: another could not be made beside it."""
    from pyspark.sql import SparkSession as ClassicSession

    return ClassicSession.getActiveSession()


def pinned_session(session: SparkSession) -> SparkSession:
    """Returns a session of the same context in which PINNED holds, with the given one's other settings, and with our
    data sources. The given session and its configuration do not change.

    Spark Connect has no such sessions: the given one is returned. Raises ConfigurationError if a setting of it differs.
    """
    if is_of_this_process(session):
        pinned = _cloned(session)
        for name, value in PINNED.items():
            pinned.conf.set(name, value)
    else:
        pinned = session
        for name, value in PINNED.items():
            if (setting := session.conf.get(name, None)) != value:
                raise ConfigurationError(
                    f"the Spark session has {name}={setting}, by which verdicts would be wrong: set it to {value} on "
                    "the Spark Connect server, or in the session"
                )
    _register_sources(pinned)
    return pinned


def _cloned(session: SparkSession) -> SparkSession:
    """Returns a session with the given one's settings, a user's credentials among them, and data sources, as copies.

    newSession() has neither: a source that the given session knows could not be registered with it.
    """
    from pyspark.sql import SparkSession as ClassicSession

    return ClassicSession(session.sparkContext, session._jsparkSession.cloneSession())  # noqa: SLF001 - Java's alone


def _register_sources(session: SparkSession) -> None:
    """Register our two data sources with a session; idempotent."""
    from spark_reconcile.sources.log_source import BrokerLogSource
    from spark_reconcile.sources.sql_source import SqlSource

    session.dataSource.register(BrokerLogSource)
    session.dataSource.register(SqlSource)


def few_rows(session: SparkSession) -> AbstractContextManager[None]:
    """Configure the session for queries on few rows, some ten thousands, within this context."""
    return _configured(session, _FEW)


def one_partition(session: SparkSession, *, is_few: bool) -> AbstractContextManager[None]:
    """If they are few, configure the session for queries on rows in one partition each, within this context."""
    return _configured(session, _ONE_PARTITION if is_few else {})


@contextmanager
def _configured(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    kept = {name: session.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, before in kept.items():
            if before is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, before)


def _start(master: str, *, log: Path, size: Size) -> SparkSession:
    # By default, workers start `python3` from PATH, which may lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("outbox-reconcile")
    for name, value in _EVERYWHERE.items():
        builder = builder.config(name, value)
    if master.startswith(_CONNECT):
        return builder.remote(master).getOrCreate()
    _check_java()
    if master.startswith("local"):
        for name, value in {**_LOCAL, **_SIZED[size]}.items():
            builder = builder.config(name, value)
    with _stderr_to(log):
        return builder.master(master).getOrCreate()


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    has_java = (Path(home) / "bin" / "java").exists() if home else shutil.which("java") is not None
    if not has_java:
        problem = f"JAVA_HOME names {home}, which has no bin/java" if home else "none is on the PATH"
        raise ConfigurationError(
            f"Spark needs Java 17 or newer, and {problem}: run ./scripts/test, which sets one up, or install "
            "openjdk-17-jre-headless, or set JAVA_HOME"
        )


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """Redirect this process's standard error to a file while the Java process, which inherits it, is started.

    There is no other way to suppress the lines that the Java launcher writes before logging is configured.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
