"""A Kafka cluster of the tests' own (KRaft): nodes on free ports of 127.0.0.1, one process each, to kill and pause."""

from __future__ import annotations

import base64
import re
import subprocess
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from outbox_demo.ports import free_port
from tests.broker_adapter.http.test_tls import certificate
from tests.engines.java_server import JavaProgram, JavaServer, java_home
from tests.engines.kafka.node_links import NodeLinks
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy

HOST: Final = "127.0.0.1"
USER: Final = "alice"
PASSWORD: Final = "right-password"
KEYSTORE_PASSWORD: Final = "keystore-password"
ANSWER_SECONDS_MAX: Final = 60
PROBE_SECONDS_MAX: Final = 1
PROXIED: Final = "PROXIED"
CLIENT_SSL: Final = "CLIENT_SSL"
LISTENERS: Final = ("PLAINTEXT", "SASL_PLAINTEXT", "SASL_SSL", "SSL", CLIENT_SSL, PROXIED)
"""For clients. CLIENT_SSL wants a certificate of theirs."""
LINKED: Final = ("BROKER", "CONTROLLER")
"""For other nodes."""
HEAP_MB: Final = 256
PERMISSIONS: Final = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
"""Settings of nodes whose users may do what they were allowed alone. Whoever comes without a login may do all."""

_LOGGING = """\
<Configuration status="error">
  <Appenders><Console name="log"><PatternLayout pattern="%d{ISO8601} %p %c{1} %m%n"/></Console></Appenders>
  <Loggers>
    <Logger name="org.apache.kafka.controller.QuorumController" level="info"/>
    <Root level="warn"><AppenderRef ref="log"/></Root>
  </Loggers>
</Configuration>
"""
_ACTIVE = re.compile(r"^(\S+) INFO .*\[QuorumController id=(\d+)\] Becoming the active controller", re.MULTILINE)


