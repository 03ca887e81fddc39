"""The shard of a broker on BookKeeper, on its owner: an engine that has nothing on a disk, and acts while it may."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from outbox_broker.cluster.bookie_room import BookieRoom
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.http.ledger_snapshots import LedgerSnapshots
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.log.folder_lock import FolderLock
from outbox_broker.segments.ledger import LedgerSegments
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

REFUSAL: Final = "a broker on BookKeeper has neither a target that refuses messages, nor a folder"
UNCONFIRMED_BYTES_MAX: Final = 24 * 1024 * 1024
"""Of all that the bookies have not confirmed yet, above which publishes are refused. Above 32 MiB of one segment an
append waits, and all who wait for the engine's lock with it. A footer of half a million ids, with which a segment
begins, has 18 MiB.
"""
FOLDER_PREFIX: Final = "outbox-broker-"
LEFT_BEHIND_S: Final = 3600
SENDING_MS: Final = 200
"""How long a delivery may be recorded in this process alone. Nobody waits for its record, so nothing else sends it; the
next owner would know nothing of the last deliveries, and of the attempts that they used."""


class BookieReserve(Reserve):
    """Room at the bookies, in place of a disk's: nothing of it can be released, or measured here."""

    def __init__(
        self, folder: Path, room: BookieRoom | None, *, unconfirmed_bytes_max: int = UNCONFIRMED_BYTES_MAX
    ) -> None:
        super().__init__(folder / "reserve", size_bytes=0)
        self._room = room
        self._unconfirmed_bytes_max = unconfirmed_bytes_max
        self.engine: Engine | None = None
        """Which it is the reserve of, once that is open."""

    def require(self, halves: int = 2) -> None:
        """Raise StorageFailed if new messages are refused: for lack of room, or since the bookies are far behind."""
        if halves == 1:  # what is stored is to be consumed in any case
            return
        if self._room is not None:
            self._room.check_room()
        if self.engine is not None and self.engine.unconfirmed_bytes() > self._unconfirmed_bytes_max:
            raise StorageFailed("the bookies are behind with what was published: publish slower, or add bookies")

    def make_room(self, size_bytes: int, *, spends: bool) -> None:
        """Do nothing: what a checkpoint needs is the bookies' to have."""

    def disk_figures(self) -> Mapping[str, int]:
        """None: the disks are the bookies', and `outbox broker store status` shows them."""
        return {}


class BrokerShard:
    """A RunningShard: one engine, from its opening on the segments of an owner until that owner closes it."""

    def __init__(
        self, opened: OpenedShard, engine: Engine, permit: ShardPermit, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        """Called by start(). `folder`: what the engine has while it runs, and nothing of it counts."""
        self._opened = opened
        self._folder = folder
        self._ended = threading.Event()
        self._sender = threading.Thread(target=self._send, name="broker-shard-sender", daemon=True)
        self.engine = engine
        self.permit = permit

    @classmethod
    def start(
        cls, opened: OpenedShard, permit: ShardPermit, *, clock: Clock, options: EngineOptions, room: BookieRoom | None
    ) -> BrokerShard:  # fmt: skip
        """Recover the engine, and let it deliver. `clock`: the cluster's. Raises as Engine.open() does, and
        StorageFailed where the process can make no folder or thread: then another node is to have the shard.
        """
        _remove_left_behind()
        try:
            folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        except OSError as error:
            raise StorageFailed(f"no temporary folder can be made in {tempfile.gettempdir()}: {error}") from error
        with ExitStack() as failing:
            failing.callback(folder.cleanup)
            reserve = BookieReserve(Path(folder.name), room)
            try:
                engine = Engine.open(
                    Path(folder.name), clock=clock, options=options, reserve=reserve,
                    segments=lambda _part: opened.store, annotations=opened.annotations,
                )  # fmt: skip
                failing.callback(engine.close)
                reserve.engine = engine
                shard = cls(opened, engine, permit, folder)
                shard._sender.start()
            except RuntimeError as error:
                raise StorageFailed(f"the process can have no more threads: {error}") from error
            failing.pop_all()
        return shard

    def served(self) -> ServicePorts:
        """Returns the ports for the server that clients use."""
        engine, store = self.engine, self._opened.store
        snapshots = None
        if isinstance(store, LedgerSegments):  # and not in a folder that the nodes share
            snapshots = LedgerSnapshots(engine, store, clock=engine.context.clock)
        return replace(
            ServicePorts.of(engine), snapshots=snapshots, check_owner=self.permit.require, refusal=REFUSAL
        )  # fmt: skip

    def check(self) -> None:
        """See RunningShard.check."""
        self.engine.check_usable()

    def limit_memory(self, *, hosted: int) -> None:
        """See RunningShard.limit_memory: the engine's options bound it, and a broker is one shard."""

    def close(self) -> None:
        """See RunningShard.close."""
        self._ended.set()
        self._sender.join()
        try:
            self.engine.close()
        finally:
            self._opened.close()
            self._folder.cleanup()

    def _send(self) -> None:
        actions, is_logged = self.engine.context.actions, False
        while not self._ended.wait(SENDING_MS / 1000):
            try:
                actions.commit()
                is_logged = False
            except Exception as error:  # noqa: BLE001 - check() finds what is final; else it is tried again
                if not is_logged:
                    logger.warning("deliveries_not_sent", extra={"error": str(error)})
                is_logged = True


def _remove_left_behind() -> None:
    """Remove temporary folders of processes that were killed: none holds their lock. One that was made just now may not
    be locked yet.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, ConfigurationError):  # it is in use; or another user's
            if time.time() - path.stat().st_mtime > LEFT_BEHIND_S:
                lock = FolderLock(path)
                lock.acquire()
                try:
                    shutil.rmtree(path)
                finally:
                    lock.release()
