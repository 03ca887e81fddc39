"""Contestants that keep a log: append a batch durably, read all of it in order. Each writes values of bytes alone.

A batch is on the disk when append() returns: each engine syncs once a batch, by its own means.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from outbox_broker.common.engine_options import Durability
from outbox_broker.log.segment_scan import Gap
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.log.storage import DiskStorage
from outbox_core.journal.journal import SegmentKind

SEGMENT_BYTES: Final = 256 * 1024 * 1024
MAP_BYTES: Final = 8 * 1024**3
_KEY_BYTES: Final = 8


class Log(Protocol):
    """A log on a folder of its own."""

    def append(self, batch: Sequence[bytes]) -> None:
        """Append messages; they are durable when this returns."""

    def read(self) -> Iterator[bytes]:
        """Yields all messages in order."""

    def close(self) -> None:
        """Close the files."""


class OurLog:
    """The broker's segmented log: frames with checksums in files that only grow."""

    def __init__(self, folder: Path) -> None:
        self._log = SegmentedLog(
            folder, kind=SegmentKind.MESSAGES, segment_bytes=SEGMENT_BYTES, durability=Durability.FSYNC,
            storage=DiskStorage(), now_ms=lambda: time.time_ns() // 1_000_000,
        )  # fmt: skip
        for _ in self._log.recover():
            pass

    def append(self, batch: Sequence[bytes]) -> None:
        if self._log.is_full:
            self._log.roll()
        self._log.append(batch)
        self._log.commit()

    def read(self) -> Iterator[bytes]:
        for segment in self._log.segments:
            for frame in self._log.scan(segment):
                if isinstance(frame, Gap):
                    raise RuntimeError(f"damaged: {frame}")  # noqa: TRY004 (not the type is wrong, but the file)
                yield frame.payload

    def close(self) -> None:
        self._log.sync_and_close()


class RocksLog:
    """RocksDB: keys that grow, a write batch with `sync` a call."""

    def __init__(self, folder: Path) -> None:
        import rocksdict

        self._rocksdict: Any = rocksdict
        self._db: Any = rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True))
        self._options: Any = rocksdict.WriteOptions()
        self._options.sync = True
        self._next = 0

    def append(self, batch: Sequence[bytes]) -> None:
        written = self._rocksdict.WriteBatch(raw_mode=True)
        for body in batch:
            written.put(self._next.to_bytes(_KEY_BYTES, "big"), body)
            self._next += 1
        self._db.write(written, self._options)

    def read(self) -> Iterator[bytes]:
        yield from self._db.values()

    def close(self) -> None:
        self._db.close()


class LmdbLog:
    """LMDB: keys that grow, appended to the right edge of its tree, a transaction a call."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self._env: Any = lmdb.open(str(folder), map_size=MAP_BYTES, metasync=True, sync=True)
        self._next = 0

    def append(self, batch: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as transaction:
            for body in batch:
                transaction.put(self._next.to_bytes(_KEY_BYTES, "big"), body, append=True)
                self._next += 1

    def read(self) -> Iterator[bytes]:
        with self._env.begin() as transaction:
            yield from transaction.cursor().iternext(keys=False, values=True)

    def close(self) -> None:
        self._env.close()


class SqliteLog:
    """SQLite with a write-ahead log: a row a message, a transaction a call, synced at its commit."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._connection = durable_sqlite(folder / "log.db")
        self._connection.execute("CREATE TABLE IF NOT EXISTS message (number INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def append(self, batch: Sequence[bytes]) -> None:
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany("INSERT INTO message (body) VALUES (?)", [(body,) for body in batch])

    def read(self) -> Iterator[bytes]:
        for (body,) in self._connection.execute("SELECT body FROM message ORDER BY number"):
            yield body

    def close(self) -> None:
        self._connection.close()


def durable_sqlite(path: Path) -> sqlite3.Connection:
    """Returns a connection that syncs at every commit."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


LOGS: Final[dict[str, Callable[[Path], Log]]] = {
    "ours": OurLog, "rocksdb": RocksLog, "lmdb": LmdbLog, "sqlite": SqliteLog,
}  # fmt: skip
