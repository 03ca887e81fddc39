"""The floors: the business transaction bare, and with an INSERT of the message as one would write it by hand."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from benchmarks.contestants.business import BODY, KEY, TOPIC, async_engine, business, business_async, engine

_BY_HAND = text(
    "INSERT INTO bench_message (id, topic, message_key, headers, body, state, due_at_us, created_at_us) "
    "VALUES (:id, :topic, :key, :headers, :body, 'pending', :at, :at)"
)


class Floors:
    """Plain SQLAlchemy, with Session on PyMySQL and with AsyncSession on asyncmy."""

    def __init__(self, url: str, async_url: str) -> None:
        self._engine, self._async_engine = engine(url), async_engine(async_url)
        self._sessions, self._async_sessions = sessionmaker(self._engine), async_sessionmaker(self._async_engine)
        self.cases = {
            "bare": self.bare,
            "hand_written": self.hand_written,
            "bare_async": self.bare_async,
            "hand_written_async": self.hand_written_async,
        }

    def bare(self, number: int) -> None:
        """No message."""
        with self._sessions() as session, session.begin():
            business(session, number)

    def hand_written(self, number: int) -> None:
        """A message, by one INSERT."""
        with self._sessions() as session, session.begin():
            business(session, number)
            session.execute(_BY_HAND, _message())

    async def bare_async(self, number: int) -> None:
        """No message, awaited."""
        async with self._async_sessions() as session, session.begin():
            await business_async(session, number)

    async def hand_written_async(self, number: int) -> None:
        """A message, awaited."""
        async with self._async_sessions() as session, session.begin():
            await business_async(session, number)
            await session.execute(_BY_HAND, _message())

    def wait(self) -> None:
        """Nobody sends here."""

    async def close(self) -> None:
        """Let go of the connections."""
        self._engine.dispose()
        await self._async_engine.dispose()


def make(*, url: str, async_url: str, schema: str) -> Floors:  # noqa: ARG001 - everybody's are made alike
    """The contestant."""
    return Floors(url, async_url)


def _message() -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "topic": TOPIC,
        "key": KEY,
        "headers": '{"content-type":"application/json"}',
        "body": json.dumps(BODY).encode(),
        "at": time.time_ns() // 1000,
    }
