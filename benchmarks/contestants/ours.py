"""This project: publish in the transaction, send after the commit to a broker that accepts at once, remove the rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from benchmarks.contestants.business import BODY, KEY, TOPIC, async_engine, business, business_async, engine
from outbox import Outbox, SenderLimits
from outbox_core import CancelStatus, Message, PublishResult, PublishStatus

MESSAGES = 10
UNSENT_TOPIC = "bench-unsent"
SETTLE_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.02


class AcceptingBroker:
    """Accepts everything at once, so that what is measured is the outbox."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Stored."""
        return [PublishResult(message.id, PublishStatus.STORED) for message in batch]

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Not asked for here."""
        return [CancelStatus.UNKNOWN for _ in message_ids]

    def close(self) -> None:
        """Nothing is open."""


class Ours:
    """By the decorator, with a Session of one's own, ten at once, on asyncio; and written without being sent."""

    def __init__(self, url: str, async_url: str, schema: str) -> None:
        self._engine, self._async_engine = engine(url), async_engine(async_url)
        self._schema = schema
        self._sessions = sessionmaker(self._engine)
        broker = AcceptingBroker()
        self._box = Outbox(self._engine, broker=broker, schema=schema)  # type: ignore[arg-type]
        self._async_box = Outbox(self._async_engine, broker=broker, schema=schema)  # type: ignore[arg-type]
        self._silent = Outbox(
            self._engine,
            broker=broker,
            schema=schema,
            sender=SenderLimits(queue_rows_max=0),  # type: ignore[arg-type]
        )
        self.cases = {
            "ours": self._box.transactional(self._publish_one),
            "ours_session": self.ours_session,
            "ours_ten": self._box.transactional(self._publish_ten),
            "ours_unsent": self.ours_unsent,
            "ours_async": self.ours_async,
        }
        self._decorated_async = self._async_box.transactional(self._publish_async)

    def _publish_one(self, session: Session, number: int) -> None:
        business(session, number)
        self._box.publish(TOPIC, BODY, key=KEY)

    def _publish_ten(self, session: Session, number: int) -> None:
        business(session, number)
        for _ in range(MESSAGES):
            self._box.publish(TOPIC, BODY, key=KEY)

    def ours_session(self, number: int) -> None:
        """Without the decorator."""
        with self._sessions() as session, session.begin():
            business(session, number)
            self._box.publish(TOPIC, BODY, key=KEY, session=session)

    def ours_unsent(self, number: int) -> None:
        """Written and left to a compensator: what the sending costs the producer's process is the difference."""
        with self._sessions() as session, session.begin():
            business(session, number)
            self._silent.publish(UNSENT_TOPIC, BODY, key=KEY, session=session)

    async def ours_async(self, number: int) -> None:
        """By the decorator, on AsyncSession."""
        await self._decorated_async(number)  # type: ignore[misc]

    async def _publish_async(self, session: AsyncSession, number: int) -> None:
        await business_async(session, number)
        self._async_box.publish(TOPIC, BODY, key=KEY)

    def wait(self) -> None:
        """Until no row is left that a sender owns."""
        wait_until_sent(self._engine, self._schema)

    async def close(self) -> None:
        """Let go of threads and connections."""
        for box in (self._box, self._async_box, self._silent):
            box.close()
        self._engine.dispose()
        await self._async_engine.dispose()


def make(*, url: str, async_url: str, schema: str) -> Ours:
    """The contestant; the outbox's tables are there."""
    return Ours(url, async_url, schema)


def wait_until_sent(engine: Engine, schema: str) -> None:
    """Until no message of TOPIC is in the table any more."""
    left = text(f"SELECT EXISTS (SELECT 1 FROM {schema}.message WHERE topic = '{TOPIC}')")
    deadline, pause = time.monotonic() + SETTLE_SECONDS_MAX, threading.Event()
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            if not connection.execute(left).scalar_one():
                return
        pause.wait(_POLL_SECONDS)
    raise TimeoutError("messages were not sent in time")
