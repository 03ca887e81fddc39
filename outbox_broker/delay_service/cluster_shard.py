"""One shard of a delay cluster on its owner: a schedule and the proxy in front of it, which act while they may."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_broker.cluster.memory_budget import MemoryBudget, ShardMemory
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.delay_service.target_publisher import PublishTarget
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_core.common.clock import Clock
from outbox_core.messages.message import Message, PublishResult


class PermittedTarget:
    """The target of one shard's messages. A batch is sent only while this node may act for the shard.

    The permit is read right before each send, after the batch was recorded as handed over: a deposed owner sends at
    most what it was sending.
    """

    def __init__(self, target: PublishTarget, permit: ShardPermit) -> None:
        self._target = target
        self._permit = permit

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Publish to the target. Raises NotOwner, with nothing sent."""
        self._permit.require()
        return self._target.publish(batch)


class ClusterShard:
    """A RunningShard."""

    def __init__(self, opened: OpenedShard, *, schedule: DelayStore, proxy: DelayProxy, permit: ShardPermit) -> None:
        self._opened = opened
        self._schedule = schedule
        self.service = proxy
        self.permit = permit

    @classmethod
    def start(
        cls,
        opened: OpenedShard,
        permit: ShardPermit,
        *,
        target: PublishTarget,
        clock: Clock,
        syncs: TimedStorage,
        budget: MemoryBudget,
        shards: int,
    ) -> ClusterShard:
        """Recover the shard's schedule, and deliver. `clock`: the cluster's. `shards`: how many the cluster has."""
        memory = budget.share(shards)
        options = DelayOptions(
            memory_bytes_max=memory.bytes_max, memory_messages_max=memory.messages_max,
            dedup_messages=budget.dedup_messages_of(shards), cancels_remembered_max=budget.cancels_of(shards),
        )  # fmt: skip
        schedule = DelayStore.open(opened.store, options=options)
        proxy = DelayProxy(schedule, PermittedTarget(target, permit), clock=clock, syncs=syncs)
        proxy.start()
        return cls(opened, schedule=schedule, proxy=proxy, permit=permit)

    def check(self) -> None:
        """See RunningShard.check."""
        self._schedule.check_ready()

    def limit_memory(self, memory: ShardMemory) -> None:
        """See RunningShard.limit_memory."""
        self._schedule.limit_memory(bytes_max=memory.bytes_max, messages_max=memory.messages_max)

    def close(self) -> None:
        """See RunningShard.close."""
        try:
            self.service.close()
        finally:
            self._opened.close()
