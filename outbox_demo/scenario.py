"""The scenario: starts all processes, kills some at the worst moments, and waits until all messages are settled.

The reconciliation, which checks the results, is not part of it.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from sqlalchemy import Engine, func, select

from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import database_errors, open_engine
from outbox.store.message_table import MessageStore
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import table_namespace
from outbox_core.common.errors import ConfigurationError
from outbox_demo.accelerated_clock import AcceleratedClock
from outbox_demo.delay_engine_port import ProducerRoute
from outbox_demo.demo_progress import DemoProgress
from outbox_demo.flight_data_loader import FLIGHTS, load_trips
from outbox_demo.plan import GROUPS, PAUSED_LINE, DemoPlan, RunTopics
from outbox_demo.processes import ProcessGroup, Timeout
from outbox_demo.tables import Payment, Trip, make_tables

MARKER: Final = ".outbox-demo"
BOOKINGS_A_SECOND: Final = 250
REMINDERS_SECONDS_MIN: Final = 20.0


class BrokerUnderDemo(Protocol):
    """The broker of a run: started, given its consumers, and broken once."""

    @property
    def topics(self) -> RunTopics:
        """Returns the names of the run's topics on it."""

    def start(self) -> ProducerRoute:
        """Start what the run needs of it; returns where producers publish to."""

    def start_consumers(self, plan: DemoPlan) -> None:
        """Make the consumer groups and start their processes."""

    def kill_and_restart(self) -> None:
        """Kill what may be killed in the middle of the run, and start it again after a while."""

    def is_settled(self, plan: DemoPlan) -> bool:
        """Whether no group has anything left to do; called when the outbox is empty."""

    def close(self) -> None:
        """Close connections, and remove what start() made; the processes are the run's, and have ended."""


