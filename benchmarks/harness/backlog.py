"""Backlogs for the measured to meet: message rows made by the server itself, hundreds of thousands in seconds.

Written without the binary log, since nobody measures the loading. Not how rows come to be in production.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, Engine, text

CHUNK_ROWS: Final = 10_000
BODY_BYTES: Final = 500
TOPIC: Final = "bench"
_NOW_US: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
HOUR_US: Final = 3_600_000_000
_BODY: Final = "x" * BODY_BYTES


def fill(
    engine: Engine, schema: str, *, rows: int, state: str = "pending", first: int = 0, due_for_us: int = HOUR_US
) -> None:
    """`rows` messages that have been due for an hour, oldest first by id, of a thousand keys, as a dead sender left
    them. `first` tells them from those of other calls.
    """
    values = {"state": state, "sha": hashlib.sha256(_BODY.encode()).hexdigest()}
    insert = text(
        f"INSERT INTO {schema}.message (id, kind, state, due_at_us, token, attempts, topic, message_key, headers, "
        "body, body_sha256, deliver_at_ms, created_at_us) "
        f"SELECT {_ID}, 'publish', :state, {_NOW_US} - {due_for_us} + :base + n, NULL, 1, '{TOPIC}', "
        f"CONCAT('key-', (:base + n) % 1000), NULL, REPEAT('x', {BODY_BYTES}), :sha, NULL, "
        f"{_NOW_US} - {due_for_us} + :base + n FROM bench_number WHERE n < :count"
    )
    with engine.connect() as connection:
        _number(connection)
        for base, count in _chunks(rows):
            connection.execute(insert, {**values, "base": first + base, "count": count})
            connection.commit()
        _log_again(connection)


def fill_archive(engine: Engine, schema: str, *, rows: int) -> None:
    """`rows` messages that were sent in the past thirty days."""
    step_us = 30 * 24 * HOUR_US // max(1, rows)
    insert = text(
        f"INSERT INTO {schema}.archive (sent_at_us, id, kind, topic, message_key, body_sha256, deliver_at_ms, "
        f"created_at_us, attempts, outcome) SELECT {_NOW_US} - (:base + n + 1) * {step_us}, {_ID}, 'publish', "
        f"'{TOPIC}', CONCAT('key-', (:base + n) % 1000), :sha, NULL, {_NOW_US} - (:base + n + 1) * {step_us} - 5000, "
        "1, 'stored' FROM bench_number WHERE n < :count"
    )
    with engine.connect() as connection:
        _number(connection)
        for base, count in _chunks(rows):
            connection.execute(insert, {"base": 10**9 + base, "count": count, "sha": hashlib.sha256(b"").hexdigest()})
            connection.commit()
        _log_again(connection)


def empty(engine: Engine, *tables: str) -> None:
    """Empty tables, each named with its schema."""
    with engine.begin() as connection:
        for name in tables:
            connection.execute(text(f"TRUNCATE TABLE {name}"))


# Ids as the producer makes them: a part that grows with time, then chance.
_ID: Final = "CONCAT('0190', LPAD(LOWER(HEX(:base + n)), 12, '0'), SUBSTR(SHA2(:base + n, 256), 1, 16))"


def _number(connection: Connection) -> None:
    """A table of the numbers below CHUNK_ROWS, in the connection's own database."""
    connection.execute(text("SET SESSION sql_log_bin = 0"))
    connection.execute(text("CREATE TABLE IF NOT EXISTS bench_number (n INT PRIMARY KEY)"))
    if connection.execute(text("SELECT COUNT(*) FROM bench_number")).scalar_one() != CHUNK_ROWS:
        connection.execute(text("TRUNCATE TABLE bench_number"))
        connection.execute(text("INSERT INTO bench_number VALUES (:n)"), [{"n": n} for n in range(CHUNK_ROWS)])
    connection.commit()


def _log_again(connection: Connection) -> None:
    connection.execute(text("SET SESSION sql_log_bin = 1"))


def _chunks(rows: int) -> Iterable[tuple[int, int]]:
    for base in range(0, rows, CHUNK_ROWS):
        yield base, min(CHUNK_ROWS, rows - base)
