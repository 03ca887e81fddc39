"""The plan of a demo run: a file that all its processes read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from outbox_demo.accelerated_clock import DemoClock

PAYMENT_COMPLETED: Final = "payment.completed"
TRIP_REMINDER: Final = "trip.reminder"
TICKETING: Final = "ticketing"
NOTIFICATION: Final = "notification"
DEMO_SCHEMA: Final = "outbox_demo"
PAUSED_LINE: Final = "committed, and not sent yet"

TOPICS: Final = (PAYMENT_COMPLETED, TRIP_REMINDER)
GROUPS: Final = ((PAYMENT_COMPLETED, TICKETING), (PAYMENT_COMPLETED, NOTIFICATION), (TRIP_REMINDER, NOTIFICATION))


@dataclass(frozen=True, slots=True)
class RunTopics:
    """The names that a run's topics have on its broker: those on another broker begin with the name of the run."""

    run: str = ""

    def full(self, topic: str) -> str:
        """The name on the broker."""
        return f"{self.run}.{topic}" if self.run else topic

    def plain(self, name: str) -> str:
        """The topic that has this name on the broker."""
        return name.removeprefix(f"{self.run}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all topics on the broker."""
        return tuple(self.full(topic) for topic in TOPICS)

    @property
    def groups(self) -> tuple[str, ...]:
        """The consumer groups."""
        return tuple(sorted({group for _, group in GROUPS}))

    @property
    def subscriptions(self) -> tuple[tuple[str, str], ...]:
        """A topic's name on the broker and a group that reads it, for each that does."""
        return tuple((self.full(topic), group) for topic, group in GROUPS)

    def read_by(self, group: str) -> tuple[str, ...]:
        """The names on the broker of what a group reads."""
        return tuple(name for name, reader in self.subscriptions if reader == group)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One run: addresses and folders, the trips to book, and the planned failures."""

    url: str
    schema: str | None
    broker_url: str
    folder: Path
    clock: DemoClock
    first_us: int
    last_us: int
    bookings: int
    poison_order: int
    topics: RunTopics = RunTopics()
    fails_every: int = 50
    first_try_fails_every: int = 101
    lease_ms: int = 6_000
    invisible_ms: int = 5_000
    attempts_max: int = 4

    @property
    def rolled_back_path(self) -> Path:
        """The file to which the worker writes a line for each business function that failed."""
        return self.folder / "rolled-back.txt"

    @property
    def deduplicated_path(self) -> Path:
        """The file in which consumers of another broker write a line for each message that the inbox dropped."""
        return self.folder / "deduplicated.txt"

    @property
    def path(self) -> Path:
        """The file of the plan."""
        return self.folder / "plan.json"

    def write(self) -> None:
        """Write the plan for the other processes."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))

    @staticmethod
    def read(path: Path) -> DemoPlan:
        """Read the plan of this process's run."""
        return msgspec.json.decode(path.read_bytes(), type=DemoPlan, dec_hook=lambda kind, value: kind(value))
