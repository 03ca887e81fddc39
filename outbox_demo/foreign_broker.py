"""The broker that you have, in the demo: topics of the run's own on it, and a delay service of ours in front of it.

The broker itself is left alone. What is killed in the middle is the delay service and a consumer.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote

from outbox_core import Broker, connect
from outbox_core.common.errors import BrokerError, ConfigurationError
from outbox_core.messages.inspection import Inspectable
from outbox_core.messages.url_parts import split_url
from outbox_demo.foreign_client import ForeignClient, engine_of, open_client
from outbox_demo.plan import NOTIFICATION, TICKETING, TOPICS, DemoPlan
from outbox_demo.processes import Process, ProcessGroup

DOWN_SECONDS: Final = 2.0


class ForeignBroker:
    """A BrokerUnderDemo at a URL that an adapter knows."""

    def __init__(self, url: str, *, folder: Path, processes: ProcessGroup, say: Callable[[str], None]) -> None:
        """`folder`: that of the run; `say` is told what is killed. Raises ConfigurationError for a URL that the demo
        cannot use.
        """
        given = dict(parse_qsl(split_url(url).query, keep_blank_values=True))
        if given.keys() & {"prefix", "delay"}:
            raise ConfigurationError("the demo chooses prefix= and delay= itself: leave them out of the broker's URL")
        engine = engine_of(url)
        prefix = f"outbox-demo-{secrets.token_hex(4)}{engine.prefix_end}"
        self._target_url = _with_option(url, "prefix", prefix)
        self._folder = folder
        self._delay_url_path = folder / "delay-url.txt"
        self._processes = processes
        self._say = say
        self._client: ForeignClient | None = None
        self._delay: Broker | None = None
        self._killable: list[Process] = []

    def start(self) -> str:
        """Make the topics, and start the delay service; returns the URL that names both. Raises BrokerError where the
        broker cannot be reached.
        """
        self._inspect()
        self._client = open_client(self._target_url)
        self._client.make_topics()
        service = self._serve_delays("delay-1", port=0)
        self._delay = connect(self._delay_url())
        self._killable = [service]
        return _with_option(self._target_url, "delay", self._delay_url())

    def start_consumers(self, plan: DemoPlan) -> None:
        """Start a process for each group, which reads by the broker's own client."""
        self._plan_path = plan.path
        self._consume("notification", NOTIFICATION)
        self._killable.append(self._consume("ticketing-1", TICKETING))

    def kill_and_restart(self) -> None:
        """Kill the delay service and a consumer; after a while start them on the same data and port."""
        port = int(self._delay_url().rpartition(":")[2])
        for process in self._killable:
            process.kill()
        self._say("delay service and a consumer killed; bookings go on without them")
        threading.Event().wait(DOWN_SECONDS)
        self._serve_delays("delay-2", port=port)
        self._consume("ticketing-2", TICKETING)
        self._say("delay service started again on the same data, and the consumer")

    def is_settled(self, plan: DemoPlan) -> bool:
        """Nothing is scheduled any more, and no group has a message that it has not acknowledged."""
        del plan
        if self._client is None or self._delay is None:
            return False
        try:
            scheduled = sum(self._delay.admin.figures(topic)["scheduled"] for topic in TOPICS)
        except BrokerError:
            return False
        return not scheduled and not self._client.unsettled()

    def close(self) -> None:
        """Remove the run's topics, and close the connections."""
        if self._client is not None:
            self._client.remove_topics()
            self._client.close()
        if self._delay is not None:
            self._delay.close()

    def _inspect(self) -> None:
        broker = connect(self._target_url)
        try:
            if isinstance(broker, Inspectable):
                inspection = broker.inspect()
                self._say(f"the broker is {inspection.product} {inspection.version}")
                for weakness in inspection.weaknesses:
                    self._say(f"it is set weaker than it could be: {weakness.subject}: {weakness.cure}")
        finally:
            broker.close()

    def _delay_url(self) -> str:
        return self._delay_url_path.read_text().strip()

    def _serve_delays(self, name: str, *, port: int) -> Process:
        self._delay_url_path.unlink(missing_ok=True)
        process = self._processes.start(
            name,
            ["outbox", "delay", "serve", "--data", str(self._folder / "delay"), "--target", self._target_url,
             "--port", str(port), "--ready-file", str(self._delay_url_path)],
        )  # fmt: skip
        self._processes.wait_for("the delay service to be ready", self._delay_url_path.exists)
        return process

    def _consume(self, name: str, group: str) -> Process:
        return self._processes.start(name, ["outbox_demo.foreign_consumers", str(self._plan_path), group])


def _with_option(url: str, name: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"
