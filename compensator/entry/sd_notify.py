"""Notifies systemd of the service's state (Type=notify): READY=1, STOPPING=1, WATCHDOG=1; nothing without systemd.

The protocol is sd_notify(3): a datagram of lines to the socket that NOTIFY_SOCKET names, `@` for an abstract one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class Notifier:
    """Sends notifications, configured by the environment, read once. Never raises: the service runs without them."""

    def __init__(self, environment: Mapping[str, str], *, pid: int | None = None) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_us = _watchdog_us(environment, os.getpid() if pid is None else pid)

    @property
    def watchdog_every_ms(self) -> int | None:
        """Interval of watchdog(): half of the time after which systemd kills the process. None: without a watchdog."""
        return max(1, self._watchdog_us // 2_000) if self._watchdog_us and self._address else None

    def ready(self, status: str) -> None:
        """Notify that the service is ready."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Notify that the service is stopping."""
        self._send("STOPPING=1\nSTATUS=finishing work in progress")

    def watchdog(self) -> None:
        """Notify that the service is alive."""
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.sendto(text.encode(), address)
        except OSError as error:
            logger.warning("sd_notify_failed", extra={"error": error.strerror})


def _watchdog_us(environment: Mapping[str, str], pid: int) -> int:
    """WATCHDOG_USEC if it is meant for this process, else 0."""
    meant_for = environment.get("WATCHDOG_PID", "")
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) if text.isdecimal() and meant_for in {"", str(pid)} else 0
