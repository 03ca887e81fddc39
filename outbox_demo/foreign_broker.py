"""Runs the demo on another broker, with topics of the run's own on it, and a delay service in front of it.

The broker itself is left alone. What is killed in the middle is the delay service and a consumer.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote

from outbox_core import Broker, connect
from outbox_core.common.errors import BrokerError, ConfigurationError
from outbox_core.messages.durability_inspection import Inspectable
from outbox_core.messages.url_parts import split_url
from outbox_demo.foreign_client import ForeignClient, engine_of, open_client
from outbox_demo.plan import NOTIFICATION, TICKETING, DemoPlan, RunTopics
from outbox_demo.processes import Process, ProcessGroup
from outbox_demo.proof import count_marks

DOWN_SECONDS: Final = 2.0
PATIENCE_SECONDS: Final = 30.0
"""How long a message that was delivered may be on its way to its mark in an inbox."""


class ForeignBroker:
    """A BrokerUnderDemo at a URL that an adapter knows."""

    def __init__(self, url: str, *, folder: Path, processes: ProcessGroup, say: Callable[[str], None]) -> None:
        """`folder`: that of the run; `say` reports what is killed. Raises ConfigurationError for a URL that the demo
        cannot use.
        """
        given = dict(parse_qsl(split_url(url).query, keep_blank_values=True))
        if "delay" in given:
            raise ConfigurationError("the demo starts a delay service itself: leave delay= out of the broker's URL")
        self.topics = RunTopics(f"outbox-demo-{secrets.token_hex(4)}")
        self._target_url = url
        for name, value in engine_of(url).added.items():
            if name not in given:
                self._target_url = _with_option(self._target_url, name, value)
        self._folder = folder
        self._delay_url_path = folder / "delay-url.txt"
        self._processes = processes
        self._say = say
        self._client: ForeignClient | None = None
        self._delay: Broker | None = None
        self._killable: list[Process] = []
        self._has_topics = False
        self._progress = Progress(patience_s=PATIENCE_SECONDS)

    def start(self) -> str:
        """Make the topics, and start the delay service; returns the URL that names both. Raises BrokerError where the
        broker cannot be reached.
        """
        self._inspect()
        self._client = open_client(self._target_url, self.topics)
        self._client.make_topics()
        self._has_topics = True
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
        """Nothing is scheduled any more, no group has a message left, and each message has its marks in the inboxes.

        Where marks are missing it is settled, too, when none was added for a while: those messages are lost.
        """
        if self._client is None or self._delay is None:
            return False
        try:
            scheduled = sum(self._delay.admin.figures(topic)["scheduled"] for topic in self.topics.names)
        except BrokerError:
            return False
        if scheduled or self._client.unsettled():
            return False
        marks, expected = count_marks(plan)
        return marks >= expected or self._progress.has_ended(marks)

    def close(self) -> None:
        """Remove the run's topics, and close the connections."""
        if self._client is not None:
            if self._has_topics:
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


class Progress:
    """Whether a number still grows."""

    def __init__(self, *, patience_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`patience_s`: how long it may stay the same."""
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._last: tuple[int, float] | None = None

    def has_ended(self, number: int) -> bool:
        """Whether it has been this number for that long."""
        now = self._monotonic()
        if self._last is None or self._last[0] != number:
            self._last = (number, now)
        return now - self._last[1] >= self._patience_s


def _with_option(url: str, name: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"
