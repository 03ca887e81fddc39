"""Free ports are given once: a server listens on its port some time after that was chosen.

The processes are others than this one, whose own reservations stay.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from outbox_core.common.errors import ConfigurationError
from outbox_demo.ports import PORTS, RESERVED_MAX, free_port
from tests.engines.java_server import own_loopback_network

FEW = range(10_000, 10_010)
ASKS_OFTEN = """
import sys
from outbox_demo.ports import RESERVED_MAX, free_port
print(*(free_port(sys.argv[1]) for _ in range(RESERVED_MAX)))
"""
ANOTHER_PROCESS = f"""
import sys
from outbox_demo.ports import free_port
for _ in range({len(FEW)}):
    free_port(sys.argv[1], range({FEW.start}, {FEW.stop}))
print("reserved", flush=True)
sys.stdin.read()
"""


def test_no_port_is_given_twice_although_nothing_listens_on_it_yet() -> None:
    command = [sys.executable, "-c", ASKS_OFTEN, f"{own_loopback_network()}.1"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    ports = [int(port) for port in printed.split()]

    assert len(set(ports)) == len(ports) == RESERVED_MAX
    assert set(ports) <= set(PORTS)


def test_a_port_that_a_process_was_given_is_given_to_no_other_until_it_ends() -> None:
    host = f"{own_loopback_network()}.1"
    command = [sys.executable, "-c", ANOTHER_PROCESS, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "reserved\n"

        with pytest.raises(ConfigurationError, match="no free port"):
            free_port(host, FEW)
        process.stdin.close()

    assert free_port(host, FEW) in FEW
