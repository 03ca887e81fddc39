"""Where the shards of a cluster are, for the nodes that own them: on BookKeeper, or in a shared folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_broker.cluster.bookie_list import read_bookies
from outbox_broker.cluster.bookie_room import BookieRoom, RoomOptions
from outbox_broker.cluster.cluster_admin import read_config
from outbox_broker.cluster.cluster_settings import ClusterSettings
from outbox_broker.cluster.shard_host import OpenedShard, OpenShard
from outbox_broker.cluster.znode_records import ClusterConfig, ZnodeLayout
from outbox_broker.cluster.zone_file import ZoneFile
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession

if TYPE_CHECKING:
    from outbox_broker.cluster.bookkeeper.ledger_shards import LedgerShards

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardStorage:
    """`open_shard`: opens a shard for its owner. `room`: whether there is any for new messages, None if nobody asks."""

    open_shard: OpenShard
    room: BookieRoom | None = None


@contextmanager
def shard_storage(settings: ClusterSettings) -> Iterator[ShardStorage]:
    """Yields the storage that the settings name, and ends its clients. Raises ConfigurationError."""
    if settings.shared_folder is not None:
        yield ShardStorage(_in_folder(settings.shared_folder))
        return
    with ledger_shards(settings) as shards:
        room = BookieRoom(shards.bookie_spaces, options=_room_options(settings))
        room.start()
        try:
            yield ShardStorage(shards.open, room)
        finally:
            room.stop()


@contextmanager
def ledger_shards(settings: ClusterSettings) -> Iterator[LedgerShards]:
    """Yields the cluster's shards on BookKeeper, and ends their clients. Raises ConfigurationError."""
    with _ledger_shards(settings, read_cluster(settings)) as shards:
        yield shards


def read_cluster(settings: ClusterSettings) -> ClusterConfig:
    """Returns what all nodes of the cluster agree on. Raises ConfigurationError, CoordinatorUnavailable."""
    with closing(ZooKeeperSession(settings.address, options=settings.session)) as session:
        return read_config(session, ZnodeLayout(settings.address.root))


@contextmanager
def _ledger_shards(settings: ClusterSettings, config: ClusterConfig) -> Iterator[LedgerShards]:
    if settings.shared_folder is not None:
        raise ConfigurationError(f"this cluster has no ledgers: its segments are in {settings.shared_folder}")
    from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions
    from outbox_broker.cluster.bookkeeper.java_runtime import find_jars
    from outbox_broker.cluster.bookkeeper.ledger_shards import LedgerShards
    from outbox_broker.cluster.bookkeeper.zone_placement import ZoneOptions

    _check_bookies(settings)
    zones = None
    if settings.zone_file is not None:
        zones = ZoneOptions(file=ZoneFile(settings.zone_file), last_zone=settings.last_zone)
    options = BookKeeperOptions(
        ensemble=settings.ensemble, write_quorum=settings.write_quorum, ack_quorum=settings.ack_quorum,
        password=settings.ledgers_password, tls=settings.bookie_tls, zones=zones,
    )  # fmt: skip
    shards = LedgerShards(
        config.cluster, settings.address, session=settings.session, metadata_uri=settings.metadata_uri,
        jars=find_jars(os.environ), options=options,
    )  # fmt: skip
    with closing(shards):
        yield shards


def _room_options(settings: ClusterSettings) -> RoomOptions:
    return RoomOptions(
        ensemble=settings.ensemble, zones_min=1 if settings.zone_file is None else settings.last_zone.zones_min,
        usage_max=settings.bookie_usage_max, every_ms=settings.bookie_check_ms,
    )  # fmt: skip


def _check_bookies(settings: ClusterSettings) -> None:
    """Log each bookie to which TLS fails, and raise ConfigurationError if that is true of all of them."""
    if settings.bookie_tls is None:
        return
    bookies = read_bookies(
        settings.metadata_uri, options=settings.session, ensemble=settings.ensemble, tls=settings.bookie_tls
    )
    for bookie, problem in bookies.tls_problems.items():
        logger.warning("bookie_tls_failed", extra={"bookie": bookie, "problem": problem})
    if bookies.writable and not bookies.usable:
        bookie, problem = next(iter(bookies.tls_problems.items()))
        raise ConfigurationError(f"no bookie can be reached by TLS; {bookie} {problem}")


def _in_folder(folder: Path) -> OpenShard:
    def open_shard(shard: str) -> OpenedShard:
        try:
            store = LocalSegments.open(folder / shard)
        except ConfigurationError as error:  # its former owner has it open still
            raise StorageFailed(str(error)) from error
        annotations = FolderAnnotations(folder / shard, storage=DiskStorage())
        return OpenedShard(store=store, epoch=store.epoch, annotations=annotations, close=store.close)

    return open_shard
