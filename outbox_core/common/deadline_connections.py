"""Connections of urllib3 on which a request's time-out bounds all of it. urllib3's own begins anew with each byte."""

from __future__ import annotations

import socket
import time
from typing import cast

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from outbox_core.common.deadline_socket import DeadlineSocket


def set_deadlines(pools: PoolManager, *, paying_bytes_max: int = 0) -> None:
    """Have requests by these pools end in time, before the first one. With `urllib3.Timeout(total=...)`, connecting,
    sending, the head and the body share it; with a time-out for each, sending has that of connecting, and the head and
    the body share that of reading. Behind it reading raises urllib3's errors of a time-out.

    `paying_bytes_max`: see DeadlineSocket; of each connection.
    """

    class TimedConnection(HTTPConnection):
        def connect(self) -> None:
            started_s = time.monotonic()
            super().connect()
            self.sock = timed(self.sock, started_s=started_s, timeout_s=self.timeout)

    class TimedTlsConnection(HTTPSConnection):
        def connect(self) -> None:
            started_s = time.monotonic()
            super().connect()
            self.sock = timed(self.sock, started_s=started_s, timeout_s=self.timeout)

    class TimedPool(HTTPConnectionPool):
        ConnectionCls = TimedConnection

    class TimedTlsPool(HTTPSConnectionPool):
        ConnectionCls = TimedTlsConnection

    def timed(connected: socket.socket, *, started_s: float, timeout_s: float | None) -> socket.socket:
        # urllib3 and http.client ask of it what DeadlineSocket has: settimeout() before a request, and its answer.
        deadline_s = started_s + timeout_s if timeout_s is not None else float("inf")
        made = DeadlineSocket(connected, deadline_s=deadline_s, paying_bytes_max=paying_bytes_max)
        return cast("socket.socket", made)

    pools.pool_classes_by_scheme = {"http": TimedPool, "https": TimedTlsPool}
