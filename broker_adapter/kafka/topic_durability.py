"""Finds settings of a topic that would let Kafka lose a confirmed message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigEntry, ConfigResource, ResourceType, TopicMetadata

from broker_adapter.kafka.client_settings import KafkaServers
from broker_adapter.kafka.errors import exception_for, explained, treatment_of
from broker_adapter.kafka.record_sender import KafkaRecordSender
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.treatment import ONE_MESSAGE
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Inspection, Weakness

Settings = Mapping[str, str]

REPLICAS_MIN: Final = 2
SECONDS_MIN: Final = 0.1


def inspect_topics(
    pool: ClientPool[KafkaRecordSender],
    topics: Sequence[str],
    *,
    servers: KafkaServers,
    product: str,
    clock: Clock,
    timeout_ms: int,
) -> Inspection:
    """Ask the servers. Kafka's protocol does not name a release: the version is the cluster.

    Raises BrokerUnavailable, NotAuthorized.
    """
    deadline_ms = clock.monotonic_ms() + timeout_ms
    with pool.client() as connection:
        cluster = connection.metadata(None, deadline_ms=deadline_ms)
        metadata = {topic: connection.topic(topic, deadline_ms=deadline_ms) for topic in topics}
    there = [topic for topic, topic_metadata in metadata.items() if topic_metadata.error is None]
    left_s = max(SECONDS_MIN, (deadline_ms - clock.monotonic_ms()) / 1000)
    settings = _settings(servers, there, timeout_s=left_s) if there else {}
    weaknesses = [weakness for topic in topics for weakness in _weaknesses(metadata[topic], settings.get(topic, {}))]
    version = f"cluster {cluster.cluster_id} of {len(cluster.brokers)} brokers"
    return Inspection(product=product, version=version, weaknesses=tuple(weaknesses))


def _settings(servers: KafkaServers, topics: Sequence[str], *, timeout_s: float) -> dict[str, Settings | KafkaError]:
    """The settings of topics as they take effect, with the cluster's defaults; why, where they are refused for one."""
    admin = AdminClient({**servers.settings})  # type: ignore[dict-item]
    answers = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, topic) for topic in topics], request_timeout=timeout_s
    )
    return {resource.name: _answer(servers, answer, timeout_s=timeout_s) for resource, answer in answers.items()}


def _answer(
    servers: KafkaServers, answer: Future[dict[str, ConfigEntry]], *, timeout_s: float
) -> Settings | KafkaError:
    try:
        return {name: str(entry.value) for name, entry in answer.result(timeout_s).items()}
    except KafkaException as error:
        refusal: KafkaError = error.args[0]
        if treatment_of(refusal) in ONE_MESSAGE:
            return refusal
        raise exception_for(refusal, what=f"the settings of topics of Kafka at {servers.addresses}") from error
    except TimeoutError as error:  # of the future, which may come before librdkafka's own
        raise BrokerUnavailable(
            f"Kafka at {servers.addresses} did not answer for the settings of topics in time"
        ) from error


def _weaknesses(topic: TopicMetadata, settings: Settings | KafkaError) -> Iterator[Weakness]:
    weakness = partial(Weakness, subject=str(topic.topic), topic=str(topic.topic))
    if topic.error is not None:
        yield weakness(problem=f"nothing can be published: {explained(topic.error)}", cure="create it")
        return
    if min(len(partition.replicas) for partition in topic.partitions.values()) < REPLICAS_MIN:
        problem = "it has one replica, and is lost with one broker"
        yield weakness(problem=problem, cure="replicate it 3 times with kafka-reassign-partitions.sh")
    if isinstance(settings, KafkaError):
        problem = f"its settings are unknown: {settings.str()} ({settings.name()})"
        yield weakness(problem=problem, cure="allow the user DescribeConfigs on it with kafka-acls.sh")
        return
    if int(settings.get("min.insync.replicas", REPLICAS_MIN)) < REPLICAS_MIN:
        problem = "a message is confirmed when one broker alone has it"
        yield weakness(problem=problem, cure="set min.insync.replicas=2 with kafka-configs.sh")
    if settings.get("unclean.leader.election.enable") == "true":
        problem = "a replica that lacks confirmed messages may become the leader"
        yield weakness(problem=problem, cure="set unclean.leader.election.enable=false")
