"""RocketMQ's own Java client and tools, run in this process by JPype: what makes topics and users, and reads queues.

One JVM a process, which is never ended: its threads do not hold up the interpreter's exit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jpype
import jpype.config

from tests.engines.java_server import SMALL_JVM_OPTIONS, java_home

WAIT_SECONDS: Final = 300
POLL_SECONDS: Final = 0.01
OPERATION_MS: Final = 30_000
ROUTE_MS: Final = 1_000
PULL_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """A message as RocketMQ's client reads it. `properties` are those that its users set, without RocketMQ's own."""

    queue: int
    id: str
    keys: str
    body: bytes
    properties: Mapping[str, str]
    stored_at_ms: int


def start_jvm(*, jars: Path, home: Path) -> None:
    """Start this process's JVM, which leaves signals to Python; its client logs below `home`."""
    if jpype.isJVMStarted():
        return
    jpype.config.destroy_jvm = False
    jpype.startJVM(
        "-Xrs",
        "-Xmx128m",
        *SMALL_JVM_OPTIONS,
        f"-Duser.home={home}",
        jvmpath=str(next(java_home().rglob("libjvm.so"))),
        classpath=[f"{jars}/*"],
        convertStrings=True,
    )


class JavaClient:
    """An administrator and a reader, with the login of one user."""

    def __init__(self, *, name_server: str, broker: str, user: str, password: str) -> None:
        """`name_server`, `broker`: host and port."""
        java = jpype.JClass
        hook = java("org.apache.rocketmq.acl.common.AclClientRPCHook")(
            java("org.apache.rocketmq.acl.common.SessionCredentials")(user, password)
        )
        self._broker = broker
        self._admin = java("org.apache.rocketmq.tools.admin.DefaultMQAdminExt")(hook, OPERATION_MS)
        self._reader = java("org.apache.rocketmq.client.consumer.DefaultMQPullConsumer")("plain-reader", hook)
        for client in (self._admin, self._reader):
            client.setNamesrvAddr(name_server)
            client.setPollNameServerInterval(ROUTE_MS)
            client.start()
        self._own_properties = java("org.apache.rocketmq.common.message.MessageConst").STRING_HASH_SET

    def make_topic(self, topic: str, *, kind: str, queues: int, permission: int = 6) -> None:
        """Make a topic of this message type, or change it; returns when the name server knows it."""
        config = jpype.JClass("org.apache.rocketmq.common.TopicConfig")(topic, queues, queues, permission)
        attributes = jpype.JClass("java.util.HashMap")()
        attributes.put("+message.type", kind)
        config.setAttributes(attributes)
        _again(lambda: self._admin.createAndUpdateTopicConfig(self._broker, config))
        _again(lambda: self._admin.examineTopicRouteInfo(topic))

    def make_group(self, group: str) -> None:
        """Make a consumer group, which has to be there before its consumers."""
        config = jpype.JClass("org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig")()
        config.setGroupName(group)
        _again(lambda: self._admin.createAndUpdateSubscriptionGroupConfig(self._broker, config))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages and offsets."""
        brokers = jpype.JClass("java.util.HashSet")()
        brokers.add(self._broker)
        self._admin.deleteTopicInBroker(brokers, topic)

    def names(self) -> list[str]:
        """Of all topics that the name server knows, and of all groups of the broker."""
        groups = self._admin.getAllSubscriptionGroup(self._broker, OPERATION_MS).getSubscriptionGroupTable()
        return [str(name) for name in (*self._admin.fetchAllTopicList().getTopicList(), *groups.keySet())]

    def make_user(self, user: str, password: str) -> None:
        """Make a user without any rights."""
        self._admin.createUser(self._broker, user, password, "Normal")

    def allow_publish(self, user: str, topic: str) -> None:
        """Let a user publish to one topic."""
        allow = jpype.JClass("java.util.ArrayList")
        resources, actions = allow(), allow()
        resources.add(f"Topic:{topic}")
        actions.add("Pub")
        self._admin.createAcl(self._broker, f"User:{user}", resources, actions, allow(), "Allow")

    def set_broker(self, name: str, value: object) -> None:
        """Change a setting of the broker while it runs."""
        properties = jpype.JClass("java.util.Properties")()
        properties.setProperty(name, str(value))
        self._admin.updateBrokerConfig(self._broker, properties)

    def is_registered(self) -> bool:
        """Whether the name server knows the broker, and the broker answers."""
        try:
            return len(self._admin.getBrokerConfig(self._broker)) > 0 and self._cluster_is_known()
        except jpype.JException:
            return False

    def unsettled(self, topic: str, group: str) -> int:
        """How many messages of the topic the group has not acknowledged."""
        try:
            stats = self._admin.examineConsumeStats(group, topic)
        except jpype.JException:  # of a group that has not read yet
            return sum(self._end(queue) for queue in self._queues(topic))
        return int(stats.computeTotalDiff())

    def read(self, topic: str) -> list[QueuedMessage]:
        """All messages of a topic that are acknowledged by now, queue after queue."""
        self._wait_until_dispatched()
        return [message for queue in self._queues(topic) for message in self._read_queue(queue)]

    def close(self) -> None:
        """End the connections."""
        self._reader.shutdown()
        self._admin.shutdown()

    def _wait_until_dispatched(self) -> None:
        """Wait until the queues have what the broker's log has now: it acknowledges a message that is in the log, and
        puts it into its queue by another thread.
        """
        end, dispatched = _again(self._log_ends)
        deadline = time.monotonic() + WAIT_SECONDS
        while dispatched < end:
            assert time.monotonic() < deadline, f"the queues have the log up to {dispatched}, and not up to {end}"
            threading.Event().wait(POLL_SECONDS)
            _, dispatched = _again(self._log_ends)

    def _log_ends(self) -> tuple[int, int]:
        """Where the broker's log ends, and the place up to which the queues have it, or one before that."""
        figures = self._admin.fetchBrokerRuntimeStats(self._broker).getTable()
        end = int(figures.get("commitLogMaxOffset"))
        return end, end - int(figures.get("dispatchBehindBytes"))

    def _cluster_is_known(self) -> bool:
        return len(self._admin.examineBrokerClusterInfo().getBrokerAddrTable()) > 0

    def _queues(self, topic: str) -> list[Any]:
        return sorted(_again(lambda: self._reader.fetchSubscribeMessageQueues(topic)), key=lambda it: it.getQueueId())

    def _end(self, queue: Any) -> int:
        return int(_again(lambda: self._reader.maxOffset(queue)))

    def _read_queue(self, queue: Any) -> list[QueuedMessage]:
        place, end = 0, self._end(queue)
        found: list[QueuedMessage] = []
        while place < end:
            pulled = _again(lambda place=place: self._reader.pull(queue, "*", place, PULL_MAX))
            found += [self._message(one) for one in pulled.getMsgFoundList() or []]
            place = int(pulled.getNextBeginOffset())
        return found

    def _message(self, one: Any) -> QueuedMessage:
        properties = {str(name): str(value) for name, value in dict(one.getProperties()).items()}
        return QueuedMessage(
            queue=int(one.getQueueId()),
            id=str(one.getMsgId()),
            keys=str(one.getKeys()),
            body=bytes(one.getBody()),
            properties={name: text for name, text in properties.items() if not self._own_properties.contains(name)},
            stored_at_ms=int(one.getStoreTimestamp()),
        )


def _again(call: Any) -> Any:
    """Call until it goes well: a client that has lost its broker finds it again in its own time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return call()
        except jpype.JException as error:
            if time.monotonic() > deadline:
                raise RuntimeError(str(error)) from None
        threading.Event().wait(POLL_SECONDS)
