"""The plan of a demo run: a file that all its processes read."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.private_files import write_private
from outbox_demo.accelerated_clock import AcceleratedClock

PAYMENT_COMPLETED: Final = "payment.completed"
TRIP_REMINDER: Final = "trip.reminder"
TICKETING: Final = "ticketing"
NOTIFICATION: Final = "notification"
PAUSED_LINE: Final = "committed, and not sent yet"
RUN_MS_MAX: Final = 12 * 3_600_000
"""No run lasts as long."""

TOPICS: Final = (PAYMENT_COMPLETED, TRIP_REMINDER)
GROUPS: Final = ((PAYMENT_COMPLETED, TICKETING), (PAYMENT_COMPLETED, NOTIFICATION), (TRIP_REMINDER, NOTIFICATION))


@dataclass(frozen=True, slots=True)
class RunTopics:
    """The names that a run's topics have on its broker: those on another broker begin with the name of the run."""

    run: str = ""

    @staticmethod
    def of_new_run() -> RunTopics:
        """Returns topics with a name that no other run has."""
        return RunTopics(f"outbox-demo-{secrets.token_hex(4)}")

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
    broker_url: str
    folder: Path
    clock: AcceleratedClock
    first_us: int
    last_us: int
    bookings: int
    poison_order: int
    topics: RunTopics = RunTopics()
    timing_url: str | None = None
    """The timing store, where scheduled messages wait in the message table."""
    has_changes: bool = False
    """Whether booked trips are canceled and moved, and their reminders with them."""
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
    def pending_path(self) -> Path:
        """The file with the ids of the messages that still waited at the end, a line each."""
        return self.folder / "pending.txt"

    @property
    def later_ms(self) -> int:
        """What is due from then on is due after the run."""
        return self.clock.starts_at_us // 1_000 + RUN_MS_MAX

    @property
    def compensator_arguments(self) -> list[str]:
        """The command of a compensator of this run; several share what they serve by leases."""
        leases = ["--leases"] if self.timing_url else []
        return ["outbox", "compensator", "run", "--interval-ms", "500", *leases]

    @property
    def compensator_environment(self) -> dict[str, str]:
        """The URLs for that command, which may hold passwords: other users of the machine see a command's arguments."""
        timing = {"OUTBOX_TIMING__STORE": self.timing_url} if self.timing_url else {}
        return {"OUTBOX_DATABASE__URL": self.url, "OUTBOX_BROKER__URL": self.broker_url, **timing}

    @property
    def path(self) -> Path:
        """The file of the plan."""
        return self.folder / "plan.json"

    def write(self) -> None:
        """Write the plan for the other processes."""
        write_private(self.path, msgspec.json.encode(self, enc_hook=str))  # the URL may hold a password

    @staticmethod
    def read(path: Path) -> DemoPlan:
        """Read the plan of this process's run."""
        return msgspec.json.decode(path.read_bytes(), type=DemoPlan, dec_hook=lambda kind, value: kind(value))
