"""Compares the databases of engines. No I/O."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.pool import Pool

from outbox.store.database import MYSQL_DIALECTS

MYSQL_PORT: Final = 3306


def same_database(one: Engine, other: Engine) -> bool:
    """Returns whether two engines connect to the same database server and schema, judging by their URLs."""
    if _pool(one) is _pool(other):
        return True
    sockets = {engine.url.query.get("unix_socket") for engine in (one, other)} - {None}
    return _place(one.url) == _place(other.url) and len(sockets) < 2


def _pool(engine: Engine) -> Pool:
    return engine.pool


def _place(url: URL) -> tuple[object, ...]:
    if url.get_backend_name() not in MYSQL_DIALECTS:
        return (url.get_backend_name(), url.host, url.port, url.database)
    return ("mysql", url.host, (url.port or MYSQL_PORT) if url.host else url.port)
