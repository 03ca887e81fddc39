"""Publishes and cancels at the nodes of a delay cluster, as clients do, and records the history of that."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import requests

from broker_adapter.http import HttpBroker
from outbox_core import Message
from outbox_core.common.errors import BrokerError
from outbox_core.messages.message import CancelStatus
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.delay_history import DelayHistory, HistoryVerdict, verdict_on
from tests.outbox_broker.cluster.recorded_target import RecordedTarget

BATCH = 10
DUE_MS_MAX = 4_000
PENDING = 20
"""Messages that are due after the test."""
_PENDING_MS = 86_400_000


class DelayLoad:
    """One client a node, until finish()."""

    def __init__(self, urls: Sequence[str], target: RecordedTarget, *, prefix: str) -> None:
        """`target`: where all nodes publish to. `prefix`: of all ids, and the seed."""
        self.history = DelayHistory()
        self._urls = urls
        self._prefix = prefix
        self._target = target
        self._is_over = threading.Event()
        self._failures: list[Exception] = []
        self._clients = [
            threading.Thread(target=self._run, args=(number, random.Random(f"{prefix}{number}")), daemon=True)
            for number in range(len(urls))
        ]
        for client in self._clients:
            client.start()

    @property
    def acknowledged(self) -> int:
        """How many messages were acknowledged so far."""
        return len(self.history.acknowledged)

    def go_on(self, messages: int) -> None:
        """Wait until so many more messages were acknowledged."""
        wanted = self.acknowledged + messages
        eventually(lambda: self._failures or self.acknowledged >= wanted, what=f"{messages} more acknowledged messages")
        assert not self._failures, self._failures

    def finish(self) -> HistoryVerdict:
        """End the clients, wait until everything came that is due, and return the verdict."""
        self._is_over.set()
        for client in self._clients:
            client.join()
        assert not self._failures, self._failures
        soon = self._soon()
        eventually(lambda: soon <= self._target.sent | self._gone(), what="all messages that are due")
        self.history.arrived(one for one in self._target.arrivals if one.id.startswith(self._prefix))
        self.history.pending = {one for one in self.history.acknowledged.keys() - soon if self._is_scheduled(one)}
        return verdict_on(self.history)

    def _soon(self) -> set[str]:
        return {one for one in self.history.acknowledged if not one.startswith(f"{self._prefix}-far-")}

    def _gone(self) -> set[str]:
        return self.history.canceled | self.history.cancels_in_doubt

    def _is_scheduled(self, message_id: str) -> bool:
        found: list[int] = []

        def is_answered() -> bool:
            with suppress(requests.RequestException):
                status = requests.get(f"{self._urls[0]}/v1/scheduled/{message_id}", timeout=60).status_code
                found.extend([status] if status in {200, 404} else [])
            return bool(found)

        eventually(is_answered, what=f"an answer on {message_id}")
        return found == [200]

    def _run(self, number: int, chosen: random.Random) -> None:
        try:
            with ExitStack() as stack:
                broker = HttpBroker(self._urls[number])
                stack.callback(broker.close)
                if number == 0:
                    self._publish(broker, [f"{self._prefix}-far-{one}" for one in range(PENDING)], lambda: _PENDING_MS)
                for batch in itertools.count():
                    if self._is_over.is_set():
                        return
                    ids = [f"{self._prefix}-{number}-{batch}-{one}" for one in range(BATCH)]
                    self._publish(broker, ids, lambda: chosen.randrange(DUE_MS_MAX))
                    self._cancel(broker, chosen.choice(ids))
                    time.sleep(0.01)
        except Exception as error:  # shown by the test
            self._failures.append(error)

    def _publish(self, broker: HttpBroker, ids: Sequence[str], due_in_ms: Callable[[], int]) -> None:
        """Publish until it is answered, or the load is over: then it stays in doubt."""
        now_ms = time.time_ns() // 1_000_000
        batch = [Message(id=one, topic="t", body=b"body", deliver_at_ms=now_ms + due_in_ms()) for one in ids]
        self.history.publishing({message.id: message.deliver_at_ms or 0 for message in batch})
        while not self._is_over.is_set():
            with suppress(BrokerError):
                results = broker.publish(batch)
                self.history.published([result.id for result in results if result.status.is_success])
                return
            time.sleep(0.01)

    def _cancel(self, broker: HttpBroker, message_id: str) -> None:
        self.history.canceling([message_id])
        with suppress(BrokerError):
            status = broker.cancel([message_id])[0]
            self.history.cancel_answered(message_id, is_canceled=status is CancelStatus.CANCELED)
