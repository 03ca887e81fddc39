"""A consumer's process and its signals: the first one ends it in good order, the second one at once."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.fork_server import Program, environment, fork_server
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

pytestmark = pytest.mark.processes

CHILD = "tests.outbox.consuming.signalled_consumer"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Program]:
    """A consumer process that has three messages in hand and works on the first."""
    broker = WatchedBroker(tmp_path / "data")
    broker.publish([message(number) for number in range(3)])
    broker.close()
    with fork_server().start(
        CHILD, f"embedded:{tmp_path / 'data'}", env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        said = [program.stdout.readline() for _ in range(2)]
        assert (said[0].startswith("consumers_started "), said[1]) == (True, "begun m-0\n"), said
        yield program


def left(tmp_path: Path) -> list[tuple[str, int]]:
    """What the next consumer gets, with its attempts."""
    broker = WatchedBroker(tmp_path / "data")
    found = [(one.id, one.attempt) for one in broker.pull("orders", "g")]
    broker.close()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_message_in_hand_end_and_gives_the_others_back(
    child: Program, tmp_path: Path, number: signal.Signals
) -> None:
    child.send_signal(number)
    assert child.stdout is not None
    assert child.stdout.readline().startswith("consumers_stop signal=")
    out, err = child.communicate("go on\n", timeout=WAIT_SECONDS)

    assert (child.returncode, out) == (0, ""), err
    assert left(tmp_path) == [("m-1", 1), ("m-2", 1)]


def test_a_second_signal_ends_the_process_at_once(child: Program, tmp_path: Path) -> None:
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline().startswith("consumers_stop signal=")
    child.send_signal(signal.SIGTERM)
    child.wait(WAIT_SECONDS)

    assert child.returncode == -signal.SIGTERM
    assert left(tmp_path) == []  # still invisible: it comes back
