"""The timing store of the outbox in the demo: reminders wait in the message table, and Redis has their times.

In the middle Redis loses all timers, and then it is killed with one of the two workers that fire them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from sqlalchemy import select

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.redis_options import PORT, PREFIX_DEFAULT
from broker_adapter.redis.timing_store.timing_scripts import TimingKeys
from outbox.store.message_table import MessageStore
from outbox_core.common.errors import BrokerError, BrokerUnavailable
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimingStore
from outbox_demo.delay_engine_port import ProducerRoute, with_option
from outbox_demo.plan import DemoPlan
from outbox_demo.processes import Process, ProcessGroup
from outbox_demo.proof import connected
from outbox_demo.redis_servers import URL_OPTIONS, RedisUnderDemo, RunKeys


class RedisTiming:
    """A DelayEngine on a Redis of the run's own, or one that is there already."""

    def __init__(
        self, redis: RedisUnderDemo, *, name: str, processes: ProcessGroup, say: Callable[[str], None]
    ) -> None:
        """`name`: of the run's source in Redis; `say` reports what is lost and comes back."""
        self._redis = redis
        self._name = name
        self._processes = processes
        self._say = say
        self._url = ""
        self._store: TimingStore | None = None
        self._has_keys = False
        self._plan: DemoPlan | None = None
        self._worker: Process | None = None

    def start(self, target_url: str) -> ProducerRoute:
        """Start Redis. Raises ConfigurationError where its settings would lose timers."""
        self._url = with_option(self._redis.start(), "name", self._name)
        self._store = connect_timing(self._url)
        self._store.prepare()
        self._has_keys = True
        return ProducerRoute(broker_url=target_url, timing_url=self._url)

    def start_workers(self, plan: DemoPlan) -> None:
        """Start a worker, which shares the slots with the run's compensator."""
        self._plan = plan
        self._worker = self._start_worker(1)

    def kill(self) -> str:
        """Have Redis lose all timers; when they are back, kill it, where it is the run's own, and a worker."""
        self._say(f"Redis has lost all timers: {self._redis.forget(self._keys())}")
        self._processes.wait_for("the timers to be rebuilt", self._is_complete)
        self._say("all timers rebuilt from the message table")
        if self._worker is not None:
            self._worker.kill()
        killed = self._redis.kill()
        return ", ".join(victim for victim in (killed, "a timer worker") if victim)

    def restart(self) -> str:
        """Start both again."""
        restarted = self._redis.restart()
        self._worker = self._start_worker(2)
        return " ".join(restarted_part for restarted_part in (restarted, "a timer worker") if restarted_part)

    def scheduled(self) -> int:
        """Returns how many timers there are: some are of rows that were withdrawn, until they are due."""
        figures = self._opened().figures()
        if not all(slot.complete for slot in figures):
            raise BrokerUnavailable("the timing store is being rebuilt")
        return sum(slot.timers for slot in figures)

    def waiting(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that are in the message table, where they wait."""
        if self._plan is None:
            return frozenset()
        with connected(self._plan) as connection:
            unsent_ids = connection.scalars(select(MessageStore(dialect=connection.dialect).tables.message.c.id))
            return frozenset(unsent_ids) & frozenset(ids)

    def close(self) -> None:
        """Remove the keys of the run."""
        if self._store is not None:
            self._store.close()
        if self._has_keys:
            self._redis.close(self._keys())

    def _opened(self) -> TimingStore:
        if self._store is None:
            raise BrokerUnavailable("Redis was not started")
        return self._store

    def _keys(self) -> RunKeys:
        prefix = BrokerUrl.parse(self._url, port=PORT, options=URL_OPTIONS).options.get("prefix")
        keys = TimingKeys(prefix or PREFIX_DEFAULT, self._name)
        own = [key for slot in range(self._opened().slots) for key in keys.of_slot(slot)]
        return RunKeys(own=own, sources=keys.sources, source=self._name)

    def _is_complete(self) -> bool:
        try:
            return all(slot.complete for slot in self._opened().figures())
        except BrokerError:
            return False

    def _start_worker(self, worker_number: int) -> Process:
        if self._plan is None:
            raise BrokerUnavailable("the run has no plan yet")
        return self._processes.start(
            f"timer-worker-{worker_number}",
            self._plan.compensator_arguments,
            environment=self._plan.compensator_environment,
        )
