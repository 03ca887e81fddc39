"""The contestants of benchmarks.delay.timer_stores: our two stores on Redis and our tables, and the peers' programs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine, text

from benchmarks.harness import backlog, servers
from benchmarks.peers import timer_peers_python
from broker_adapter.redis import open_broker
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox.store.schema import message_table_names
from outbox.store.table_placement import table_namespace
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.ids import new_message_id, new_token
from outbox_core.messages.message import AckStatus, Message
from outbox_core.messages.timing_port import TimedRow, Timer
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server

BATCH: Final = 500
BODY: Final = b"x" * 512
TOPIC: Final = "bench"
TABLES: Final = 8
LEASE_MS: Final = 600_000
CALLS_OF_OURS: Final = ("evalsha", "eval", "wait")
"""Commands that our stores send; the server counts what scripts do beside them."""
_ROOT: Final = Path(__file__).parents[2]


class Contestant(Protocol):
    """A store with many timers pending. Rates are of `count` timers; due times are seconds from now."""

    def fill(self, count: int, *, seconds: int) -> None:
        """Let so many more be pending. May take a faster way than the store's users have."""

    def add(self, count: int, *, seconds: int) -> dict[str, float]:
        """Add timers as users of the store do; how many seconds `add` took."""

    def make_due(self, count: int) -> None:
        """Let so many be due now that were added last: by their times, so that nobody waits hours."""

    def fire(self, count: int) -> dict[str, float]:
        """Hand all that is due to a worker that does nothing, and settle it: how many seconds `fire` and `ack` took, or
        `fire_and_ack` where they are not apart.
        """

    def memory_bytes(self) -> int:
        """What all that is pending takes: memory on Redis, data and indexes of tables."""

    def counters(self) -> Mapping[str, int]:
        """`commands` that the server was sent so far and `reads` of what it was sent; empty for tables."""


class RedisMeter:
    """What one Redis server says of its memory and commands, and times of its timers that are changed."""

    def __init__(self, server: RedisServer, *, key: str, calls: Sequence[str] = ()) -> None:
        """`key`: the sorted set of what is pending. `calls`: the commands that are counted; all where none is named."""
        self._server = server
        self._key = key
        self._calls = calls

    def make_due(self, count: int) -> None:
        with contextlib.closing(self._server.client) as client:
            for begin in range(0, count, BATCH):
                newest = client.zrange(self._key, -min(BATCH, count - begin), -1)
                client.zadd(self._key, dict.fromkeys(newest, 1), xx=True)

    def memory_bytes(self) -> int:
        with contextlib.closing(self._server.client) as client:
            return int(client.info("memory")["used_memory"])

    def counters(self) -> dict[str, int]:
        with contextlib.closing(self._server.client) as client:
            commands: Any = client.info("commandstats")
            reads = int(client.info("stats")["total_reads_processed"])
        named = {f"cmdstat_{name}" for name in self._calls} or set(commands)
        return {"commands": sum(commands[name]["calls"] for name in named & set(commands)), "reads": reads}


class RedisTimers:
    """`?store=timers`: the whole message in Redis, pulled by consumers."""

    def __init__(self, server: RedisServer) -> None:
        self._broker = open_broker(f"redis://{HOST}:{server.port}/?store=timers&wait=0")
        meter = RedisMeter(server, key=f"outbox:timers:{{{TOPIC}:0}}:store", calls=CALLS_OF_OURS)
        self.make_due, self.memory_bytes, self.counters = meter.make_due, meter.memory_bytes, meter.counters

    def fill(self, count: int, *, seconds: int) -> None:
        self.add(count, seconds=seconds)

    def add(self, count: int, *, seconds: int) -> dict[str, float]:
        at_ms = time.time_ns() // 1_000_000 + seconds * 1_000
        messages = [Message(id=new_message_id(), topic=TOPIC, body=BODY, deliver_at_ms=at_ms) for _ in range(count)]
        began = time.perf_counter()
        for begin in range(0, count, BATCH):
            assert all(one.status.is_success for one in self._broker.publish(messages[begin : begin + BATCH]))
        return {"add": time.perf_counter() - began}

    def fire(self, count: int) -> dict[str, float]:
        fire = ack = 0.0
        while count:
            began = time.perf_counter()
            deliveries = self._broker.pull(TOPIC, "g", max_messages=BATCH, wait_ms=1_000, invisible_ms=LEASE_MS)
            fired = time.perf_counter()
            assert set(self._broker.ack([one.receipt for one in deliveries])) == {AckStatus.ACKED}
            ack += time.perf_counter() - fired
            fire += fired - began
            count -= len(deliveries)
        return {"fire": fire, "ack": ack}

    def close(self) -> None:
        self._broker.close()


