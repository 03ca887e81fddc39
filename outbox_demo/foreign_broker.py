"""Runs the demo on another broker, with topics of the run's own on it, and a delay engine for what is scheduled.

The broker itself is left alone. What is killed in the middle is what the delay engine says, and a consumer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qsl

from outbox_core import connect
from outbox_core.common.errors import BrokerError, ConfigurationError
from outbox_core.messages.broker_port import Inspectable
from outbox_core.messages.url_parts import split_url
from outbox_demo.delay_engine_port import DelayEngine, ProducerRoute, with_option
from outbox_demo.foreign_client_port import ForeignClient, engine_of, open_client
from outbox_demo.plan import NOTIFICATION, TICKETING, DemoPlan, RunTopics
from outbox_demo.processes import Process, ProcessGroup
from outbox_demo.proof import Fate, FindingKind, compare_run, later_reminders

DOWN_SECONDS: Final = 2.0
PATIENCE_SECONDS: Final = 30.0
"""How long a message that was delivered may be on its way to its mark in an inbox."""


class ForeignBroker:
    """A BrokerUnderDemo at a URL that an adapter knows."""

    def __init__(
        self, url: str, *, topics: RunTopics, delay: DelayEngine, processes: ProcessGroup, say: Callable[[str], None],
        ends_with_run: bool = False,
    ) -> None:  # fmt: skip
        """`say` reports what is killed. `ends_with_run`: the broker is one of `processes`.

        Raises ConfigurationError for a URL that the demo cannot use.
        """
        url_options = dict(parse_qsl(split_url(url).query, keep_blank_values=True))
        if "delay" in url_options:
            raise ConfigurationError("the demo starts a delay service itself: leave delay= out of the broker's URL")
        self.topics = topics
        self._target_url = url
        for name, value in engine_of(url).added.items():
            if name not in url_options:
                self._target_url = with_option(self._target_url, name, value)
        self._processes = processes
        self._say = say
        self._client: ForeignClient | None = None
        self._delay = delay
        self._consumer: Process | None = None
        self._leaves_topics = False
        self._ends_with_run = ends_with_run
        self._standstill = StandstillWatch(patience_s=PATIENCE_SECONDS)

    def start(self) -> ProducerRoute:
        """Make the topics, and start the delay engine. Raises BrokerError where the broker cannot be reached."""
        self._inspect()
        self._client = open_client(self._target_url, self.topics)
        self._client.make_topics()
        self._leaves_topics = not self._ends_with_run
        return self._delay.start(self._target_url)

    def start_consumers(self, plan: DemoPlan) -> None:
        """Start a process for each group, which reads by the broker's own client."""
        self._plan_path = plan.path
        self._delay.start_workers(plan)
        self._consume("notification", NOTIFICATION)
        self._consumer = self._consume("ticketing-1", TICKETING)

    def kill_and_restart(self) -> None:
        """Kill what keeps scheduled messages, and a consumer; after a while start them again."""
        killed = self._delay.kill()
        if self._consumer is not None:
            self._consumer.kill()
        self._say(f"{killed} and a consumer killed; bookings go on without them")
        threading.Event().wait(DOWN_SECONDS)
        restarted = self._delay.restart()
        self._consume("ticketing-2", TICKETING)
        self._say(f"{restarted} and the consumer started again")

    def is_settled(self, plan: DemoPlan) -> bool:
        """Nothing is scheduled any more but what is due after the run, no group has a message left, and each message
        has its marks in the inboxes.

        Where marks are missing it is settled, too, when none was added for a while: those messages are lost.
        """
        if self._client is None:
            return False
        later = later_reminders(plan)
        try:
            if self._delay.scheduled() > len(later) or self._client.unsettled():
                return False
            pending = self._delay.waiting(later)
        except BrokerError:
            return False
        plan.pending_path.write_text("\n".join(sorted(pending)))
        comparison = compare_run(plan)
        is_whole = not comparison.figures[FindingKind.LOST]
        return is_whole or self._standstill.has_ended(comparison.fates.get(Fate.DELIVERED, 0))

    def close(self) -> None:
        """Remove the run's topics, and close the connections."""
        if self._client is not None:
            if self._leaves_topics:
                self._client.remove_topics()
            self._client.close()
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

    def _consume(self, name: str, group: str) -> Process:
        return self._processes.start(name, ["outbox_demo.foreign_consumers", str(self._plan_path), group])


class StandstillWatch:
    """Whether a number has stopped growing."""

    def __init__(self, *, patience_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`patience_s`: how long it may stay the same."""
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._last: tuple[int, float] | None = None

    def has_ended(self, count: int) -> bool:
        """Whether it has been this count for that long."""
        now = self._monotonic()
        if self._last is None or self._last[0] != count:
            self._last = (count, now)
        return now - self._last[1] >= self._patience_s
