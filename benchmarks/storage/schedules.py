"""Contestants that keep a schedule: insert by due time, cancel by id, take what is due in order. All of it durable.

Each engine has the messages by due time, and an index from id to due time; a call is a transaction with a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.storage.logs import MAP_BYTES, durable_sqlite
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore, TimedMessage
from outbox_broker.schedule.stores.local_segments import LocalSegmentStore

BATCH_MESSAGES: Final = 1_000
_TIME_BYTES: Final = 8
_BEFORE_FIRST: Final = b"d"
_AFTER_LAST: Final = b"e"


@dataclass(frozen=True, slots=True)
class Due:
    """A message, and when it is due."""

    due_ms: int
    id: str
    body: bytes


class Schedule(Protocol):
    """A schedule on a folder of its own."""

    def insert(self, batch: Sequence[Due], *, now_ms: int) -> None:
        """Store messages; they are durable when this returns."""

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> int:
        """Cancel messages durably; returns how many there were."""

    def take(self, now_ms: int) -> list[tuple[str, bytes]]:
        """Take up to BATCH_MESSAGES due messages, the first due first; durably gone when this returns."""

    def tidy(self, now_ms: int) -> None:
        """Do the housekeeping that is to be done by now."""

    def close(self) -> None:
        """Close the files."""


class OurSchedule:
    """The broker's schedule. A batch is noted as dispatched before it is taken, and as settled after: two syncs."""

    def __init__(self, folder: Path) -> None:
        self._segments = LocalSegmentStore.open(folder)
        self._schedule = DelayStore.open(self._segments, options=DelayOptions(batch_messages_max=BATCH_MESSAGES))

    def insert(self, batch: Sequence[Due], *, now_ms: int) -> None:
        messages = [TimedMessage(one.due_ms, one.id, "topic", one.body) for one in batch]
        if set(self._schedule.schedule(messages, now_ms=now_ms)) != {"stored"}:
            raise RuntimeError("not all of them were stored")

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> int:
        return sum(one == "canceled" for one in self._schedule.cancel(ids, now_ms=now_ms))

    def take(self, now_ms: int) -> list[tuple[str, bytes]]:
        batch = self._schedule.due(now_ms)
        if batch is None:
            return []
        self._schedule.fired(batch.number)
        return list(zip(batch.ids, batch.payloads, strict=True))

    def tidy(self, now_ms: int) -> None:
        while self._schedule.maintain(now_ms):
            pass

    def close(self) -> None:
        self._schedule.close()
        self._segments.close()


class RocksSchedule:
    """RocksDB: `d` + due time + id -> message, `i` + id -> due time. What is due is read on from where it was left, so
    that the marks of what was deleted before are not walked over.
    """

    def __init__(self, folder: Path) -> None:
        import rocksdict

        self._rocksdict: Any = rocksdict
        self._db: Any = rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True))
        self._options: Any = rocksdict.WriteOptions()
        self._options.sync = True
        self._taken = _BEFORE_FIRST

    def insert(self, batch: Sequence[Due], *, now_ms: int) -> None:
        written = self._rocksdict.WriteBatch(raw_mode=True)
        for one in batch:
            due, name = one.due_ms.to_bytes(_TIME_BYTES, "big"), one.id.encode()
            written.put(b"d" + due + name, one.body)
            written.put(b"i" + name, due)
        self._db.write(written, self._options)

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> int:
        written, count = self._rocksdict.WriteBatch(raw_mode=True), 0
        for name in (one.encode() for one in ids):
            due = self._db.get(b"i" + name)
            if due is not None:
                written.delete(b"d" + due + name)
                written.delete(b"i" + name)
                count += 1
        self._db.write(written, self._options)
        return count

    def take(self, now_ms: int) -> list[tuple[str, bytes]]:
        end = b"d" + (now_ms + 1).to_bytes(_TIME_BYTES, "big")
        written, taken = self._rocksdict.WriteBatch(raw_mode=True), []
        for key, body in self._db.items(from_key=self._taken):
            if key >= end or len(taken) == BATCH_MESSAGES:
                break
            name = key[1 + _TIME_BYTES :]
            written.delete(key)
            written.delete(b"i" + name)
            taken.append((name.decode(), body))
            self._taken = key
        if taken:
            self._db.write(written, self._options)
        return taken

    def tidy(self, now_ms: int) -> None:
        """Its compactions run in threads of its own."""

    def close(self) -> None:
        self._db.close()


