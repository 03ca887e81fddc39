"""outbox-sqs: save() on the caller's Session. Its relay polls, so it does not run."""

from __future__ import annotations

from outbox_sqs import Base, save
from sqlalchemy.orm import sessionmaker

from benchmarks.contestants.business import BODY, KEY, TOPIC, business, engine


class OutboxSqs:
    """The write side alone."""

    def __init__(self, url: str) -> None:
        self._engine = engine(url)
        self._sessions = sessionmaker(self._engine)
        Base.metadata.create_all(self._engine)
        self.cases = {"outbox_sqs": self.outbox_sqs}

    def outbox_sqs(self, number: int) -> None:
        """A message in the business transaction."""
        with self._sessions() as session, session.begin():
            business(session, number)
            save(session, TOPIC, BODY, group_id=KEY)

    def wait(self) -> None:
        """Nobody sends here."""

    def close(self) -> None:
        """Let go of the connections."""
        self._engine.dispose()


def make(*, url: str, async_url: str, schema: str) -> OutboxSqs:  # noqa: ARG001 - everybody's are made alike
    """The contestant."""
    return OutboxSqs(url)
