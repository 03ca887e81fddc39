"""The guide's consumer: Redis's own client and the inbox. It dies at each step, and the effect happens once."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import pytest
from sqlalchemy.orm import Session

from outbox import Inbox
from outbox_core.messages.broker_port import Broker
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.redis.redis_engine import RedisEngine
from tests.outbox.shop import Payment, Shop

GROUP: Final = "printer"


class DiedError(Exception):
    """The consumer ends here."""


class Reader:
    """Reads a stream in a group and enters a payment for each message."""

    def __init__(self, shop: Shop, client: Any, topic: str) -> None:
        self._engine = shop.engine
        self._client = client
        self._topic = topic
        self._stream = f"outbox:{{{topic}}}"
        self._inbox = Inbox(shop.engine, schema=shop.database.schema)
        client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)

    def read(self, *, dies: str = "") -> int:
        """Handle what was left to nobody and what is new; returns how much that was."""
        _, left, _ = self._client.xautoclaim(self._stream, GROUP, "one", min_idle_time=0)
        new = self._client.xreadgroup(GROUP, "one", {self._stream: ">"}) or []
        entries = [*left, *(entry for _, of_stream in new for entry in of_stream)]
        for place, fields in entries:
            self._handle(fields, dies=dies)
            if dies == "before the acknowledgement":
                raise DiedError
            self._client.xack(self._stream, GROUP, place)
        return len(entries)

    def _handle(self, fields: dict[bytes, bytes], *, dies: str) -> None:
        def pay(session: Session) -> None:
            session.add(Payment(id=int(fields[b"body"])))

        with Session(self._engine) as session, session.begin():
            self._inbox.handle(session, fields[b"id"].decode(), GROUP, pay, topic=self._topic)
            session.flush()
            if dies == "before the commit":
                raise DiedError


@pytest.mark.parametrize("step", ["before the commit", "before the acknowledgement"])
def test_a_consumer_that_dies_has_its_effect_once(
    sqlite_shop: Shop, engine: RedisEngine, foreign: Broker, made_topic: str, step: str
) -> None:
    with contextlib.closing(engine.server.client) as client:
        reader = Reader(sqlite_shop, client, made_topic)
        foreign.publish([message(made_topic, n) for n in range(3)])

        with pytest.raises(DiedError):
            reader.read(dies=step)
        assert reader.read() == 3
        assert reader.read() == 0

    assert sqlite_shop.payments() == [0, 1, 2]


def test_a_repeat_that_redis_no_longer_knows_is_dropped_by_the_inbox(
    sqlite_shop: Shop, engine: RedisEngine, foreign: Broker, made_topic: str
) -> None:
    with contextlib.closing(engine.server.client) as client:
        reader = Reader(sqlite_shop, client, made_topic)
        for _ in range(2):
            foreign.publish([message(made_topic, 0)])
            client.delete(f"outbox:{{{made_topic}}}:ids")

        assert reader.read() == 2

    assert sqlite_shop.payments() == [0]