class LmdbSchedule:
    """LMDB: a tree by due time and id, and one by id."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self._env: Any = lmdb.open(str(folder), map_size=MAP_BYTES, max_dbs=2)
        self._dues: Any = self._env.open_db(b"dues")
        self._ids: Any = self._env.open_db(b"ids")

    def insert(self, batch: Sequence[Due], *, now_ms: int) -> None:
        with self._env.begin(write=True) as transaction:
            for one in batch:
                due, name = one.due_ms.to_bytes(_TIME_BYTES, "big"), one.id.encode()
                transaction.put(due + name, one.body, db=self._dues)
                transaction.put(name, due, db=self._ids)

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> int:
        count = 0
        with self._env.begin(write=True) as transaction:
            for name in (one.encode() for one in ids):
                due = transaction.pop(name, db=self._ids)
                if due is not None:
                    count += transaction.delete(due + name, db=self._dues)
        return count

    def take(self, now_ms: int) -> list[tuple[str, bytes]]:
        end, taken = (now_ms + 1).to_bytes(_TIME_BYTES, "big"), []
        with self._env.begin(write=True) as transaction:
            cursor = transaction.cursor(db=self._dues)
            while cursor.first() and cursor.key() < end and len(taken) < BATCH_MESSAGES:
                name = bytes(cursor.key()[_TIME_BYTES:])
                taken.append((name.decode(), bytes(cursor.value())))
                cursor.delete()
                transaction.delete(name, db=self._ids)
        return taken

    def tidy(self, now_ms: int) -> None:
        """There is none."""

    def close(self) -> None:
        self._env.close()


class SqliteSchedule:
    """SQLite with a write-ahead log: a table in the order of due times, and a unique index on ids."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._connection = durable_sqlite(folder / "schedule.db")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS scheduled (due_ms INTEGER NOT NULL, id TEXT NOT NULL UNIQUE, "
            "body BLOB NOT NULL, PRIMARY KEY (due_ms, id)) WITHOUT ROWID"
        )

    def insert(self, batch: Sequence[Due], *, now_ms: int) -> None:
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "INSERT INTO scheduled (due_ms, id, body) VALUES (?, ?, ?)",
                [(one.due_ms, one.id, one.body) for one in batch],
            )

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> int:
        with self._connection:
            self._connection.execute("BEGIN")
            done = self._connection.executemany("DELETE FROM scheduled WHERE id = ?", [(one,) for one in ids])
        return done.rowcount

    def take(self, now_ms: int) -> list[tuple[str, bytes]]:
        rows = self._connection.execute(
            "SELECT due_ms, id, body FROM scheduled WHERE due_ms <= ? ORDER BY due_ms, id LIMIT ?",
            (now_ms, BATCH_MESSAGES),
        ).fetchall()
        if rows:
            with self._connection:
                self._connection.execute("BEGIN")
                self._connection.executemany(
                    "DELETE FROM scheduled WHERE due_ms = ? AND id = ?", [(due_ms, name) for due_ms, name, _ in rows]
                )
        return [(name, body) for _, name, body in rows]

    def tidy(self, now_ms: int) -> None:
        """Its checkpoints run with commits."""

    def close(self) -> None:
        self._connection.close()


SCHEDULES: Final[dict[str, Callable[[Path], Schedule]]] = {
    "ours": OurSchedule, "rocksdb": RocksSchedule, "lmdb": LmdbSchedule, "sqlite": SqliteSchedule,
}  # fmt: skip
