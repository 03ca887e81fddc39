"""modupy: publish() in a bound AsyncSession; after the commit a task of the same loop hands the event to a listener."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import modulith
from modulith.adapters.postgres_outbox import Base, PostgresPublicationStore
from modulith.builtin import outbox
from modulith.builtin.outbox import bind_session, unbind_session
from modulith.serializers import JsonEventSerializer
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker

from benchmarks.contestants.business import BODY, async_engine, business_async


@modulith.event
@dataclass(frozen=True)
class Happened:
    """The event."""

    text: str


@modulith.listener
async def accept(event: Happened) -> None:
    """Accepts at once, as our broker does."""


class Modupy:
    """Writes, and delivers in the process itself; delivered rows are deleted."""

    def __init__(self, url: str, async_url: str) -> None:
        self._url = url
        self._engine = async_engine(async_url)
        self._sessions = async_sessionmaker(self._engine)
        tables = create_engine(url)
        Base.metadata.create_all(tables)
        tables.dispose()
        self._store = PostgresPublicationStore(engine=self._engine)
        outbox.configure(
            store=self._store,
            serializer=JsonEventSerializer(allowed_event_types=[Happened]),
            completion_mode="delete",
            start_loop=False,
        )
        modulith.configure(outbox="postgres", outbox_url=async_url, auto_discover=False)
        modulith.bootstrap()
        self.cases = {"modupy": self.modupy}

    async def modupy(self, number: int) -> None:
        """A message in the business transaction."""
        async with self._sessions() as session:
            token = bind_session(session)
            try:
                await business_async(session, number)
                await modulith.publish(Happened(text=BODY["text"]))
                await session.commit()
            finally:
                unbind_session(token)

    async def wait(self) -> None:
        """Until its tasks are done."""
        async with asyncio.timeout(120):
            await self._store.wait_for_dispatch()
        async with self._engine.connect() as connection:
            left = (await connection.execute(text("SELECT COUNT(*) FROM event_publications"))).scalar_one()
            if left:
                print(f"modupy left {left} rows undelivered", flush=True)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._store.dispose()
        await self._engine.dispose()


def make(*, url: str, async_url: str, schema: str) -> Modupy:  # noqa: ARG001 - everybody's are made alike
    """The contestant."""
    return Modupy(url, async_url)
