"""RocketMQ of the tests' own: a name server, a broker and a proxy, a process each, to kill, pause and start again."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Final

from outbox_broker.http.server import Tls
from outbox_demo.ports import free_port
from tests.engines.java_server import JavaProgram, JavaServer
from tests.engines.rocketmq.java_client import JavaClient

HOST: Final = "127.0.0.1"
USER: Final = "root"
PASSWORD: Final = "right-password"
PROBE_SECONDS_MAX: Final = 1.0

_NAME_SERVER = """\
listenPort={names}
bindAddress={host}
kvConfigPath={folder}/kv.json
configStorePath={folder}/names.properties
"""
_BROKER = """\
brokerName=b1
brokerIP1={host}
bindAddress={host}
namesrvAddr={host}:{names}
listenPort={broker}
haListenPort={ha}
flushDiskType=SYNC_FLUSH
waitTimeMillsInSendQueue=60000
osPageCacheBusyTimeOutMills=60000
cleanFileForciblyEnable=false
cleanResourceInterval=1000
storePathRootDir={store}
storePathCommitLog={store}/commitlog
mappedFileSizeCommitLog=16777216
mappedFileSizeConsumeQueue=600000
mappedFileSizeTimerLog=10485760
enableMixedMessageType=true
popConsumerKVServiceInit=true
popConsumerKVServiceEnable=true
authConfigPath={folder}/auth
authenticationEnabled=true
authenticationProvider=org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider
authenticationMetadataProvider=org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider
authorizationEnabled=true
authorizationProvider=org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider
authorizationMetadataProvider=org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider
initAuthenticationUser={{"username":"{user}","password":"{password}"}}
innerClientAuthenticationCredentials={{"accessKey":"{user}","secretKey":"{password}"}}
"""
_AUTH = "org.apache.rocketmq.auth"
_PROXY: Final = {
    "rocketMQClusterName": "DefaultCluster",
    "grpcShutdownTimeSeconds": 1,
    "grpcClientConsumerMinLongPollingTimeoutMillis": 100,
    "minInvisibleTimeMillsForRecv": 1_000,
    "topicRouteServiceCacheRefreshSeconds": 1,
    "userCacheRefreshSeconds": 1,
    "aclCacheRefreshSeconds": 1,
    "enableAclRpcHookForClusterMode": True,
    "authenticationEnabled": True,
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthenticationMetadataProvider",
    "authorizationEnabled": True,
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthorizationMetadataProvider",
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": USER, "secretKey": PASSWORD}),
    "tlsTestModeEnable": False,
}


class RocketMqCluster:
    """The data stay between a kill and a start. The proxy speaks plainly and with TLS on one port.

    A broker is as patient as its clients: by default it refuses what waited for 200 ms, as on a busy machine.
    """

    def __init__(self, *, jars: Path, folder: Path, tls: Tls, store: Path | None = None) -> None:
        """`store`: where the broker keeps messages; None: below `folder`."""
        self._folder = folder
        self._store = store or folder / "store"
        self.ca_file = tls.certificate
        self.proxy_port = free_port(HOST)
        self._name_port, self._broker_port = free_port(HOST), free_port(HOST)
        self._write_settings(tls)
        self._names = self._server(jars, "namesrv.NamesrvStartup", "-c", "namesrv.conf", heap_mb=64)
        self._broker = self._server(jars, "broker.BrokerStartup", "-c", "broker.conf", heap_mb=256)
        start = ("-pm", "cluster", "-n", self.name_server, "-pc", str(folder / "proxy.json"))
        self._proxy = self._server(jars, "proxy.ProxyStartup", *start, heap_mb=256)
        self._client: JavaClient | None = None

    @property
    def proxy(self) -> str:
        """Host and port of the proxy."""
        return f"{HOST}:{self.proxy_port}"

    @property
    def name_server(self) -> str:
        """Host and port of the name server."""
        return f"{HOST}:{self._name_port}"

    @property
    def client(self) -> JavaClient:
        """RocketMQ's own tools and client."""
        if self._client is None:
            broker = f"{HOST}:{self._broker_port}"
            self._client = JavaClient(name_server=self.name_server, broker=broker, user=USER, password=PASSWORD)
        return self._client

    def url(self, *, login: str = f"{USER}:{PASSWORD}@", port: int | None = None) -> str:
        """The broker URL of the proxy, or of what stands before it on another port."""
        return f"rocketmq://{login}{HOST}:{port or self.proxy_port}?nameserver={self.name_server}"

    def start(self) -> None:
        """Start what does not run, let go on what is paused; returns when all serve. From the main thread only."""
        self._resume(self._names)
        self._names.wait_until(lambda: _listens(self._name_port))
        self._resume(self._broker)
        self._broker.wait_until(self.client.is_registered)  # before the proxy, which makes a topic on it and else ends
        self._resume(self._proxy)
        self._proxy.wait_until(lambda: _listens(self.proxy_port))

    def check_alive(self) -> None:
        """Raise if a server ended that was not killed."""
        for server in (self._names, self._broker, self._proxy):
            server.check_alive()

    def kill_proxy(self) -> None:
        """End the proxy as a crash would."""
        self._proxy.kill9()

    def kill_broker(self) -> None:
        """End the broker as a crash would."""
        self._broker.kill9()

    def pause_broker(self) -> None:
        """Stop the broker by SIGSTOP: its connections stay open and nothing answers. `start` lets it go on."""
        self._broker.pause()

    def pause_proxy(self) -> None:
        """Stop the proxy by SIGSTOP."""
        self._proxy.pause()

    def stop(self) -> None:
        """End all at once. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        for server in (self._proxy, self._broker, self._names):
            server.kill9()

    def _resume(self, server: JavaServer) -> None:
        if server.is_started:
            server.resume()
        else:
            server.start()

    def _server(self, jars: Path, main_class: str, *arguments: str, heap_mb: int) -> JavaServer:
        options = [f"-Duser.home={self._folder}", f"-Drocketmq.home.dir={self._folder}"]
        files = [str(self._folder / one) if one.endswith(".conf") else one for one in arguments]
        name = f"org.apache.rocketmq.{main_class}"
        program = JavaProgram(name, files, jars, heap_mb=heap_mb, direct_mb=128, options=options)
        return JavaServer(program, log=self._folder / f"{main_class}.log")

    def _write_settings(self, tls: Tls) -> None:
        values = {
            "host": HOST,
            "folder": self._folder,
            "store": self._store,
            "names": self._name_port,
            "broker": self._broker_port,
            "ha": free_port(HOST),
            "user": USER,
            "password": PASSWORD,
        }
        (self._folder / "namesrv.conf").write_text(_NAME_SERVER.format(**values))
        (self._folder / "broker.conf").write_text(_BROKER.format(**values))
        (self._folder / "conf").mkdir()
        (self._folder / "conf" / "tools.yml").write_text(f"accessKey: {USER}\nsecretKey: {PASSWORD}\n")
        proxy = {
            **_PROXY,
            "namesrvAddr": self.name_server,
            "grpcServerPort": self.proxy_port,
            "remotingListenPort": free_port(HOST),
            "tlsKeyPath": str(tls.key),
            "tlsCertPath": str(tls.certificate),
        }
        (self._folder / "proxy.json").write_text(json.dumps(proxy))


def _listens(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), PROBE_SECONDS_MAX):
            return True
    except OSError:
        return False