class Scenario:
    """One run in one folder."""

    def __init__(
        self, *, url: str | None, folder: Path, bookings: int, seed: int, broker: BrokerUnderDemo,
        processes: ProcessGroup, progress: DemoProgress, flights: int = FLIGHTS, has_changes: bool = False,
    ) -> None:  # fmt: skip
        """`folder`: a fresh one (fresh_folder()), in which `processes` run. The broker and the processes are closed.

        `flights`: how many are loaded as trips, no fewer than `bookings`. `has_changes`: booked trips are canceled and
        moved, and their reminders with them. Raises ConfigurationError for more bookings than flights.
        """
        if bookings > flights:
            raise ConfigurationError(f"{bookings:,} bookings need as many flights: raise --flights, {flights:,} now")
        self._folder = folder
        self._url = url or f"sqlite:///{self._folder / 'business.db'}"
        self._bookings = bookings
        self._flights = flights
        self._seed = seed
        self._has_changes = has_changes
        self._progress = progress
        self._engine: Engine = open_engine(self._url)
        self._processes = processes
        self._broker = broker

    def run(self) -> DemoPlan:
        """Run to the end; returns the plan. Raises OutboxError with the reason if it fails."""
        try:
            route = self._broker.start()
            plan = replace(
                self._prepare(), broker_url=route.broker_url, timing_url=route.timing_url, topics=self._broker.topics
            )
            plan.write()
            self._broker.start_consumers(plan)
            self._processes.start("compensator", plan.compensator_arguments, environment=plan.compensator_environment)
            with self._progress.operation("book"):
                self._book(plan)
            with self._progress.operation("settle", steady=False):
                self._settle(plan)
            return plan
        finally:
            self._processes.stop()  # first: nothing is published to what the broker removes when it is closed
            self._broker.close()
            self._engine.dispose()

    # -- preparing ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> DemoPlan:
        with database_errors(self._engine.url):
            upgrade(self._url)
            self._empty_outbox()
            make_tables(self._engine)
            self._progress.say(f"loading {self._flights:,} flights as trips")
            with self._progress.operation("load"):
                load_trips(
                    self._engine, flights=self._flights,
                    progress=lambda loaded: self._progress.count(loaded, self._flights),
                )  # fmt: skip
            first_us, last_us, orders = self._choose_trips()
        seconds = max(REMINDERS_SECONDS_MIN, len(orders) / BOOKINGS_A_SECOND)
        clock = AcceleratedClock.fit(
            first_us=first_us, last_us=last_us, starts_at_us=time.time_ns() // 1000 + 5_000_000, seconds=seconds
        )
        return DemoPlan(
            url=self._url,
            broker_url="",
            folder=self._folder,
            clock=clock,
            first_us=first_us,
            last_us=last_us,
            bookings=len(orders),
            has_changes=self._has_changes,
            poison_order=random.Random(self._seed).choice(orders),
        )

    def _choose_trips(self) -> tuple[int, int, list[int]]:
        """A range of departures with as many trips as bookings; all departures in its last minute are included."""
        with self._engine.connect() as connection:
            by_departure = select(Trip.id, Trip.departs_at_us).order_by(Trip.departs_at_us, Trip.id)
            start = random.Random(self._seed).randrange(self._flights - self._bookings + 1)
            rows = connection.execute(by_departure.offset(start).limit(self._bookings)).all()
            first_us, last_us = rows[0].departs_at_us, rows[-1].departs_at_us
            within = select(Trip.id).where(Trip.departs_at_us.between(first_us, last_us)).order_by(Trip.id)
            return first_us, last_us, list(connection.scalars(within))

    def _empty_outbox(self) -> None:
        with self._engine.begin() as connection:
            tables = outbox_tables(table_namespace(self._engine.dialect, None))
            for table in (tables.message, tables.archive, tables.inbox):
                connection.execute(table.delete())

    # -- running -----------------------------------------------------------------------------------------------------

    def _book(self, plan: DemoPlan) -> None:
        """Book all trips; kill the worker between a commit and its send, and the broker in the middle."""
        pause_after = plan.bookings * 2 // 3
        worker = self._processes.start(
            "worker-1", ["outbox_demo.booking_worker", str(plan.path), "--pause-before-send-after", str(pause_after)]
        )
        while not worker.has_line():
            self._count_payments(plan)
        if PAUSED_LINE not in worker.lines.readline():
            worker.check()
            raise Timeout("the booking worker ended before it was to be killed")
        # Sends have stopped, bookings continue: wait for some commits whose messages this worker will never send.
        self._processes.wait_for("commits without a send", lambda: self._overdue(plan) >= min(100, plan.bookings // 10))
        worker.kill()
        self._progress.say(
            f"booking worker killed between commit and send; {self._overdue(plan):,} messages left in the outbox"
        )
        worker = self._processes.start("worker-2", ["outbox_demo.booking_worker", str(plan.path)])
        self._processes.wait_for(
            "two thirds of the payments", lambda: self._count_payments(plan) * 3 >= plan.bookings * 2
        )
        self._broker.kill_and_restart()
        self._processes.wait_for(
            "the booking worker to end", lambda: self._count_payments(plan) < 0 or not worker.running
        )
        worker.check()
        self._progress.say(f"{self._count_payments(plan):,} trips booked and paid")

    def _settle(self, plan: DemoPlan) -> None:
        """Wait until nothing is left to send and to do."""

        def is_settled() -> bool:
            self._progress.count(self._handled(), plan.bookings * len(GROUPS))
            return not self._unsent(plan, due_before_ms=plan.later_ms) and self._broker.is_settled(plan)

        self._processes.wait_for("everything to settle", is_settled)

    def _count_payments(self, plan: DemoPlan) -> int:
        """Returns how many there are, and shows it."""
        payments = self._payments()
        self._progress.count(payments, plan.bookings)
        return payments

    # -- queries -----------------------------------------------------------------------------------------------------

    def _payments(self) -> int:
        with self._engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(Payment)) or 0

    def _handled(self) -> int:
        """Returns how many messages the groups have handled, by their marks in the inbox."""
        inbox = outbox_tables(table_namespace(self._engine.dialect, None)).inbox
        with self._engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(inbox)) or 0

    def _overdue(self, plan: DemoPlan) -> int:
        return self._unsent(plan, due_before_ms=time.time_ns() // 1_000_000)

    def _unsent(self, plan: DemoPlan, *, due_before_ms: int) -> int:
        """Count what the outbox has to send: all that it holds, but for what it keeps itself until it is due."""
        message = MessageStore(dialect=self._engine.dialect).tables.message
        statement = select(func.count()).select_from(message)
        if plan.timing_url is not None:
            statement = statement.where(message.c.deliver_at_ms.is_(None) | (message.c.deliver_at_ms < due_before_ms))
        with self._engine.connect() as connection:
            return connection.scalar(statement) or 0


def fresh_folder(folder: Path) -> Path:
    """Returns an empty folder for this run. Only a folder of an earlier demo is emptied."""
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise ConfigurationError(f"{folder} is not empty and not an earlier demo's; choose another --folder")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as error:
        raise ConfigurationError(f"cannot write to {folder}: {error.strerror}; choose another --folder") from error
    return folder