class TimingStoreOnRedis:
    """The timing store of the outbox: id and time; the row stays in its table, and is not part of these figures."""

    def __init__(self, server: RedisServer) -> None:
        self._store = connect_timing(f"redis://{HOST}:{server.port}/?name=bench&slots=1")
        self._store.prepare()
        meter = RedisMeter(server, key="outbox:timing:{bench:0}:due", calls=CALLS_OF_OURS)
        self.make_due, self.memory_bytes, self.counters = meter.make_due, meter.memory_bytes, meter.counters

    def fill(self, count: int, *, seconds: int) -> None:
        self.add(count, seconds=seconds)

    def add(self, count: int, *, seconds: int) -> dict[str, float]:
        at_ms = time.time_ns() // 1_000_000 + seconds * 1_000
        timers = [Timer(TimedRow("message", new_message_id()), at_ms) for _ in range(count)]
        began = time.perf_counter()
        for begin in range(0, count, BATCH):
            self._store.add(timers[begin : begin + BATCH])
        return {"add": time.perf_counter() - began}

    def fire(self, count: int) -> dict[str, float]:
        fire = ack = 0.0
        while count:
            began = time.perf_counter()
            taken = self._store.take([0], limit=BATCH, lease_ms=LEASE_MS)
            fired = time.perf_counter()
            self._store.settle(taken, later_ms={})
            ack += time.perf_counter() - fired
            fire += fired - began
            count -= sum(len(one.rows) for one in taken)
        return {"fire": fire, "ack": ack}

    def close(self) -> None:
        self._store.close()


