"""The run itself: start everything, break things at the worst moments, wait until all is settled.

Nothing is judged here.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, func, select

from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import database_errors, open_engine
from outbox.store.schema import outbox_tables, schema_for
from outbox_core import Broker, GroupConfig, connect
from outbox_core.common.errors import BrokerError, ConfigurationError, OutboxError
from outbox_demo.clock import DemoClock
from outbox_demo.flights import FLIGHTS, load_trips
from outbox_demo.plan import DEMO_SCHEMA, GROUPS, NOTIFICATION, PAUSED_LINE, TICKETING, DemoPlan
from outbox_demo.processes import Process
from outbox_demo.tables import Payment, Trip, make_tables

MARKER: Final = ".outbox-demo"
BOOKINGS_A_SECOND: Final = 250
REMINDERS_SECONDS_MIN: Final = 20.0
SETTLE_SECONDS_MAX: Final = 600.0
BROKER_DOWN_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 0.2


class Timeout(OutboxError):
    """Something that the demo waits for did not happen; the logs in its folder say more."""


class Scenario:
    """One run in one folder. `say` is told each step, `step` how far booking has come."""

    def __init__(self, *, url: str | None, folder: Path, bookings: int, seed: int, say: Callable[[str], None]) -> None:
        if not 100 <= bookings <= FLIGHTS:
            raise ConfigurationError(f"bookings must be from 100 to {FLIGHTS:,}")
        self._folder = _fresh_folder(folder)
        self._url = url or f"sqlite:///{self._folder / 'business.db'}"
        self._bookings = bookings
        self._seed = seed
        self._say = say
        self._engine: Engine = open_engine(self._url)
        self._processes: list[Process] = []
        self._pause = threading.Event()
        self._broker: Process | None = None
        self.broker_data = self._folder / "broker"

    def run(self) -> DemoPlan:
        """Run to the end; returns what was planned. Raises OutboxError with the reason when it cannot end well."""
        try:
            plan = self._prepare()
            with self._broker_running() as broker:
                plan = self._plan_for(plan, broker)
                self._run_processes(plan)
            return plan
        finally:
            for process in reversed(self._processes):
                process.stop()
            self._engine.dispose()

    # -- preparing ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> DemoPlan:
        with database_errors(self._engine.url):
            upgrade(self._url, schema=DEMO_SCHEMA)
            self._empty_outbox()
            make_tables(self._engine)
            self._say(f"loading {FLIGHTS:,} flights as trips")
            load_trips(self._engine, progress=lambda _: None)
            first_us, last_us, orders = self._choose_trips()
        seconds = max(REMINDERS_SECONDS_MIN, len(orders) / BOOKINGS_A_SECOND)
        clock = DemoClock.fit(
            first_us=first_us, last_us=last_us, starts_at_us=time.time_ns() // 1000 + 5_000_000, seconds=seconds
        )
        return DemoPlan(
            url=self._url,
            schema=schema_for(self._engine.dialect, DEMO_SCHEMA),
            broker_url="",
            folder=self._folder,
            clock=clock,
            first_us=first_us,
            last_us=last_us,
            bookings=len(orders),
            poison_order=random.Random(self._seed).choice(orders),
        )

    def _choose_trips(self) -> tuple[int, int, list[int]]:
        """A stretch of departures as long as there are bookings to make; departures at its last minute come along."""
        with self._engine.connect() as connection:
            by_departure = select(Trip.id, Trip.departs_at_us).order_by(Trip.departs_at_us, Trip.id)
            start = random.Random(self._seed).randrange(FLIGHTS - self._bookings + 1)
            rows = connection.execute(by_departure.offset(start).limit(self._bookings)).all()
            first_us, last_us = rows[0].departs_at_us, rows[-1].departs_at_us
            within = select(Trip.id).where(Trip.departs_at_us.between(first_us, last_us)).order_by(Trip.id)
            return first_us, last_us, list(connection.scalars(within))

    def _empty_outbox(self) -> None:
        tables = outbox_tables(schema_for(self._engine.dialect, DEMO_SCHEMA))
        with self._engine.begin() as connection:
            for table in (tables.message, tables.archive, tables.inbox):
                connection.execute(table.delete())

    # -- running -----------------------------------------------------------------------------------------------------

    def _run_processes(self, plan: DemoPlan) -> None:
        broker = connect(plan.broker_url)
        try:
            self._declare_groups(plan, broker)
            for group in (TICKETING, NOTIFICATION):
                self._start(group, ["outbox_demo.consumers", str(plan.path), group])
            self._start_compensator(plan)
            self._book(plan)
            self._await("everything to settle", lambda: self._settled(plan, broker))
        finally:
            broker.close()

    def _book(self, plan: DemoPlan) -> None:
        """Book it all, killing the worker between a commit and its send, and the broker in the middle."""
        pause_after = plan.bookings * 2 // 3
        worker = self._start(
            "worker-1", ["outbox_demo.booking_worker", str(plan.path), "--pause-before-send-after", str(pause_after)]
        )
        if PAUSED_LINE not in worker.lines.readline():
            worker.check()
            raise Timeout("the booking worker ended before it was to be killed")
        # Sends stand still, bookings do not: let some commits pile up whose sends will never come.
        self._await("commits without a send", lambda: self._unsent() >= min(100, plan.bookings // 10))
        worker.kill()
        self._say(f"booking worker killed between commit and send; {self._unsent():,} messages left in the outbox")
        worker = self._start("worker-2", ["outbox_demo.booking_worker", str(plan.path)])
        self._await("two thirds of the payments", lambda: self._payments() * 3 >= plan.bookings * 2)
        self._restart_broker(plan)
        self._await("the booking worker to end", lambda: not worker.running)
        worker.check()
        self._say(f"{self._payments():,} trips booked and paid")

    def _restart_broker(self, plan: DemoPlan) -> None:
        if self._broker is not None:
            self._broker.kill()
        self._say("broker killed; bookings go on without it")
        self._pause.wait(BROKER_DOWN_SECONDS)
        self._broker = self._start_broker(port=int(plan.broker_url.rpartition(":")[2]), name="broker-2")
        self._say("broker started again on the same data")

    def _settled(self, plan: DemoPlan, broker: Broker) -> bool:
        """No message unsent; no group has anything left but its dead letters."""
        if self._unsent():
            return False
        try:
            for topic, group in GROUPS:
                figures = broker.admin.figures(topic, group)
                if (
                    figures["backlog"]
                    or figures["in_flight"]
                    or figures["scheduled"]
                    or figures["stored"] < plan.bookings
                ):
                    return False
        except BrokerError:
            return False
        return True

    def _declare_groups(self, plan: DemoPlan, broker: Broker) -> None:
        config = GroupConfig(max_attempts=plan.attempts_max, backoff_initial_ms=200, backoff_max_ms=2_000)
        for topic, group in GROUPS:
            broker.admin.declare_group(topic, group, config)

    # -- processes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _broker_running(self) -> Iterator[str]:
        self._broker = self._start_broker(port=0, name="broker-1")
        yield self._url_path.read_text().strip()

    @property
    def _url_path(self) -> Path:
        return self._folder / "broker-url.txt"

    def _start_broker(self, *, port: int, name: str) -> Process:
        self._url_path.unlink(missing_ok=True)
        process = self._start(
            name,
            ["outbox", "broker", "serve", "--data", str(self.broker_data), "--port", str(port),
             "--ready-file", str(self._url_path)],
        )  # fmt: skip
        self._await("the broker to be ready", self._url_path.exists)
        return process

    def _start_compensator(self, plan: DemoPlan) -> Process:
        schema = ["--schema", plan.schema] if plan.schema else []
        return self._start(
            "compensator",
            ["outbox", "compensator", "run", "--url", plan.url, "--broker", plan.broker_url, "--interval-ms", "500",
             *schema],
        )  # fmt: skip

    def _start(self, name: str, arguments: list[str]) -> Process:
        process = Process(name, arguments, folder=self._folder)
        self._processes.append(process)
        return process

    def _plan_for(self, plan: DemoPlan, broker_url: str) -> DemoPlan:
        complete = DemoPlan(
            url=plan.url, schema=plan.schema, broker_url=broker_url, folder=plan.folder, clock=plan.clock,
            first_us=plan.first_us, last_us=plan.last_us, bookings=plan.bookings, poison_order=plan.poison_order,
        )  # fmt: skip
        complete.write()
        return complete

    def _await(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for what another process does, looking every now and then."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while not done():
            if time.monotonic() > deadline:
                raise Timeout(f"waited {SETTLE_SECONDS_MAX:.0f} s for {what}; see the logs in {self._folder}")
            for process in self._processes:
                if process.name in {TICKETING, NOTIFICATION, "compensator", "worker-2"}:
                    process.check()
            self._pause.wait(_TICK_SECONDS)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _payments(self) -> int:
        with self._engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(Payment)) or 0

    def _unsent(self) -> int:
        message = outbox_tables(schema_for(self._engine.dialect, DEMO_SCHEMA)).message
        with self._engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(message)) or 0


def _fresh_folder(folder: Path) -> Path:
    """An empty folder for this run. Only a folder that an earlier demo made is emptied."""
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
