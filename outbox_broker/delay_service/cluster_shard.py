"""One shard of a delay cluster on its owner: a schedule and the proxy in front of it, which act while they may."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_broker.cluster.memory_budget import FILL_MAX, MemoryBudget
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.delay_service.delay_proxy import CLAIM_AHEAD_MS, DelayProxy, PublishRoom
from outbox_broker.delay_service.node_totals import NodeTotals
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_core.common.clock import Clock
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.publish_guard import PublishTarget, publish_guarded


class PermittedTarget:
    """The target of one shard's messages. They are sent only while this node may act for the shard.

    The permit is read right before each request, after the batch was recorded as handed over, and after a client that
    sends the messages of several shards together has waited: a deposed owner sends at most what it was sending.
    """

    def __init__(self, target: PublishTarget, permit: ShardPermit) -> None:
        self._target = target
        self._permit = permit

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Publish to the target. Raises NotOwner, with nothing sent."""
        return publish_guarded(self._target, batch, guard=self._permit.require)


class ClusterShard:
    """A RunningShard."""

    def __init__(
        self,
        opened: OpenedShard,
        *,
        schedule: DelayStore,
        proxy: DelayProxy,
        permit: ShardPermit,
        budget: MemoryBudget,
        totals: NodeTotals,
        shards: int,
    ) -> None:
        """`budget`, `totals`: the node's. `shards`: how many the cluster has."""
        self._opened = opened
        self._schedule = schedule
        self._budget = budget
        self._totals = totals
        self._shards = shards
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
        totals: NodeTotals,
        shards: int,
        room: PublishRoom | None = None,
    ) -> ClusterShard:
        """Recover the shard's schedule, and deliver. `clock`: the cluster's. `shards`: how many the cluster has."""
        memory = budget.share(hosted=shards, shards=shards)
        options = DelayOptions(
            memory_bytes_max=memory.bytes_max, memory_messages_max=memory.messages_max, fill_max=FILL_MAX,
            log_bytes_max=memory.log_bytes_max,
            dedup_messages=budget.dedup_messages_of(shards), cancels_remembered_max=budget.cancels_of(shards),
        )  # fmt: skip
        schedule = DelayStore.open(opened.store, options=options)
        proxy = DelayProxy(
            schedule, PermittedTarget(target, permit), clock=clock, syncs=syncs, room=room,
            claim_ahead_ms=CLAIM_AHEAD_MS,
        )  # fmt: skip
        proxy.start()
        totals.add(proxy)
        return cls(opened, schedule=schedule, proxy=proxy, permit=permit, budget=budget, totals=totals, shards=shards)

    def check(self) -> None:
        """See RunningShard.check."""
        self._schedule.check_ready()

    def limit_memory(self, *, hosted: int) -> None:
        """See RunningShard.limit_memory."""
        memory = self._budget.share(hosted=hosted, shards=self._shards)
        self._schedule.limit_memory(
            bytes_max=memory.bytes_max, messages_max=memory.messages_max, log_bytes_max=memory.log_bytes_max
        )

    def close(self) -> None:
        """See RunningShard.close."""
        try:
            self.service.close()
        finally:
            self._totals.retire(self.service)
            self._opened.close()
