"""Pulsar's client from its making to its end, which comes before the interpreter's, and while no thread is in it.

A thread that wants to go on while the interpreter ends is ended by unwinding its stack. Pulsar's C++ cannot be
unwound: the process aborts with "terminate called without an active exception". So at exit no thread of Python's may be
in the client, and none of the client's may be about to call Python, or to let go of what it called.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any, Final

import pulsar

from broker_adapter.pulsar.client_settings import ClientSettings
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

_EXIT_MS_MORE: Final = 1_000
"""How much longer than the client's time-out the interpreter's end waits for it to strike, and for what it ends."""


class OpenClient:
    """One client. Used by one thread at a time, which holds `in_use` meanwhile."""

    def __init__(self, settings: ClientSettings, *, clock: Clock) -> None:
        """Raises BrokerUnavailable while the interpreter ends."""
        self._clock = clock
        self._operation_ms = 1_000 * _operation_s(settings)
        self.in_use = threading.Lock()
        self.receipts: Callable[[], object | None] = _nothing
        """A weak reference to what the client's threads call last: alive as long as one of them may do so."""
        self._creation: Future[Any] = Future()
        """The last producer. There is no other one to make: after a time-out the client is only ended."""
        self._creation.set_result(None)
        self._is_shut_down = False
        self._client = pulsar_client(settings)
        _open_clients().add(self)

    def begin_producer(self, topic: str, **options: Any) -> Future[Any]:
        """Begin to make a producer."""
        self._creation = Future()
        create = partial(self._client.create_producer, topic, **options)
        threading.Thread(target=_complete, args=(self._creation, create), name="outbox-pulsar", daemon=True).start()
        return self._creation

    def end(self) -> None:
        """Drop what is queued and end connections and threads: at once, or when the client has made its producer, or
        failed to within its own time-out. Idempotent.

        Shut down before, it would keep the thread that waits for the producer for ever: version 3.13 did so in four of
        22 cases in which the server hung.
        """
        self._creation.add_done_callback(self._shut_down)

    def latest_end_ms(self) -> int:
        """When a publish that is on its way, and the making of a producer, are over; by its clock."""
        return self._clock.monotonic_ms() + self._operation_ms + _EXIT_MS_MORE

    def end_at_exit(self, latest_ms: int) -> None:
        """Wait for them, and for receipts, at most until then; end the client, and wait a moment for its threads."""
        # Kept: a thread that publishes later waits for it, where the end of the interpreter does no harm.
        self.in_use.acquire(timeout=self._left_s(latest_ms))
        wait([self._creation], self._left_s(latest_ms))
        # The client is shut down without letting another thread have the interpreter, and waits up to ten seconds for
        # its own threads, which want it for each receipt.
        self._poll(lambda: self.receipts() is None, latest_ms)
        self._shut_down(None)
        self._poll(self.is_over, self._clock.monotonic_ms() + _EXIT_MS_MORE)

    def is_over(self) -> bool:
        """Whether it has ended, no thread is in it any more, and its own call Python no more."""
        return self._is_shut_down and self._creation.done() and self.receipts() is None

    def _shut_down(self, _: object) -> None:
        self._client.shutdown()
        self._is_shut_down = True

    def _poll(self, holds: Callable[[], bool], latest_ms: int) -> None:
        # Not by an event: whoever set it would be in the interpreter still.
        while not holds() and self._left_s(latest_ms):
            time.sleep(0.001)

    def _left_s(self, latest_ms: int) -> float:
        return max(0, latest_ms - self._clock.monotonic_ms()) / 1_000


class _OpenClients:
    """Those of this process."""

    def __init__(self) -> None:
        self._clients: set[OpenClient] = set()
        self._exit_began = False

    def add(self, client: OpenClient) -> None:
        """Have a client end at exit. Raises BrokerUnavailable where that has begun."""
        self._clients -= {other for other in tuple(self._clients) if other.is_over()}
        # In this order, so that end() sees this client, or this client sees it.
        self._clients.add(client)
        if self._exit_began:
            raise BrokerUnavailable("the interpreter ends, and with it the client of Pulsar")

    def end(self) -> None:
        """End all of them."""
        notice_fork()
        self._exit_began = True
        for latest_ms, client in [(client.latest_end_ms(), client) for client in tuple(self._clients)]:
            client.end_at_exit(latest_ms)

    def reset_after_fork(self) -> None:
        """Never free a client in a forked child: that would wait forever for threads that are not there."""
        for client in self._clients:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        self._clients = set()


@cache
def _open_clients() -> _OpenClients:
    made = _OpenClients()
    reset_in_children(made)
    atexit.register(made.end)
    return made


def end_clients_at_exit() -> None:
    """Have all clients end with the interpreter, after what is registered later: an Outbox's last sends. Idempotent."""
    _open_clients()


def _nothing() -> None:
    return None


def _complete(created: Future[Any], create: Callable[[], Any]) -> None:
    try:
        created.set_result(create())
    except Exception as error:  # noqa: BLE001 - the thread's boundary: who waits learns of it
        created.set_exception(error)


def pulsar_client(settings: ClientSettings) -> Any:
    """Pulsar's own client, with the settings of a URL."""
    return pulsar.Client(
        settings.service_url,
        authentication=_authentication(settings),
        operation_timeout_seconds=_operation_s(settings),
        connection_timeout_ms=settings.timeout_ms,
        tls_trust_certs_file_path=settings.ca_file,
        tls_validate_hostname=True,
        tls_certificate_file_path=settings.cert_file,
        tls_private_key_file_path=settings.key_file,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),  # by default it writes to stdout
    )


def _operation_s(settings: ClientSettings) -> int:
    return max(1, settings.timeout_ms // 1_000)


def _authentication(settings: ClientSettings) -> object:
    if settings.token is not None:
        return pulsar.AuthenticationToken(settings.token)
    if settings.user is not None:
        return pulsar.AuthenticationBasic(settings.user, settings.password)
    if settings.cert_file is not None:
        return pulsar.AuthenticationTLS(settings.cert_file, settings.key_file)
    return None
