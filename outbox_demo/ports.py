"""Finds free ports for the demo's servers."""

from __future__ import annotations

import random
import socket
from typing import Final

from outbox_core.common.errors import ConfigurationError

PORTS: Final = range(10_000, 30_000)
"""Below those that a kernel gives to connections and to servers that ask for any port, so that neither takes a port
between its choice and its use, or that of a server that was killed.
"""
ATTEMPTS_MAX: Final = 100
_given: Final = set[tuple[str, int]]()
"""What this process was given: a server's ports are chosen long before it listens on them."""


def free_port(host: str) -> int:
    """Returns a port of this address that nothing listens on, and that was not returned before."""
    for port in random.SystemRandom().sample(PORTS, ATTEMPTS_MAX):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        if (host, port) not in _given:
            _given.add((host, port))
            return port
    raise ConfigurationError(f"no free port was found on {host}")
