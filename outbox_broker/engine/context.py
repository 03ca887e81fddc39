"""Shared context of the engine's parts: the lock, the two logs, the schedule, the state. Makes no decisions.

Locks are acquired in this order, and none while a later one is held: a group's `pulling`; the index repair's own;
`lock`. Waits for a disk happen without `lock`, except for writes to the logs, which it orders.
"""

from __future__ import annotations

import threading
from pathlib import Path

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.journal.journal import Journal
from outbox_broker.journal.segment_footer import FooterBlocks
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.log.storage import Storage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.clock import Clock
from outbox_core.common.errors import StorageFailed


class EngineContext:
    """Shared by the collaborators of one engine. Callers of methods marked "under the lock" hold `lock`."""

    schedule: DelayStore
    messages: Journal
    actions: Journal
    """All three are opened with the engine."""

    def __init__(
        self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage, reserve: Reserve | None
    ) -> None:
        self.folder = folder
        self.clock = clock
        self.options = options
        self.storage = storage
        self.lock = threading.RLock()
        self.closed = False
        self.footer_blocks = FooterBlocks(self._read_messages)
        self.state = BrokerState(options, self.footer_blocks)
        self.reserve = reserve or Reserve(folder / "reserve", size_bytes=options.reserve_bytes)
        self.dispatching_from: int | None = None
        """Offset of the first dispatched record whose batch the schedule does not know to be appended yet."""
        self.receipts_from = 0
        """The least delivery number of a receipt that counts: those of before a restore are stale."""
        self.placed_to = -1
        """The number of the last batch of due messages that was placed in the message log. Written under the lock."""

    def _read_messages(self, offset: int, size_bytes: int) -> bytes:
        return self.messages.read(offset, size_bytes)

    def refuse_if_closed(self) -> None:
        """Raise StorageFailed if the engine is closed."""
        if self.closed:
            raise StorageFailed("the broker is closed")