class Tables:
    """The traditional timeout centre: rows in tables, each scanned for what is due, claimed, and removed when done.

    The tables, statements and commits are those of the outbox. Its scans come each 10 seconds; here one begins at once.
    """

    def __init__(self, database: servers.Database) -> None:
        upgrade(database.url, schema=database.schema, tables=TABLES)
        self._schema = database.schema
        self._engine: Engine = background_engine(open_engine(database.url))
        with self._engine.connect() as connection:
            names = [
                name
                for name in message_table_names(connection, table_namespace(self._engine.dialect, self._schema))
                if not name.endswith("message")
            ]
        self._stores = [MessageStore(dialect=self._engine.dialect, schema=self._schema, table=name) for name in names]
        self._filled = 0
        self._turn = itertools.cycle(self._stores)

    def fill(self, count: int, *, seconds: int) -> None:
        share = -(-count // len(self._stores))
        for store in self._stores:
            backlog.fill(
                self._engine, self._schema, rows=share, first=self._filled, due_for_us=-seconds * 1_000_000,
                table=store.table.name,
            )  # fmt: skip
            self._filled += share

    def add(self, count: int, *, seconds: int) -> dict[str, float]:
        at_ms = time.time_ns() // 1_000_000 + seconds * 1_000
        messages = [Message(id=new_message_id(), topic=TOPIC, body=BODY, deliver_at_ms=at_ms) for _ in range(count)]
        rows = [publish_row(message, is_timed=True) for message in messages]
        began = time.perf_counter()
        for begin in range(0, count, BATCH):
            with self._engine.begin() as connection:
                batch = rows[begin : begin + BATCH]
                next(self._turn).insert(connection, batch, token=new_token(), lease_us=LEASE_MS * 1_000)
        return {"add": time.perf_counter() - began}

    def make_due(self, count: int) -> None:
        """The rows that were added are the latest of their tables."""
        with self._engine.begin() as connection:
            for store in self._stores:
                count -= self._make_due(connection, store, limit=count)

    def fire(self, count: int) -> dict[str, float]:
        fire = ack = 0.0
        for store in self._stores:
            while True:
                token, began = new_token(), time.perf_counter()
                with self._engine.begin() as connection:
                    ids = [row.id for row in store.due_rows(connection, limit=BATCH).rows]
                    assert store.claim(connection, ids, token=token, lease_us=LEASE_MS * 1_000) == len(ids)
                fired = time.perf_counter()
                fire += fired - began
                if not ids:
                    break
                with self._engine.begin() as connection:
                    assert store.remove(connection, ids, token=token) == len(ids)
                ack += time.perf_counter() - fired
                count -= len(ids)
        assert count == 0
        return {"fire": fire, "ack": ack}

    def memory_bytes(self) -> int:
        statement = text(
            "SELECT SUM(data_length + index_length) FROM information_schema.tables WHERE table_schema = :schema"
        )
        with self._engine.connect() as connection:
            return int(connection.execute(statement, {"schema": self._schema}).scalar_one())

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._engine.dispose()

    def _make_due(self, connection: Connection, store: MessageStore, *, limit: int) -> int:
        table = f"{self._schema}.{store.table.name}"
        added = text(
            f"UPDATE {table} SET due_at_us = created_at_us, deliver_at_ms = 1 "
            "WHERE state = 'pending' AND deliver_at_ms > 1 ORDER BY due_at_us DESC LIMIT :limit"
        )
        return connection.execute(added, {"limit": limit}).rowcount


class Peer:
    """RQ or arq, by benchmarks.delay.timer_peers in an interpreter of its own."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self._command = [timer_peers_python(), "-m", "benchmarks.delay.timer_peers", name]
        self._url = f"redis://{HOST}:{server.port}/0"
        meter = RedisMeter(server, key={"rq": f"rq:scheduled:{TOPIC}", "arq": TOPIC}[name])
        self.make_due, self.memory_bytes, self.counters = meter.make_due, meter.memory_bytes, meter.counters

    def fill(self, count: int, *, seconds: int) -> None:
        self._run("fill", count, seconds)

    def add(self, count: int, *, seconds: int) -> dict[str, float]:
        return self._run("add", count, seconds)

    def fire(self, count: int) -> dict[str, float]:
        return self._run("fire", count)

    def close(self) -> None:
        """The program has ended."""

    def _run(self, *arguments: str | int) -> dict[str, float]:
        done = subprocess.run(
            [*self._command, self._url, *map(str, arguments)], cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return seconds


REDIS: Final = {
    "redis_timers": RedisTimers,
    "timing_store": TimingStoreOnRedis,
    "rq": lambda server: Peer(server, "rq"),
    "arq": lambda server: Peer(server, "arq"),
}
PEERS: Final = ("rq", "arq")
TABLES_NAME: Final = "tables"
NAMES: Final = (*REDIS, TABLES_NAME)


@contextlib.contextmanager
def contestants(
    names: Sequence[str], *, fsync: str, folder: str | None, database: servers.Database
) -> Iterator[dict[str, Contestant]]:
    """These contestants, each on a server of its own but for the tables, which are in the database."""
    with ExitStack() as stack:
        opened: dict[str, Contestant] = {}
        for name in names:
            if name == TABLES_NAME:
                found: Any = Tables(database)
            else:
                found = REDIS[name](stack.enter_context(redis_server(appendfsync=fsync, in_folder=folder)))
            stack.callback(found.close)
            opened[name] = found
        yield opened
