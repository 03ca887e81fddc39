"""Opens the segment store of a shard, for the node that became its owner."""

from __future__ import annotations

from outbox_broker.cluster.shard_host import OpenedShard, OpenShard
from outbox_broker.delay_service.cluster_settings import ClusterSettings
from outbox_broker.schedule.stores.local_segments import LocalSegmentStore
from outbox_core.common.errors import ConfigurationError, StorageFailed


def shard_opener(settings: ClusterSettings) -> OpenShard:
    """Returns what opens shards where the settings say. Raises ConfigurationError if this build cannot."""
    if settings.shared_folder is None:
        raise ConfigurationError(
            "this version has no segments on BookKeeper yet: name a folder that all nodes share as shared_folder in "
            "the table [cluster], or in OUTBOX_CLUSTER__SHARED_FOLDER"
        )
    folder = settings.shared_folder

    def open_shard(shard: str) -> OpenedShard:
        try:
            store = LocalSegmentStore.open(folder / shard)
        except ConfigurationError as error:  # its former owner has it open still
            raise StorageFailed(str(error)) from error
        return OpenedShard(store=store, epoch=store.epoch, close=store.close)

    return open_shard
