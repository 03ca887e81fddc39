"""The delay service of one process in the demo: killed in the middle, and started again on the same data and port."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from outbox_core.common.errors import BrokerUnavailable
from outbox_demo.delay_engine_port import ProducerRoute, with_option
from outbox_demo.plan import DemoPlan, RunTopics
from outbox_demo.processes import ProcessGroup
from outbox_demo.scheduled_message_query import ScheduledMessageQuery
from outbox_demo.server_process import ServerProcess


class DelayProcess:
    """A DelayEngine on a folder of the run."""

    def __init__(self, topics: RunTopics, *, folder: Path, processes: ProcessGroup) -> None:
        """`folder`: that of the run."""
        self._topics = topics
        command = ["outbox", "delay", "serve", "--data", str(folder / "delay")]
        self._server = ServerProcess("delay", command, folder=folder, processes=processes)
        self._target_url = ""
        self._messages: ScheduledMessageQuery | None = None

    def start(self, target_url: str) -> ProducerRoute:
        """Start it; returns the URL that names target and service."""
        self._target_url = target_url
        self._start()
        self._messages = ScheduledMessageQuery(self._server.url)
        return ProducerRoute(broker_url=with_option(target_url, "delay", self._server.url))

    def start_workers(self, plan: DemoPlan) -> None:
        """Nothing: it needs no database."""

    def kill(self) -> str:
        """Kill it."""
        self._server.kill()
        return "delay service"

    def restart(self) -> str:
        """Start it on the same data and port."""
        self._start()
        return "delay service"

    def scheduled(self) -> int:
        """Returns how many messages wait in it."""
        return self._asked().count(self._topics.names)

    def waiting(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that wait."""
        return self._asked().find(ids)

    def close(self) -> None:
        """Close the connections."""
        if self._messages is not None:
            self._messages.close()

    def _start(self) -> None:
        self._server.start("--target", self._target_url)

    def _asked(self) -> ScheduledMessageQuery:
        if self._messages is None:
            raise BrokerUnavailable("the delay service was not started")
        return self._messages
