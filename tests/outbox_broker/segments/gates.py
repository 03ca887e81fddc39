"""Gates at which threads of the product are held while a test does something else."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from outbox_core.common.errors import StorageFailed

WAIT_SECONDS = 120


class Gate:
    """Where the thread that comes first is held until it is let go."""

    def __init__(self) -> None:
        self.reached = Event()
        self.go = Event()

    def hold(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(WAIT_SECONDS)


def while_held(gate: Gate, act: Callable[[], object], meanwhile: Callable[[], object]) -> list[StorageFailed]:
    """Do one thing while another is held at the gate; returns what that one raised."""
    raised: list[StorageFailed] = []

    def run() -> None:
        try:
            act()
        except StorageFailed as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    assert gate.reached.wait(WAIT_SECONDS)
    try:
        meanwhile()
    finally:
        gate.go.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    return raised
