"""Finds free ports for the demo's servers."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from typing import Final

from outbox_core.common.errors import ConfigurationError

PORTS: Final = range(10_000, 30_000)
"""Below those that a kernel gives to connections and to servers that ask for any port, so that neither takes a port
between its choice and its use, or that of a server that was killed.
"""
ATTEMPTS_MAX: Final = 100
RESERVED_MAX: Final = 200
_reservations: Final = deque[int]()
"""File descriptors, which end with this process."""


def free_port(host: str, among: range = PORTS) -> int:
    """Returns a port of this address that nothing listens on, and that no other call returned, in any process.

    This process keeps the ports of its last RESERVED_MAX calls: a server listens on its port some time after that was
    chosen, and does not listen while it is started again.
    """
    for port in random.SystemRandom().sample(among, min(ATTEMPTS_MAX, len(among))):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        if _reserve(host, port):
            return port
    raise ConfigurationError(f"no free port was found on {host}")


def _reserve(host: str, port: int) -> bool:
    """Whether nobody has reserved this port. Who has, holds the UDP port of the same number, which no server uses."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        reservation.bind((host, port))
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation.detach())
    if len(_reservations) > RESERVED_MAX:
        os.close(_reservations.popleft())
    return True
