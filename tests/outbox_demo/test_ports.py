"""Free ports are given once: a server listens on its port some time after that was chosen."""

from __future__ import annotations

from outbox_demo.ports import PORTS, free_port
from tests.engines.java_server import own_loopback_network


def test_no_port_is_given_twice_although_nothing_listens_on_it_yet() -> None:
    host = f"{own_loopback_network()}.1"

    ports = [free_port(host) for _ in range(2_000)]

    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(PORTS)
