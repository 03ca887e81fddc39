"""Serves clients of a cluster's node, from its start until it has handed over what it owns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from outbox_broker.config.announcement import announce
from outbox_broker.config.credential_reload import reload_credentials
from outbox_broker.http.server import HttpServer
from outbox_core.runtime.reload_signal import ReloadSignal
from outbox_core.runtime.stop_signals import StopSignals

if TYPE_CHECKING:
    from outbox_broker.config.broker_config import BrokerConfig
    from outbox_broker.http.access_control import Access
    from outbox_broker.http.server_certificate import ServerCertificate


def serve_until_handed_over(
    server: HttpServer, config: BrokerConfig, *, reloads: ReloadSignal, what: str, hand_over: Callable[[], None],
    use_certificate: Callable[[ServerCertificate | None], None] | None = None,
) -> None:  # fmt: skip
    """Serve until a signal, and on while the node hands over; a second signal ends the process at once: as a kill,
    which loses nothing. `use_certificate`: has other servers of the node show it, too. Raises what ended the server.
    """

    def use(access: Access, certificate: ServerCertificate | None) -> bool:
        if use_certificate is not None:
            use_certificate(certificate)
        return server.use(access, certificate)

    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.run(on_ready=lambda url: announce(url, config.ready_file, what=what))
        except BaseException as error:  # noqa: BLE001 - the thread boundary: the process ends with it
            failures.append(error)
        finally:
            signals.wake()

    reload_credentials(config, use, reloads=reloads)
    with StopSignals() as signals:
        thread = threading.Thread(target=serve, name="server")
        thread.start()
        try:
            signals.wait()
            signals.exit_at_next()
            hand_over()
        finally:
            server.stop()
            thread.join()
    for failure in failures:
        raise failure