class KafkaCluster:
    """Nodes 1 to `nodes`, each a broker and a controller. Each broker has one port for each of LISTENERS; PROXIED is
    advertised by the address of a proxy, through which its clients come. Nodes reach each other through links.

    `settings` come after ours, so they win. The data stay between a kill and a start.
    """

    def __init__(self, *, jars: Path, folder: Path, nodes: int, settings: Mapping[str, object] | None = None) -> None:
        self._folder = folder
        self._nodes = range(1, nodes + 1)
        self._ports = {(node, name): free_port(HOST) for node in self._nodes for name in (*LISTENERS, *LINKED)}
        self._links = NodeLinks({node: [self._ports[node, name] for name in LINKED] for node in self._nodes})
        self._proxies = {node: CuttingTcpProxy(self._ports[node, PROXIED]) for node in self._nodes}
        self._settings = settings or {}
        (folder / "log4j2.xml").write_text(_LOGGING)
        _make_keystore(folder / "keystore.p12", folder / "ca.pem")
        self.client_tls = certificate(folder, address=HOST)
        """The certificate that CLIENT_SSL wants, and its key."""
        self._jars = jars
        self._format()
        self._servers = {node: self._server(node) for node in self._nodes}
        self._admin: AdminClient | None = None

    @property
    def nodes(self) -> range:
        """The numbers of its nodes."""
        return self._nodes

    @property
    def ca_file(self) -> Path:
        """The certificate that its TLS listeners can be checked by."""
        return self._folder / "ca.pem"

    @property
    def admin(self) -> AdminClient:
        """Kafka's own admin client, on the plain listeners."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.addresses(), "log_level": 0})
        return self._admin

    def addresses(self, listener: str = "PLAINTEXT") -> str:
        """Host and port of this listener on each node, with commas between, as clients come to it."""
        return ",".join(f"{HOST}:{self._advertised_port(node, listener)}" for node in self._nodes)

    def proxy(self, node: int) -> CuttingTcpProxy:
        """What clients of a node's PROXIED listener come through."""
        return self._proxies[node]

    def start(self) -> None:
        """Start what does not run, let go on what is paused, and mend the links; returns when all nodes serve, and all
        replicas are in sync. Main thread only.
        """
        self._links.heal()
        for server in self._servers.values():
            if server.is_started:
                server.resume()
            else:
                server.start()
        for node, server in self._servers.items():
            server.wait_until(partial(self._sees_all_in_sync, node))

    def kill9(self, *nodes: int) -> None:
        """End nodes as a crash would; all where none is named."""
        for node in nodes or self._nodes:
            self._servers[node].kill9()

    def pause(self, node: int) -> None:
        """Stop a node's process by SIGSTOP: its connections stay open and nothing answers. `start` lets it go on."""
        self._servers[node].pause()

    def isolate(self, node: int) -> None:
        """Cut a node off from the others, both ways, until `start`. Its clients reach it."""
        self._links.isolate(node)

    def make_topic(self, topic: str, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Make a topic, replicated to every node; returns when each of them knows it."""
        new = NewTopic(topic, partitions, len(self._nodes), config=dict(settings or {}))
        self.admin.create_topics([new], operation_timeout=ANSWER_SECONDS_MAX)[topic].result(ANSWER_SECONDS_MAX)
        for node, server in self._servers.items():
            server.wait_until(partial(_knows, self._admin_of(node), topic, partitions=partitions))

    def set_topic(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(ANSWER_SECONDS_MAX)

    def make_scram_user(self) -> None:
        """Let USER log in by SCRAM as well; PLAIN knows it from the start."""
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credentials = ScramCredentialInfo(mechanism, 4_096)
            change = UserScramCredentialUpsertion(USER, credentials, PASSWORD.encode())
            self.admin.alter_user_scram_credentials([change])[USER].result(ANSWER_SECONDS_MAX)

    def allow(self, topic: str, operation: AclOperation) -> None:
        """Let USER do this on a topic, on nodes that have PERMISSIONS; returns when each of them knows it."""
        rule = (
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{USER}", "*", operation,
            AclPermissionType.ALLOW,
        )  # fmt: skip
        binding = AclBinding(*rule)
        self.admin.create_acls([binding])[binding].result(ANSWER_SECONDS_MAX)
        for node, server in self._servers.items():
            asked = partial(self._admin_of(node).describe_acls, AclBindingFilter(*rule))
            server.wait_until(lambda asked=asked: bool(asked().result(ANSWER_SECONDS_MAX)))  # type: ignore[misc]

    def leader(self, topic: str, partition: int = 0, *, asked: int | None = None) -> int:
        """The node that leads a partition, as this node says, or any."""
        admin = self.admin if asked is None else self._admin_of(asked)
        metadata = admin.list_topics(topic, timeout=ANSWER_SECONDS_MAX)
        return int(metadata.topics[topic].partitions[partition].leader)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        return len(self.admin.list_topics(topic, timeout=ANSWER_SECONDS_MAX).topics[topic].partitions)

    def active_controller(self) -> int:
        """The node that became the active controller last, as the nodes' logs say."""
        found = [
            (when, int(node))
            for number in self._nodes
            for when, node in _ACTIVE.findall((self._folder / f"{number}.log").read_text(errors="replace"))
        ]
        return max(found)[1]

    def check_alive(self) -> None:
        """Raise if a node ended that was not killed."""
        for server in self._servers.values():
            server.check_alive()

    def stop(self) -> None:
        """End all nodes at once, and the proxies. Idempotent."""
        self.kill9()
        self._links.close()
        for proxy in self._proxies.values():
            proxy.close()
        self._admin = None

    def _admin_of(self, node: int) -> AdminClient:
        """A client that is given one address asks that node."""
        return AdminClient({"bootstrap.servers": f"{HOST}:{self._ports[node, 'PLAINTEXT']}", "log_level": 0})

    def _advertised_port(self, node: int, listener: str) -> int:
        return self._proxies[node].port if listener == PROXIED else self._ports[node, listener]

    def _sees_all_in_sync(self, node: int) -> bool:
        """Whether a node itself says that all nodes serve, and that each replica is in sync. One that was cut off says
        so, too, until it hears of others; but those do not.
        """
        try:
            found = self._admin_of(node).list_topics(timeout=PROBE_SECONDS_MAX)
        except KafkaException:
            return False
        partitions = [partition for topic in found.topics.values() for partition in topic.partitions.values()]
        in_sync = all(len(one.isrs) == len(one.replicas) and one.leader >= 0 for one in partitions)
        return in_sync and len(found.brokers) == len(self._nodes)

    def _link_of(self, node: int, listener: str) -> str:
        return f"{self._links.name_of(node)}:{self._ports[node, listener]}"

    def _server(self, node: int) -> JavaServer:
        program = self._program("kafka.Kafka", str(self._config(node)), node=node)
        return JavaServer(program, log=self._folder / f"{node}.log")

    def _program(self, main_class: str, *arguments: str, node: int) -> JavaProgram:
        hosts = self._folder / f"{node}.hosts"
        self._links.write_hosts(hosts, node=node)
        options = [f"-Dlog4j2.configurationFile={self._folder / 'log4j2.xml'}", f"-Djdk.net.hosts.file={hosts}"]
        return JavaProgram(main_class, arguments, self._jars, heap_mb=HEAP_MB, direct_mb=64, options=options)

    def _config(self, node: int) -> Path:
        return self._folder / f"{node}.properties"

    def _format(self) -> None:
        """Make the data folders, all at the same time: each takes a JVM."""
        voters = ",".join(f"{node}@{self._link_of(node, 'CONTROLLER')}:{_short_id()}" for node in self._nodes)
        quorum = ["--standalone"] if len(self._nodes) == 1 else ["--initial-controllers", voters]
        cluster_id, formats = _short_id(), []
        for node in self._nodes:
            lines = (f"{name}={value}\n" for name, value in self._node_settings(node).items())
            self._config(node).write_text("".join(lines))
            arguments = ["format", "-t", cluster_id, "-c", str(self._config(node)), *quorum]
            command = self._program("kafka.tools.StorageTool", *arguments, node=node).command()
            formats.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        for process in formats:
            output, _ = process.communicate(timeout=ANSWER_SECONDS_MAX)
            if process.returncode != 0:
                raise RuntimeError(f"a data folder could not be made:\n{output.decode(errors='replace')}")

    def _node_settings(self, node: int) -> dict[str, object]:
        replicas, in_sync = len(self._nodes), max(1, len(self._nodes) - 1)
        listeners = [f"{name}://{HOST}:{self._ports[node, name]}" for name in (*LISTENERS, *LINKED)]
        advertised = [
            *(f"{name}://{HOST}:{self._advertised_port(node, name)}" for name in LISTENERS),
            *(f"{name}://{self._link_of(node, name)}" for name in LINKED),
        ]
        plain = dict.fromkeys((PROXIED, *LINKED), "PLAINTEXT")
        protocols = {**dict(zip(LISTENERS, LISTENERS, strict=True)), CLIENT_SSL: "SSL", **plain}
        voters = ",".join(self._link_of(one, "CONTROLLER") for one in self._nodes)
        internal = {
            "offsets.topic.replication.factor": replicas,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "share.coordinator.state.topic.num.partitions": 1,
        }
        return {
            "process.roles": "broker,controller",
            "node.id": node,
            "listeners": ",".join(listeners),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(f"{name}:{one}" for name, one in protocols.items()),
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": voters,
            "log.dirs": self._folder / f"{node}.data",
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            **internal,
            **_login_settings(self._folder / "keystore.p12", of_clients=self.client_tls.certificate),
            "group.initial.rebalance.delay.ms": 0,
            "inter.broker.listener.name": "BROKER",
            "broker.session.timeout.ms": 3_000,
            "broker.heartbeat.interval.ms": 500,
            "log.cleaner.dedupe.buffer.size": 4_194_304,  # 128 MB of memory a node by default
            "num.network.threads": 2,
            "num.io.threads": 4,
            **self._settings,
        }


def _knows(admin: AdminClient, topic: str, *, partitions: int) -> bool:
    try:
        found = admin.list_topics(topic, timeout=PROBE_SECONDS_MAX).topics[topic]
    except KafkaException:
        return False
    leaders = [partition.leader for partition in found.partitions.values()]
    return found.error is None and len(leaders) == partitions and min(leaders) >= 0


def _login_settings(keystore: Path, *, of_clients: Path) -> dict[str, object]:
    """Logins of USER by PLAIN and SCRAM, of anybody by an unsigned OAUTHBEARER token, and by one certificate."""
    security = "org.apache.kafka.common.security"
    login = f'{security}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
    modules = {
        "plain": login,
        "scram-sha-256": f"{security}.scram.ScramLoginModule required;",
        "scram-sha-512": f"{security}.scram.ScramLoginModule required;",
        "oauthbearer": f'{security}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="node";',
    }
    jaas = {
        f"listener.name.{listener}.{mechanism}.sasl.jaas.config": module
        for listener in ("sasl_plaintext", "sasl_ssl")
        for mechanism, module in modules.items()
    }
    return {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "ssl.keystore.location": keystore,
        "ssl.keystore.password": KEYSTORE_PASSWORD,
        "ssl.keystore.type": "PKCS12",
        f"listener.name.{CLIENT_SSL.lower()}.ssl.client.auth": "required",
        f"listener.name.{CLIENT_SSL.lower()}.ssl.truststore.type": "PEM",
        f"listener.name.{CLIENT_SSL.lower()}.ssl.truststore.location": of_clients,
        **jaas,
    }


def _make_keystore(keystore: Path, certificate: Path) -> None:
    keytool = [str(java_home() / "bin" / "keytool"), "-keystore", str(keystore), "-storepass", KEYSTORE_PASSWORD]
    names = ["-dname", "CN=kafka", "-ext", f"SAN=IP:{HOST}", "-validity", "30"]
    pair = ["-genkeypair", "-alias", "kafka", "-keyalg", "EC", "-storetype", "PKCS12", *names]
    export = ["-exportcert", "-rfc", "-alias", "kafka", "-file", str(certificate)]
    for arguments in (pair, export):
        run = partial(subprocess.run, check=True, capture_output=True, timeout=ANSWER_SECONDS_MAX)
        run([*keytool, *arguments])


def _short_id() -> str:
    """An id as Kafka makes them; one that begins with a hyphen would be read as an option."""
    return "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
