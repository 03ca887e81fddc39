"""A JetStream stream by nats-py, as the demo's consumers read it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_demo.foreign_client_port import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics

T = TypeVar("T")


class JetStream:
    """A ForeignClient: one stream for all topics, a durable consumer for each group.

    Its event loop runs during its calls alone.
    """

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._url = url
        self._topics = topics
        self._name = topics.run
        self._before = f"{url.options['prefix']}." if url.options.get("prefix") else ""
        self._runner = asyncio.Runner()
        self._client = self._run(self._connect)
        self._stream = self._client.jetstream()

    def make_topics(self) -> None:
        """A stream on files, whose name is the run's."""
        subjects = [f"{self._before}{topic}" for topic in self._topics.names]
        self._run(lambda: self._stream.add_stream(name=self._name, subjects=subjects, storage=StorageType.FILE))
        for group in self._topics.groups:
            config = ConsumerConfig(
                durable_name=group,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=REDELIVERED_AFTER_MS / 1_000,
                filter_subjects=[f"{self._before}{topic}" for topic in self._topics.read_by(group)],
            )
            self._run(lambda config=config: self._stream.add_consumer(self._name, config))  # type: ignore[misc]

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Fetch; the server delivers again what was not acknowledged in time."""
        subscription = self._run(lambda: self._stream.pull_subscribe_bind(consumer=group, stream=self._name))
        while True:
            try:
                messages = self._run(lambda: subscription.fetch(MESSAGES_MAX, timeout=WAIT_MS / 1_000))
            except TimeoutError:  # the client's own subclass, or asyncio's: it raises both
                continue
            for message in messages:
                topic = message.subject.removeprefix(self._before)
                yield ReceivedMessage(id=message.headers["outbox-id"], topic=topic, body=message.data, receipt=message)

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Ack, and wait until the server has it."""
        self._run(message.receipt.ack_sync)

    def unsettled(self) -> int:
        """Messages that a consumer has pending, and those that it has not been given."""
        consumers = [
            self._run(lambda group=group: self._stream.consumer_info(self._name, group))  # type: ignore[misc]
            for group in self._topics.groups
        ]
        return sum((consumer.num_pending or 0) + (consumer.num_ack_pending or 0) for consumer in consumers)

    def remove_topics(self) -> None:
        """Delete the stream with its consumers."""
        self._run(lambda: self._stream.delete_stream(self._name))

    def close(self) -> None:
        """Close the connection and the loop."""
        self._run(self._client.close)
        self._runner.close()

    async def _connect(self) -> Any:
        url, options = self._url, self._url.options
        tls = ssl.create_default_context(cafile=url.file("ca_file")) if url.scheme == "natss" else None
        if tls is not None and (certificate := url.file("cert_file")) is not None:
            tls.load_cert_chain(certificate, url.file("key_file"))
        # A user without a password is a token, as in the adapter.
        login = {"token": url.user} if url.password is None else {"user": url.user, "password": url.password}
        return await nats.connect(
            [f"nats://{host}:{port}" for host, port in url.hosts],
            tls=tls, user_credentials=options.get("creds_file"), nkeys_seed=options.get("nkey_file"),
            inbox_prefix=options.get("inbox_prefix", "_INBOX"), **login,
        )  # fmt: skip

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        async def called() -> T:
            return await call()

        return self._runner.run(called())
