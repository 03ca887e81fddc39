"""Remembers existing topics, to distinguish an outage of all brokers from a topic that never existed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from broker_adapter.rocketmq.errors import Refusal, exception_for
from broker_adapter.rocketmq.proxy_connection import ProxyConnection

TOPICS_MAX: Final = 1_000
ASKED_MAX: Final = 8
MISSING: Final = "TOPIC_NOT_FOUND"


class OutageDetector:
    """Thread-safe. Seconds after the last broker died a name server says of each topic that it is not there."""

    def __init__(self, *, addresses: str) -> None:
        """`addresses`: the proxies'."""
        self._addresses = addresses
        self._names: dict[str, None] = {}

    def add(self, topics: Iterable[str]) -> None:
        """These are there now."""
        self._names = dict.fromkeys([*self._names, *topics][-TOPICS_MAX:])

    def check_outage(self, missing: Refusal, router: ProxyConnection, *, deadline_ms: int) -> None:
        """Raise BrokerUnavailable where a topic is missing, and so are all that were there: that is the brokers' fault.

        Not where none was ever there. A few are asked: the brokers that are alive serve most topics.
        """
        router.forget_routes()
        asked_topics = list(self._names)[-ASKED_MAX:]
        answers = [router.route(topic, deadline_ms=deadline_ms) for topic in asked_topics]
        if answers and all(isinstance(answer, Refusal) and answer.code == MISSING for answer in answers):
            text = f"no broker serves a topic that was there before: {missing.words}"
            raise exception_for(Refusal("NO_BROKER", text), addresses=self._addresses)
