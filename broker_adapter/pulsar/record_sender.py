"""Wraps one Pulsar client with a producer for each topic; every call has a deadline."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import pulsar

from broker_adapter.publishing.treatment import ONE_MESSAGE
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.errors import exception_for, is_of_message, treatment_of
from broker_adapter.pulsar.open_client import OpenClient
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.limits import BATCH_MESSAGES_MAX

PRODUCERS_MAX: Final = 1_000
"""How many topics keep their producer; the one that was idle longest makes room."""
SUCCESS: Final = "Ok"
_SEND_TIMEOUTS: Final = 2
"""Of a call's, the client's time-out of a message."""


class PulsarRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message as Pulsar takes it; `topic` is a full name."""

    topic: str
    key: str | None
    body: bytes
    properties: Mapping[str, str]
    event_timestamp_ms: int | None


class Receipts:
    """Passes receipts from the client's threads to the one that waits, which is woken once and not for each of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: list[tuple[int, str]] = []
        self._has_error = False
        self._wanted = 0

    def add(self, index: int, result: Any, _message_id: object) -> None:
        """Keep the result of a message. Called by threads of the client."""
        name = result.name
        with self._changed:
            self._found.append((index, name))
            self._has_error = self._has_error or name != SUCCESS
            if self._has_error or len(self._found) >= self._wanted > 0:
                self._changed.notify()

    def take(self, count: int, *, timeout_s: float) -> list[tuple[int, str]]:
        """What has come once there are `count`, or an error is among them, or the time is over."""
        with self._changed:
            self._wanted = count
            self._changed.wait_for(lambda: self._has_error or len(self._found) >= count, timeout_s)
            receipts, self._found, self._has_error = self._found, [], False
        return receipts


class PulsarRecordSender:
    """Used by one thread at a time. After any exception it is of no use any more: close it."""

    def __init__(self, settings: ClientSettings, *, clock: Clock) -> None:
        """Connects when it is first asked for a producer. Raises BrokerUnavailable while the interpreter ends."""
        self._clock = clock
        self._what = f"Pulsar at {settings.addresses}"
        self._timeout_ms = settings.timeout_ms
        self._producers: OrderedDict[str, Any] = OrderedDict()
        self._client = OpenClient(settings, clock=clock)
        self._end = weakref.finalize(self, self._client.end)
        self._end.atexit = False  # end_clients_at_exit() has it end later

    def store(self, records: Sequence[PulsarRecord], answers: dict[int, str | None], *, deadline_ms: int) -> None:
        """Send records in this order, and wait; fills in an answer for each, by its index: None where it is durable, or
        its result's name.

        Raises BrokerUnavailable, StorageFailed or NotAuthenticated where one of them is in doubt: those have no answer.
        """
        with self._client.in_use:
            self._store(records, answers, deadline_ms=deadline_ms)

    def close(self) -> None:
        """Drop what is queued, and end the connections and threads: in the background where the client is still making
        a producer that nobody waits for any more.
        """
        self._producers.clear()
        self._end()

    def leave_to_parent(self) -> None:
        """Never free the producers in a forked child, as the client is not: they would wait forever for its threads."""
        self._end.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._producers))

    def _store(self, records: Sequence[PulsarRecord], answers: dict[int, str | None], *, deadline_ms: int) -> None:
        receipts = Receipts()
        self._client.receipts = weakref.ref(receipts)
        outstanding = 0
        refused: dict[str, str] = {}
        for index, record in enumerate(records):
            if record.topic not in refused:
                try:
                    self._send(record, partial(receipts.add, index), deadline_ms=deadline_ms)
                    outstanding += 1
                    continue
                except pulsar.PulsarException as error:
                    result_name = self._checked(type(error).__name__)
                if is_of_message(result_name):
                    answers[index] = result_name
                    continue
                # All of the topic's that follow have the same fate: otherwise one of them could go before this one.
                refused[record.topic] = result_name
            answers[index] = refused[record.topic]
        failure: BrokerError | None = None
        while outstanding:
            for index, result_name in self._next_receipts(receipts, outstanding, deadline_ms=deadline_ms):
                outstanding -= 1
                try:
                    answers[index] = None if result_name == SUCCESS else self._checked(result_name)
                except BrokerError as error:
                    failure = error
                if result_name != SUCCESS and not is_of_message(result_name):
                    self._producers.pop(records[index].topic, None)  # it may be what was wrong
            if failure is not None:
                raise failure

    def _send(self, record: PulsarRecord, noted: Any, *, deadline_ms: int) -> None:
        self._producer(record.topic, deadline_ms=deadline_ms).send_async(
            record.body,
            noted,
            properties=dict(record.properties),
            partition_key=record.key,
            event_timestamp=record.event_timestamp_ms,
        )

    def _producer(self, topic: str, *, deadline_ms: int) -> Any:
        """Returns a producer without batching: consumers would get a batch as a whole, again and again.

        Of 20 messages in one batch, one that is not acknowledged brings all 20 again, or makes 20 dead letters; of 500,
        one consumer of two gets all; of six keys, one consumer of three by key. An index of acknowledgements within the
        batch must be enabled in servers and in each consumer; batches by key mend the last alone. That is worth more to
        consumers than the rate: 43,800 messages a second in batches, 16,000 by this adapter.
        """
        if topic in self._producers:
            self._producers.move_to_end(topic)
            return self._producers[topic]
        self._producers[topic] = producer = self._created_producer(topic, deadline_ms=deadline_ms)
        if len(self._producers) > PRODUCERS_MAX:
            self._producers.popitem(last=False)
        return producer

    def _created_producer(self, topic: str, *, deadline_ms: int) -> Any:
        """The client waits as long as its own time-out says, which is longer than a call has left that did something
        before: so a thread waits in it.
        """
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise exception_for("Timeout", what=self._what)
        created = self._client.begin_producer(
            topic,
            # Behind the end of any call: the client would report each message by itself, while it is shut down in the
            # thread that has the interpreter, which then stood still for ten seconds.
            send_timeout_millis=_SEND_TIMEOUTS * self._timeout_ms,
            max_pending_messages=BATCH_MESSAGES_MAX,
            block_if_queue_full=True,
            batching_enabled=False,
        )
        try:
            return created.result(left_ms / 1000)
        except TimeoutError as error:
            raise exception_for("Timeout", what=self._what) from error

    def _next_receipts(self, receipts: Receipts, outstanding: int, *, deadline_ms: int) -> list[tuple[int, str]]:
        left_ms = max(1, deadline_ms - self._clock.monotonic_ms())
        new_receipts = receipts.take(outstanding, timeout_s=left_ms / 1000)
        if not new_receipts:
            raise exception_for("Timeout", what=self._what)
        return new_receipts

    def _checked(self, result: str) -> str:
        """Raise what concerns the whole batch."""
        if treatment_of(result) not in ONE_MESSAGE:
            raise exception_for(result, what=self._what)
        return result
