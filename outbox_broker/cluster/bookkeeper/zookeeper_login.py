"""How BookKeeper's client, in this process's JVM, logs in to ZooKeeper: as kazoo does, by TLS and SASL (DIGEST-MD5).

ZooKeeper's Java client takes these from properties of the JVM alone, so one process has one login.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_core.common.errors import ConfigurationError
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperSecurity

_LOGIN_FILE: Final = "java.security.auth.login.config"


def set_zookeeper_login(runtime: JavaRuntime, security: ZooKeeperSecurity) -> None:
    """Have the clients that are made from now on log in so. Raises ConfigurationError."""
    if security.tls:
        _set_tls(runtime, security)
    if security.user is not None:
        _set_sasl(runtime, security.user, security.password or "")


def _set_tls(runtime: JavaRuntime, security: ZooKeeperSecurity) -> None:
    if security.certificate != security.key:
        raise ConfigurationError(
            "for segments on BookKeeper, zookeeper_certificate and zookeeper_key have to be one PEM file with both, "
            "which ZooKeeper's Java client asks for: append the key to the certificate and name that file twice"
        )
    properties = {
        "zookeeper.client.secure": "true",
        "zookeeper.clientCnxnSocket": "org.apache.zookeeper.ClientCnxnSocketNetty",
    }
    if security.ca_file is not None:
        properties |= _store("trustStore", security.ca_file)
    if security.certificate is not None:
        properties |= _store("keyStore", security.certificate)
    for name, value in properties.items():
        _set_property(runtime, name, value)


def _store(name: str, file: Path) -> dict[str, str]:
    return {f"zookeeper.ssl.{name}.location": str(file), f"zookeeper.ssl.{name}.type": "PEM"}


def _set_sasl(runtime: JavaRuntime, user: str, password: str) -> None:
    """Java reads a login from a file alone. It keeps what it read, so the file is there for that moment only."""
    configuration = runtime.java_class("javax.security.auth.login.Configuration")
    handle, name = tempfile.mkstemp(prefix="outbox-zookeeper-login-")  # which nobody else may read
    try:
        with os.fdopen(handle, "w") as file:
            file.write(
                "Client { org.apache.zookeeper.server.auth.DigestLoginModule required "
                f"username={_quoted(user)} password={_quoted(password)}; }};\n"
            )
        # In its FIPS mode, the default, the client silently leaves DIGEST-MD5 out, and is refused.
        _set_property(runtime, "zookeeper.fips-mode", "false")
        _set_property(runtime, _LOGIN_FILE, name)
        configuration.setConfiguration(None)
        configuration.getConfiguration().refresh()
    finally:
        Path(name).unlink()


def _quoted(value: str) -> str:
    """A string of Java's login files. Raises ConfigurationError."""
    if not value.isprintable():
        raise ConfigurationError("the user and the password of ZooKeeper must be printable characters")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _set_property(runtime: JavaRuntime, name: str, value: str) -> None:
    runtime.java_class("java.lang.System").setProperty(runtime.string(name), runtime.string(value))
