"""The broker of this project in the demo: a process of the run, killed in the middle and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outbox_core import Broker, GroupConfig, connect
from outbox_core.common.errors import BrokerError
from outbox_demo.delay_engine_port import ProducerRoute
from outbox_demo.plan import GROUPS, NOTIFICATION, TICKETING, DemoPlan, RunTopics
from outbox_demo.processes import ProcessGroup
from outbox_demo.server_process import ServerProcess

DOWN_SECONDS: Final = 2.0


class OwnBroker:
    """A BrokerUnderDemo on one data folder."""

    topics = RunTopics()

    def __init__(self, folder: Path, *, processes: ProcessGroup, say: Callable[[str], None]) -> None:
        """`folder`: that of the run; `say` reports what is killed."""
        self.data = folder / "broker"
        command = ["outbox", "broker", "serve", "--data", str(self.data)]
        self._server = ServerProcess("broker", command, folder=folder, processes=processes)
        self._processes = processes
        self._say = say
        self._broker: Broker | None = None

    def start(self) -> ProducerRoute:
        """Start it; returns where producers publish to."""
        self._server.start()
        return ProducerRoute(broker_url=self._server.url)

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
        self._server.kill()
        self._say("broker killed; bookings go on without it")
        threading.Event().wait(DOWN_SECONDS)
        self._server.start()
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
