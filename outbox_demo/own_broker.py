"""The broker of this project in the demo: a process of the run, killed in the middle and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outbox_core import Broker, GroupConfig, connect
from outbox_core.common.errors import BrokerError
from outbox_demo.plan import GROUPS, NOTIFICATION, TICKETING, DemoPlan, RunTopics
from outbox_demo.processes import Process, ProcessGroup

DOWN_SECONDS: Final = 2.0


class OwnBroker:
    """A BrokerUnderDemo on one data folder."""

    topics = RunTopics()

    def __init__(self, folder: Path, *, processes: ProcessGroup, say: Callable[[str], None]) -> None:
        """`folder`: that of the run; `say` reports what is killed."""
        self.data = folder / "broker"
        self._url_path = folder / "broker-url.txt"
        self._processes = processes
        self._say = say
        self._process: Process | None = None
        self._broker: Broker | None = None

    def start(self) -> str:
        """Start it; returns its URL."""
        self._process = self._serve("broker-1", port=0)
        return self._url()

    def start_consumers(self, plan: DemoPlan) -> None:
        """Declare the groups, and start a process for each."""
        config = GroupConfig(max_attempts=plan.attempts_max, backoff_initial_ms=200, backoff_max_ms=2_000)
        self._broker = broker = connect(plan.broker_url)
        for topic, group in GROUPS:
            broker.admin.declare_group(topic, group, config)
        for group in (TICKETING, NOTIFICATION):
            self._processes.start(group, ["outbox_demo.consumers", str(plan.path), group])

    def kill_and_restart(self) -> None:
        """Kill it; after a while start it on the same data and port."""
        port = int(self._url().rpartition(":")[2])
        if self._process is not None:
            self._process.kill()
        self._say("broker killed; bookings go on without it")
        threading.Event().wait(DOWN_SECONDS)
        self._process = self._serve("broker-2", port=port)
        self._say("broker started again on the same data")

    def is_settled(self, plan: DemoPlan) -> bool:
        """No group has anything left but its dead letters."""
        if self._broker is None:
            return False
        try:
            for topic, group in GROUPS:
                figures = self._broker.admin.figures(topic, group)
                waiting = figures["backlog"] or figures["in_flight"] or figures["scheduled"]
                if waiting or figures["stored"] < plan.bookings:
                    return False
        except BrokerError:
            return False
        return True

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._broker is not None:
            self._broker.close()

    def _url(self) -> str:
        return self._url_path.read_text().strip()

    def _serve(self, name: str, *, port: int) -> Process:
        self._url_path.unlink(missing_ok=True)
        process = self._processes.start(
            name,
            ["outbox", "broker", "serve", "--data", str(self.data), "--port", str(port),
             "--ready-file", str(self._url_path)],
        )  # fmt: skip
        self._processes.wait_for("the broker to be ready", self._url_path.exists)
        return process
