"""Whether the bookies have room for new messages: a node refuses publishes before bookies refuse all writes.

A bookie whose disk is full becomes read-only. With too few writable ones nothing can be recorded, neither a dispatch
nor a cancel. So publishes are refused earlier, while bookies still take the records of those, which free space in the
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import OutboxError, StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_FAILED_FACTOR: Final = 6
"""The pause after a measurement that failed, in intervals."""
_LISTED_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSpace:
    """The disks of one bookie. `zone`: None if zones do not matter, or that of the bookie is not known."""

    bookie: str
    is_writable: bool
    free_bytes: int
    total_bytes: int
    zone: str | None = None

    @property
    def usage(self) -> float:
        """The part of the disks that is used, 0 to 1."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomOptions:
    """`ensemble`: bookies of a ledger; `zones_min`: zones that they have to be in. `usage_max`: up to which usage a
    bookie has room for new messages; below the bookies' own `diskUsageThreshold`.
    """

    ensemble: int
    zones_min: int = 1
    usage_max: float = 0.9
    every_ms: int = 10_000


def why_no_room(spaces: Sequence[BookieSpace], options: RoomOptions) -> str | None:
    """Returns why publishes have to be refused, with the cure; None if there is room for them."""
    roomy = [space for space in spaces if space.is_writable and space.usage <= options.usage_max]
    zones = {space.zone for space in roomy if space.zone is not None}
    if len(roomy) >= options.ensemble and (options.zones_min == 1 or len(zones) >= options.zones_min):
        return None
    wanted = f"a ledger needs {options.ensemble}" + (f" in {options.zones_min} zones" if options.zones_min > 1 else "")
    others = [space for space in spaces if space not in roomy]
    listed = ", ".join(_described(space) for space in sorted(others, key=_by_usage)[:_LISTED_MAX])
    return (
        f"{len(roomy)} of {len(spaces)} bookies have room for new messages, and {wanted}: {listed or 'none answers'}; "
        "what is scheduled can be sent and canceled; add bookies or disk space, and publishes are accepted again"
    )


class BookieRoom:
    """Measures the bookies' disks in a thread. start() and stop() are idempotent; all else is thread-safe."""

    def __init__(self, measure: Callable[[], Sequence[BookieSpace]], *, options: RoomOptions) -> None:
        """`measure`: returns the disks of the bookies that answer. If it raises OutboxError, what was known before
        holds, and at first that there is room.
        """
        self._measure = measure
        self._options = options
        self._reason: str | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start measuring."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bookie-room", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, after the measurement in progress."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def why_none(self) -> str | None:
        """Returns why publishes are refused; None if they are not."""
        return self._reason

    def require(self) -> None:
        """Raise StorageFailed, with the reason, if publishes are refused."""
        reason = self._reason
        if reason is not None:
            raise StorageFailed(reason)

    def check_room(self) -> None:
        """See require()."""
        self.require()

    def disk_space(self) -> None:
        """Returns None: the disks are the bookies', and `outbox delay status` shows them."""

    def measure(self) -> bool:
        """Measure once; returns whether that succeeded."""
        try:
            reason = why_no_room(self._measure(), self._options)
        except OutboxError as error:
            logger.warning("bookie_space_unknown", extra={"error": str(error)})
            return False
        if (reason is None) is not (self._reason is None):
            event = "publishes_accepted_again" if reason is None else "publishes_refused_for_space"
            logger.warning(event, extra={} if reason is None else {"reason": reason})
        self._reason = reason
        return True

    def _run(self) -> None:
        wait_ms = 0
        while not self._stopping.wait(wait_ms / 1000):
            wait_ms = self._options.every_ms * (1 if self._measured() else _FAILED_FACTOR)

    def _measured(self) -> bool:
        try:
            return self.measure()
        except Exception:  # the thread boundary: it goes on with what was known before
            logger.exception("bookie_space_failed")
            return False


def _described(space: BookieSpace) -> str:
    state = "" if space.is_writable else ", read-only"
    return f"{space.bookie} is {space.usage:.0%} full{state}"


def _by_usage(space: BookieSpace) -> tuple[bool, float, str]:
    return space.is_writable, -space.usage, space.bookie
