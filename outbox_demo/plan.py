"""What the processes of one demo run agree on, written to a file that each of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from outbox_demo.clock import DemoClock

PAYMENT_COMPLETED: Final = "payment.completed"
TRIP_REMINDER: Final = "trip.reminder"
TICKETING: Final = "ticketing"
NOTIFICATION: Final = "notification"
DEMO_SCHEMA: Final = "outbox_demo"
PAUSED_LINE: Final = "committed, and not sent yet"

GROUPS: Final = ((PAYMENT_COMPLETED, TICKETING), (PAYMENT_COMPLETED, NOTIFICATION), (TRIP_REMINDER, NOTIFICATION))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One run: where things are, which trips are booked, and what goes wrong when."""

    url: str
    schema: str | None
    broker_url: str
    folder: Path
    clock: DemoClock
    first_us: int
    last_us: int
    bookings: int
    poison_order: int
    fails_every: int = 50
    first_try_fails_every: int = 101
    lease_ms: int = 6_000
    invisible_ms: int = 5_000
    attempts_max: int = 4

    @property
    def rolled_back_path(self) -> Path:
        """Where the worker notes each business function that failed, a line each."""
        return self.folder / "rolled-back.txt"

    @property
    def path(self) -> Path:
        """Where the plan itself is written."""
        return self.folder / "plan.json"

    def write(self) -> None:
        """Write the plan for the other processes."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))

    @staticmethod
    def read(path: Path) -> DemoPlan:
        """The plan of the run that this process belongs to."""
        return msgspec.json.decode(path.read_bytes(), type=DemoPlan, dec_hook=lambda kind, value: kind(value))
