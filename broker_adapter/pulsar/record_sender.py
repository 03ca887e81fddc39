"""Wraps one Pulsar client with a producer for each topic; every call has a deadline."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import msgspec
import pulsar

from broker_adapter.publishing.treatment import ONE_MESSAGE
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.errors import exception_for, is_of_message, treatment_of
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.limits import BATCH_MESSAGES_MAX

PRODUCERS_MAX: Final = 1_000
"""How many topics keep their producer; the one that was idle longest makes room."""
SUCCESS: Final = "Ok"
_END_SECONDS_MAX: Final = 5


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
        """Connects when it is first asked for a producer."""
        self._clock = clock
        self._what = f"Pulsar at {settings.addresses}"
        self._timeout_ms = settings.timeout_ms
        self._producers: OrderedDict[str, Any] = OrderedDict()
        self._client = pulsar_client(settings)
        self._creating: list[threading.Thread] = []
        """Threads that wait in the client for a producer; ended ones go when the next one begins."""
        # The client's threads call Python: it must end before the interpreter does, and is not to be freed while open.
        self._shutdown = weakref.finalize(self, _shut_down, self._client, self._creating)

    def store(self, records: Sequence[PulsarRecord], answers: dict[int, str | None], *, deadline_ms: int) -> None:
        """Send records in this order, and wait; fills in an answer for each, by its index: None where it is durable, or
        its result's name.

        Raises BrokerUnavailable, StorageFailed or NotAuthenticated where one of them is in doubt: those have no answer.
        """
        receipts = Receipts()
        outstanding = 0
        refused: dict[str, str] = {}
        for index, record in enumerate(records):
            if record.topic not in refused:
                try:
                    self._send(record, partial(receipts.add, index), deadline_ms=deadline_ms)
                    outstanding += 1
                    continue
                except pulsar.PulsarException as error:
                    result = self._checked(type(error).__name__)
                if is_of_message(result):
                    answers[index] = result
                    continue
                # All of the topic's that follow have the same fate: otherwise one of them could go before this one.
                refused[record.topic] = result
            answers[index] = refused[record.topic]
        failure: BrokerError | None = None
        while outstanding:
            for index, result in self._next_receipts(receipts, outstanding, deadline_ms=deadline_ms):
                outstanding -= 1
                try:
                    answers[index] = None if result == SUCCESS else self._checked(result)
                except BrokerError as error:
                    failure = error
                if result != SUCCESS and not is_of_message(result):
                    self._producers.pop(records[index].topic, None)  # it may be what was wrong
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Drop what is queued, and end the connections and threads."""
        self._producers.clear()
        self._shutdown()

    def leave_to_parent(self) -> None:
        """Never free the client in a forked child: that would wait forever for threads that are not there."""
        self._shutdown.detach()
        for kept in (self._client, self._producers):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

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
        before: so it waits in a thread, which ends with the client.
        """
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise exception_for("Timeout", what=self._what)
        create = partial(
            self._client.create_producer,
            topic,
            send_timeout_millis=self._timeout_ms,
            max_pending_messages=BATCH_MESSAGES_MAX,
            block_if_queue_full=True,
            batching_enabled=False,
        )
        created: Future[Any] = Future()
        thread = threading.Thread(target=_complete, args=(created, create), name="outbox-pulsar", daemon=True)
        self._creating[:] = [*(creating for creating in self._creating if creating.is_alive()), thread]
        thread.start()
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


def _shut_down(client: Any, creating: Sequence[threading.Thread]) -> None:
    """End the client, and wait for what it lets go: a thread that came back from it into an interpreter that is ending
    would abort the process.
    """
    client.shutdown()
    for thread in tuple(creating):
        if thread.ident is not None:
            thread.join(_END_SECONDS_MAX)


def _complete(created: Future[Any], create: Callable[[], Any]) -> None:
    try:
        created.set_result(create())
    except Exception as error:  # noqa: BLE001 - the thread's boundary: who waits learns of it
        created.set_exception(error)


def pulsar_client(settings: ClientSettings) -> Any:
    """Pulsar's own client, with the settings of a URL."""
    return pulsar.Client(
        settings.service_url,
        authentication=_authentication(settings),
        operation_timeout_seconds=max(1, settings.timeout_ms // 1000),
        connection_timeout_ms=settings.timeout_ms,
        tls_trust_certs_file_path=settings.ca_file,
        tls_validate_hostname=True,
        tls_certificate_file_path=settings.cert_file,
        tls_private_key_file_path=settings.key_file,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),  # by default it writes to stdout
    )


def _authentication(settings: ClientSettings) -> object:
    if settings.token is not None:
        return pulsar.AuthenticationToken(settings.token)
    if settings.user is not None:
        return pulsar.AuthenticationBasic(settings.user, settings.password)
    if settings.cert_file is not None:
        return pulsar.AuthenticationTLS(settings.cert_file, settings.key_file)
    return None
