"""The business transaction to which each contestant adds a message: one SELECT, one UPDATE, one INSERT."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

ACCOUNTS = 10_000
TOPIC = "bench"
KEY = "k"
BODY = {"text": "x" * 480}
"""An event of half a kilobyte as JSON."""
POOL_SIZE = 10

_SELECT = text("SELECT balance FROM bench_account WHERE id = :id")
_UPDATE = text("UPDATE bench_account SET balance = balance + 1 WHERE id = :id")
_BY_HAND = """CREATE TABLE bench_message (
    id VARCHAR(64) CHARACTER SET ascii PRIMARY KEY, topic VARCHAR(255) NOT NULL, message_key VARCHAR(255), headers TEXT,
    body LONGBLOB NOT NULL, state VARCHAR(16) NOT NULL, due_at_us BIGINT NOT NULL, created_at_us BIGINT NOT NULL,
    KEY (state, due_at_us, id))"""
_INSERT = text("INSERT INTO bench_entry (account) VALUES (:id)")


def business(session: Session, number: int) -> None:
    """The transaction's own work."""
    account = {"id": number % ACCOUNTS}
    session.execute(_SELECT, account).scalar()
    session.execute(_UPDATE, account)
    session.execute(_INSERT, account)


async def business_async(session: AsyncSession, number: int) -> None:
    """The same, awaited."""
    account = {"id": number % ACCOUNTS}
    (await session.execute(_SELECT, account)).scalar()
    await session.execute(_UPDATE, account)
    await session.execute(_INSERT, account)


def engine(url: str) -> Engine:
    """The business's engine."""
    return create_engine(url, pool_size=POOL_SIZE)


def async_engine(url: str) -> AsyncEngine:
    """The business's asyncio engine."""
    return create_async_engine(url, pool_size=POOL_SIZE)


def make_tables(connection: Connection) -> None:
    """The business's tables, and the message table of those who write their messages by hand."""
    for statement in (
        "CREATE TABLE bench_account (id INT PRIMARY KEY, balance INT NOT NULL)",
        "CREATE TABLE bench_entry (id BIGINT AUTO_INCREMENT PRIMARY KEY, account INT NOT NULL)",
        _BY_HAND,
    ):
        connection.execute(text(statement))
    accounts: list[dict[str, Any]] = [{"id": number} for number in range(ACCOUNTS)]
    connection.execute(text("INSERT INTO bench_account VALUES (:id, 0)"), accounts)
