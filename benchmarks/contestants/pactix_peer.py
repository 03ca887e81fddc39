"""pactix: OutboxStore.append on the caller's AsyncSession (its one way). Its relay polls, and does not run."""

from __future__ import annotations

from pactix.config import PactixConfig
from pactix.db.tables import metadata
from pactix.message import MessageEnvelope, MessageMetadata
from pactix.outbox.store import OutboxStore
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker

from benchmarks.contestants.business import BODY, KEY, TOPIC, async_engine, business_async


class Pactix:
    """The write side alone."""

    def __init__(self, url: str, async_url: str) -> None:
        self._url = url
        self._engine = async_engine(async_url)
        self._sessions = async_sessionmaker(self._engine)
        self._store = OutboxStore(PactixConfig())
        make_tables(url)
        self.cases = {"pactix": self.pactix}

    async def pactix(self, number: int) -> None:
        """A message in the business transaction."""
        async with self._sessions() as session, session.begin():
            await business_async(session, number)
            named = MessageMetadata.for_event_type(TOPIC).with_message_key(KEY)
            await self._store.append(session, MessageEnvelope(metadata=named, payload=BODY))

    def wait(self) -> None:
        """Nobody sends here."""

    async def close(self) -> None:
        """Let go of the connections."""
        await self._engine.dispose()


def make(*, url: str, async_url: str, schema: str) -> Pactix:  # noqa: ARG001 - everybody's are made alike
    """The contestant."""
    return Pactix(url, async_url)


def make_tables(url: str) -> None:
    """pactix's own tables, as its metadata has them."""
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
