"""Sends records by one idempotent producer of librdkafka, and waits for their reports; every call has a deadline."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import ClusterMetadata, TopicMetadata

from broker_adapter.kafka.errors import exception_for, is_of_all_sent_together, treatment_of
from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError

SLICE_MS: Final = 250
"""How long to wait without a look at what librdkafka reports: a login that was refused is known no other way."""
SLICE_MS_MAX: Final = 4_000
METADATA_MS: Final = 60_000
ANY_PARTITION: Final = -1


class KafkaRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message as Kafka takes it. Without a partition, the key's hash chooses one."""

    topic: str
    key: bytes | None
    value: bytes
    headers: list[tuple[str, str | bytes | None]]
    timestamp_ms: int
    partition: int = ANY_PARTITION


class KafkaReport(msgspec.Struct, frozen=True, gc=False):
    """What became of a record: no error where it is durable. One that librdkafka refused itself was not sent."""

    error: KafkaError | None
    was_sent: bool = True

    @property
    def is_shared(self) -> bool:
        """Whether the error is that of all records that were sent together, for one of them that is not known."""
        return self.was_sent and self.error is not None and is_of_all_sent_together(self.error)


class KafkaRecordSender:
    """Used by one thread at a time. After any exception it is of no use any more: close it."""

    def __init__(self, settings: Mapping[str, object], *, addresses: str, clock: Clock) -> None:
        """`addresses`: the servers', for messages. Connects in the background. Raises BrokerUnavailable where
        librdkafka cannot use its settings, mostly since certificates cannot be read.
        """
        self._clock = clock
        self._addresses = addresses
        self._reported: KafkaError | None = None
        self._topics: dict[str, tuple[TopicMetadata, int]] = {}
        try:
            self.handle: Producer = Producer({**settings, "error_cb": self._report})
        except KafkaException as error:
            self._raise(error.args[0])

    def topic(self, name: str, *, deadline_ms: int) -> TopicMetadata:
        """A topic with its partitions or its error, at most METADATA_MS old; after an error it is asked for anew."""
        now_ms = self._clock.monotonic_ms()
        topic, asked_at_ms = self._topics.get(name, (None, 0))
        if topic is None or now_ms - asked_at_ms > METADATA_MS:
            topic = self.metadata(name, deadline_ms=deadline_ms).topics[name]
            self._topics.pop(name, None)
            if topic.error is None:
                self._topics[name] = (topic, now_ms)
        return topic

    def metadata(self, topic: str | None, *, deadline_ms: int) -> ClusterMetadata:
        """The cluster, with one topic or all, as a server sees them now. Raises what librdkafka reported."""
        slice_ms = SLICE_MS
        while True:
            try:
                return self._list(topic, self._seconds(slice_ms, deadline_ms))
            except KafkaException as error:
                self._serve(self.handle.poll, 0)
                self._check(error.args[0], deadline_ms=deadline_ms)
            slice_ms = min(2 * slice_ms, SLICE_MS_MAX)

    def store(self, records: Sequence[KafkaRecord], *, deadline_ms: int) -> list[KafkaReport]:
        """Send records in this order, and wait; one delivery report a record.

        Raises BrokerUnavailable where the time was over before all were reported. Then nothing of them is left in
        librdkafka's queue to be sent later.
        """
        if not records:
            return []
        reports: list[KafkaReport] = [KafkaReport(_PENDING)] * len(records)
        for index, record in enumerate(records):
            try:
                self._produce(record, partial(_note, reports, index), deadline_ms=deadline_ms)
            except KafkaException as error:
                reports[index] = KafkaReport(error.args[0], was_sent=False)
        self._flush(deadline_ms)
        if any(report.error is not None for report in reports):
            self._topics.clear()  # they may be what was wrong
        return reports

    def failure(self, error: KafkaError) -> BrokerError:
        """Returns the exception for what concerns more than one record: its own words, and what librdkafka said last
        where that says more.
        """
        reported = self._reported
        reason = None if reported is None or reported is error else reported.str()
        return exception_for(error, what=f"Kafka at {self._addresses}", reason=reason)

    def close(self) -> None:
        """Drop what is queued, and end the connections and threads."""
        for end in (self.handle.purge, self.handle.close):
            with contextlib.suppress(KafkaException):  # what has ended the producer, where nobody was told of it yet
                end()

    def leave_to_parent(self) -> None:
        """Never free the producer in a forked child: that would wait forever for threads that are not there."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.handle))

    def _list(self, topic: str | None, seconds: float) -> ClusterMetadata:
        metadata: ClusterMetadata = (
            self.handle.list_topics(topic, seconds) if topic else self.handle.list_topics(timeout=seconds)
        )
        return metadata

    def _produce(
        self, record: KafkaRecord, report: Callable[[KafkaError | None, Message], None], *, deadline_ms: int
    ) -> None:
        while True:
            try:
                return self.handle.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    headers=record.headers,
                    timestamp=record.timestamp_ms,
                    on_delivery=report,
                )
            except BufferError:  # librdkafka's queue is full: delivery reports make room
                self._serve(self.handle.poll, self._seconds(SLICE_MS, deadline_ms))
                self._check(KafkaError(KafkaError._QUEUE_FULL), deadline_ms=deadline_ms)  # noqa: SLF001

    def _flush(self, deadline_ms: int) -> None:
        while self._serve(self.handle.flush, self._seconds(SLICE_MS, deadline_ms)):
            self._check(KafkaError(KafkaError._MSG_TIMED_OUT), deadline_ms=deadline_ms)  # noqa: SLF001

    def _serve(self, call: Callable[[float], int], seconds: float) -> int:
        """Have librdkafka report. What has ended the producer for good is raised there, and reported nowhere else."""
        try:
            return call(seconds)
        except KafkaException as error:
            self._raise(error.args[0])

    def _check(self, error: KafkaError, *, deadline_ms: int) -> None:
        """Raise where the time is over, or where waiting cannot help."""
        if self._reported is not None and treatment_of(self._reported) is Treatment.NOT_AUTHENTICATED:
            self._raise(self._reported)
        if self._clock.monotonic_ms() >= deadline_ms:
            self._raise(error)

    def _raise(self, error: KafkaError) -> NoReturn:
        raise self.failure(error)

    def _report(self, error: KafkaError) -> None:
        """Keeps what librdkafka says last, but not that all brokers are down, which is said after each reason."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001
            self._reported = error

    def _seconds(self, slice_ms: int, deadline_ms: int) -> float:
        return max(1, min(slice_ms, deadline_ms - self._clock.monotonic_ms())) / 1000


def _note(reports: list[KafkaReport], index: int, error: KafkaError | None, _: Message) -> None:
    reports[index] = KafkaReport(error)


_PENDING: Final = KafkaError(KafkaError._IN_PROGRESS)  # noqa: SLF001
