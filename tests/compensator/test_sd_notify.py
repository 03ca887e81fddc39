"""What systemd is told, on a real datagram socket."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from compensator.entry.sd_notify import Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket that systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        yield listening


def test_ready_watchdog_and_stopping_are_told_in_order(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})

    notifier.ready("3 sources")
    notifier.watchdog()
    notifier.stopping()

    heard = [systemd.recv(1_000).decode().splitlines() for _ in range(3)]
    assert heard[0] == ["READY=1", "STATUS=3 sources"]
    assert heard[1] == ["WATCHDOG=1"]
    assert heard[2][0] == "STOPPING=1"


def test_an_abstract_socket_is_found() -> None:
    name = f"@outbox-test-notify-{uuid.uuid4().hex}"  # these names are of the machine, not of the test
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name[1:])
        listening.settimeout(10)

        Notifier({"NOTIFY_SOCKET": name}).watchdog()

        assert listening.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("environment", "every_ms"),
    [
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "60000000"}, 30_000),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 30_000),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, None),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, None),
        ({"NOTIFY_SOCKET": "/x"}, None),
        ({"WATCHDOG_USEC": "60000000"}, None),
    ],
)
def test_the_watchdog_is_told_at_half_of_its_time_where_it_is_meant_for_us(
    environment: dict[str, str], every_ms: int | None
) -> None:
    assert Notifier(environment, pid=7).watchdog_every_ms == every_ms


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/no/such/socket"}])
def test_without_systemd_nothing_is_told_and_nothing_fails(environment: dict[str, str]) -> None:
    Notifier(environment).ready("")
