"""RocketMQ's topics by rocketmq-python-client, as the demo's consumers read them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from broker_adapter.publishing.broker_url import BrokerUrl, host_and_port
from broker_adapter.rocketmq import NAME_SERVER_PORT
from broker_adapter.rocketmq.durability_inspection import BrokerSettings, ask
from broker_adapter.rocketmq.rocketmq_publisher import TOPIC_HEADER, topic_name
from broker_adapter.rocketmq.signature import Credentials
from outbox_core.common.errors import ConfigurationError
from outbox_demo.foreign_client_port import ReceivedMessage
from outbox_demo.plan import RunTopics

MAKE_TOPIC: Final = 17
MAKE_GROUP: Final = 200
DELETE_GROUP: Final = 207
DELETE_TOPIC: Final = 215
FORGET_TOPIC: Final = 216
"""Request codes of the remoting protocol."""

QUEUES: Final = 2
READ_AND_WRITE: Final = 6
MESSAGES_MAX: Final = 16
WAIT_SECONDS: Final = 6
"""A proxy refuses less than 5 s by default."""
INVISIBLE_SECONDS: Final = 20
"""A proxy refuses less than 10 s by default."""
SETTINGS_SECONDS_MAX: Final = 60.0
SETTINGS_POLL_SECONDS: Final = 0.5


class RocketMqTopics:
    """A ForeignClient: a consumer group for each topic that a group reads, since all consumers of one of RocketMQ's
    groups must read the same. Topics are made and removed on the brokers, which a name server lists.
    """

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        names = url.options.get("nameserver", "")
        if not names:
            raise ConfigurationError(
                "the demo makes topics on the brokers: name their name server, ?nameserver=HOST:9876"
            )
        if find_spec("rocketmq") is None:
            raise ConfigurationError("the demo reads by RocketMQ's own client: pip install rocketmq-python-client")
        self._url = url
        self._topics = topics
        self._timeout_s = url.timeout_ms / 1_000
        self._login = None if url.user is None else Credentials(url.user, url.password or "")
        self._name_servers = [host_and_port(address, NAME_SERVER_PORT) for address in names.split(",") if address]
        self._read: queue.Queue[ReceivedMessage | Exception] = queue.Queue(maxsize=MESSAGES_MAX)

    def make_topics(self) -> None:
        """Topics and groups on each broker."""
        for topic in self._topics.names:
            self._ask_brokers(
                MAKE_TOPIC,
                {
                    "topic": topic_name(topic), "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
                    "writeQueueNums": str(QUEUES), "perm": str(READ_AND_WRITE), "topicFilterType": "SINGLE_TAG",
                    "topicSysFlag": "0", "order": "false", "attributes": "+message.type=NORMAL",
                },
            )  # fmt: skip
        for topic, group in self._topics.subscriptions:
            self._ask_brokers(MAKE_GROUP, {}, msgspec.json.encode({"groupName": _group(topic, group)}))

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """A thread for each topic receives, since one that waits for messages of a topic waits for no other."""
        for topic in self._topics.read_by(group):
            consumer = self._consumer(topic, group)
            threading.Thread(target=self._receive, args=(consumer,), name=topic, daemon=True).start()
        while True:
            read = self._read.get()
            if isinstance(read, Exception):
                raise read
            yield read

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledge this delivery of it."""
        consumer, received = message.receipt
        consumer.ack(received)

    def unsettled(self) -> int:
        """Returns 0: RocketMQ shows no figure of messages that were delivered and not acknowledged."""
        return 0

    def remove_topics(self) -> None:
        """Delete topics and groups on each broker, and the topics on the name servers.

        The groups last: a broker keeps the request of a consumer that has died until it has waited long enough, and
        then makes the group anew, where the topic is still there (autoCreateSubscriptionGroup).
        """
        for topic in self._topics.names:
            self._ask_brokers(DELETE_TOPIC, {"topic": topic_name(topic)})
            for address in self._name_servers:
                self._ask(address, FORGET_TOPIC, {"topic": topic_name(topic)})
        for topic, group in self._topics.subscriptions:
            self._ask_brokers(DELETE_GROUP, {"groupName": _group(topic, group), "cleanOffset": "true"})

    def close(self) -> None:
        """Nothing: requests to brokers have a connection each, and consumers end with their process."""

    def _consumer(self, topic: str, group: str) -> Any:
        from rocketmq import ClientConfiguration, FilterExpression, SimpleConsumer
        from rocketmq import Credentials as Login

        has_tls, authorities = self._url.scheme == "rocketmqs", self._url.file("ca_file")
        if authorities is not None:
            os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = authorities  # the client takes it by no other way
        proxies = ";".join(f"{host}:{port}" for host, port in self._url.hosts)
        configuration = ClientConfiguration(proxies, Login(self._url.user, self._url.password))
        consumer = SimpleConsumer(
            configuration,
            _group(topic, group),
            {topic_name(topic): FilterExpression()},
            WAIT_SECONDS,
            tls_enable=has_tls,
        )
        consumer.startup()
        return consumer

    def _receive(self, consumer: Any) -> None:
        try:
            self._receive_all(consumer)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: the process must end by it
            self._read.put(error)

    def _receive_all(self, consumer: Any) -> None:
        while True:
            for message in _received(consumer):
                self._read.put(
                    ReceivedMessage(
                        id=message.properties["outbox-id"], topic=message.properties[TOPIC_HEADER], body=message.body,
                        receipt=(consumer, message),
                    )
                )  # fmt: skip

    def _ask_brokers(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        deadline = time.monotonic() + self._timeout_s
        for _, address in BrokerSettings(self._name_servers, login=self._login).masters(deadline):
            self._ask(address, code, fields, body)

    def _ask(self, address: tuple[str, int], code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        ask(address, code, login=self._login, timeout_s=self._timeout_s, fields=fields, body=body)


def _group(topic: str, group: str) -> str:
    return topic_name(f"{topic}.{group}")


def _received(consumer: Any) -> list[Any]:
    """A batch. A proxy refuses to deliver until it has the client's settings, which come by a stream of their own."""
    from rocketmq.v5.exception import InternalErrorException

    deadline = time.monotonic() + SETTINGS_SECONDS_MAX
    while True:
        try:
            return list(consumer.receive(MESSAGES_MAX, INVISIBLE_SECONDS) or [])
        except InternalErrorException:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(SETTINGS_POLL_SECONDS)
