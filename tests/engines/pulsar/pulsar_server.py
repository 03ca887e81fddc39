"""PulsarServer: one standalone server of Pulsar, with its bookie and its metadata in one process."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any, Final

import requests

from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.durability_inspection import AdminApi
from outbox_demo.ports import free_port
from tests.engines.java_server import JavaProgram, JavaServer
from tests.engines.pulsar.pulsar_security import ADMIN, PulsarSecurity
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy

MAIN_CLASS: Final = "org.apache.pulsar.PulsarStandaloneStarter"
ANSWER_SECONDS_MAX: Final = 60
HEAP_MB: Final = 256
DISK_CHECK_MS: Final = 500
STARTS_MAX: Final = 10
_INVALIDATED: Final = re.compile(rb"Lock on resource /ledgers/available/\S+ was invalidated")


class PulsarServer:
    """On ports and in a folder of its own, which it keeps when it is killed.

    It has a second port, whose clients are told the address of `proxy`, through which they come.
    """

    def __init__(
        self,
        *,
        jars: Path,
        folder: Path,
        security: PulsarSecurity | None = None,
        bookie_folder: Path | None = None,
    ) -> None:
        """`bookie_folder`: where the bookie keeps messages; None: below `folder`."""
        self._security = security
        self.host = "127.0.0.1"  # the bookie takes the address of the interface, and no other
        self.port, self.web_port = free_port(self.host), free_port(self.host)
        self._proxied_port, self._tls_port, self._web_tls_port = (free_port(self.host) for _ in range(3))
        self.proxy = CuttingTcpProxy(self._proxied_port)
        self._log = folder / "log"
        self._log_bytes = 0
        config = folder / "standalone.conf"
        config.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        self._server = JavaServer(
            JavaProgram(
                main_class=MAIN_CLASS,
                arguments=[
                    *("-c", str(config), "-nfw", "-nss", "-a", self.host),
                    *("--metadata-dir", str(folder / "metadata")),
                    *("--bookkeeper-dir", str(bookie_folder or folder / "bookkeeper")),
                    *("--bookkeeper-port", str(free_port(self.host))),
                ],
                jars=jars,
                heap_mb=HEAP_MB,
                direct_mb=HEAP_MB,
            ),
            log=self._log,
        )

    @property
    def addresses(self) -> str:
        """`host:port` of the binary protocol."""
        return f"{self.host}:{self.port}"

    @property
    def tls_addresses(self) -> str:
        """`host:port` of the binary protocol over TLS, where the server has it."""
        return f"{self.host}:{self._tls_port}"

    @property
    def admin_url(self) -> str:
        """Of the admin API."""
        return f"http://{self.host}:{self.web_port}"

    @property
    def tls_admin_url(self) -> str:
        """The same over TLS."""
        return f"https://{self.host}:{self._web_tls_port}"

    def start(self) -> None:
        """Start it where it is not, let it go on where it is paused, and wait until it serves."""
        for _ in range(STARTS_MAX):
            if self._server.is_started:
                self.resume()
            else:
                self._log_bytes = self._log.stat().st_size if self._log.exists() else 0
                self._server.start()
            self._server.wait_until(lambda: self._loses_its_bookie() or self._is_ready())
            if not self._loses_its_bookie():
                return
            self.kill9()
        raise RuntimeError(f"the bookie's registration was made anew without end in {STARTS_MAX} starts")

    def kill9(self) -> None:
        """End it as a crash would. Idempotent."""
        self._server.kill9()

    def close(self) -> None:
        """End it and its proxy."""
        self.kill9()
        self.proxy.close()

    def pause(self) -> None:
        """Stop it by SIGSTOP: its connections stay, and nothing answers."""
        self._server.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._server.resume()

    def ask(self, method: str, path: str, *, json: Any = None) -> requests.Response:
        """A request to the admin API, which must not fail."""
        headers = {} if self._security is None else {"Authorization": f"Bearer {self._security.token(ADMIN)}"}
        url = f"{self.admin_url}/admin/v2/{path}"
        answer = requests.request(method, url, json=json, headers=headers, timeout=ANSWER_SECONDS_MAX)
        answer.raise_for_status()
        return answer

    def create_topic(self, topic: str) -> None:
        """Create a topic of the default namespace."""
        self._admin().create_topic(topic, timeout_s=ANSWER_SECONDS_MAX)

    def create_subscription(self, topic: str, subscription: str) -> None:
        """Create a subscription at the beginning of a topic."""
        self._admin().create_subscription(topic, subscription, timeout_s=ANSWER_SECONDS_MAX)

    def _admin(self) -> AdminApi:
        return AdminApi(
            ClientSettings(
                service_url=f"pulsar://{self.addresses}", addresses=self.addresses, namespace="public/default",
                timeout_ms=ANSWER_SECONDS_MAX * 1_000, admin_url=self.admin_url,
                token=None if self._security is None else self._security.token(ADMIN),
            )
        )  # fmt: skip

    def _loses_its_bookie(self) -> bool:
        """Whether Pulsar 4.0.7 deletes and makes its bookie's registration without end, 1,400 times a second, and finds
        no bookie meanwhile. It may begin so behind a kill: the deletion of the old registration is noted after the new
        one is there, and that is compared by BookieServiceInfo, which has no equals().
        """
        with self._log.open("rb") as log:
            log.seek(self._log_bytes)
            return any(_INVALIDATED.search(line) for line in log)

    def _is_ready(self) -> bool:
        """It is when a topic can be made: health check and namespace answer before the broker owns its bundle, and
        after a pause while its bookie is still gone.
        """
        try:
            self.ask("PUT", f"persistent/public/default/ready-{uuid.uuid4().hex}")
        except requests.RequestException:
            return False
        return True

    def _settings(self) -> dict[str, object]:
        plain = f"plain:pulsar://{self.host}:{self.port},proxied:pulsar://{self.host}:{self.proxy.port}"
        encrypted = f",plain:pulsar+ssl://{self.tls_addresses}"
        secured: dict[str, object] = {}
        if self._security is not None:
            ports = {"brokerServicePortTls": self._tls_port, "webServicePortTls": self._web_tls_port}
            secured = {**self._security.settings(), **ports}
        return {
            **secured,
            "clusterName": "standalone",
            "bindAddress": self.host,
            "internalListenerName": "plain",
            "advertisedListeners": plain if self._security is None else plain + encrypted,
            "bindAddresses": f"proxied:pulsar://{self.host}:{self._proxied_port}",
            "brokerServicePort": self.port,
            "webServicePort": self.web_port,
            "allowLoopback": "true",
            "listeningInterface": "lo",  # otherwise the bookie listens on every interface
            "allowEphemeralPorts": "true",  # else the bookie's port is one that the kernel gives to connections, too
            "bookkeeperClientHealthCheckEnabled": "false",  # it would put the only bookie aside after a pause
            "diskCheckInterval": DISK_CHECK_MS,
            "managedLedgerDefaultEnsembleSize": 1,
            "managedLedgerDefaultWriteQuorum": 1,
            "managedLedgerDefaultAckQuorum": 1,
        }
