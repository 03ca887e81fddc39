"""The registry of a node in ZooKeeper: its session, its contact, and its writes to owners and assignment.

A node is its session. When that ends, renew() begins another one under another id, with another lease, so that nothing
of the earlier session can count for the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from outbox_broker.cluster.cluster_clock import ClusterClock, Contact
from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit, boot_ms
from outbox_broker.cluster.shard_decision import ClusterView
from outbox_broker.cluster.znode_records import (
    AssignmentRecord,
    ClusterConfig,
    ClusterKind,
    LeaderRecord,
    NodeRecord,
    OwnerRecord,
    ZnodeLayout,
    decode,
    decode_config,
    encode,
    require_kind,
)
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import ConfigurationError, OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.zookeeper_errors import SessionEnded
from outbox_core.zookeeper.zookeeper_session import Znode, ZooKeeperSession

logger: EventLogger = EventLogger(__name__)
Record = TypeVar("Record", bound=msgspec.Struct)


class ZooKeeperRegistry:
    """One node's access to the records of its cluster; the node's clock is corrected with each contact.

    Its methods have the meaning of those of the port in outbox_core.assignment.registry. For one thread at a time.
    Errors: those of ZooKeeperSession.
    """

    def __init__(
        self,
        layout: ZnodeLayout,
        *,
        connect: Callable[[], ZooKeeperSession],
        record: NodeRecord,
        kind: ClusterKind = ClusterKind.DELAY,
        clock: Clock | None = None,
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        """`connect` begins a session. `kind`: of the cluster that this node is for. `clock`: the machine's wall clock;
        `clock_ms`: see boot_ms.
        """
        self._layout = layout
        self._connect = connect
        self._record = record
        self._kind = kind
        self._wall = clock or SystemClock()
        self._clock_ms = clock_ms
        self._session: ZooKeeperSession | None = None
        self._cluster: str | None = None
        self._unable: str | None = None
        self.clock = ClusterClock(self._wall, clock_ms=clock_ms)
        self.lease = OwnershipLease(session_timeout_ms=0, clock_ms=clock_ms)

    @property
    def me(self) -> str:
        """This node's id, that of its session; empty without one."""
        return self._session.id if self._session is not None else ""

    def describe(self, record: NodeRecord) -> None:
        """Change what other nodes know of this one, with the next renew()."""
        self._record = record

    def renew(self) -> ClusterView:
        """Confirm contact by a write, beginning a session at first, and read the cluster; see Registry.renew."""
        try:
            session = self._joined()
            self._contact(session)
            self._update_record(session)
            return read_view(session, self._layout)
        except SessionEnded:
            self._drop("its session with ZooKeeper ended")
            raise

    def config(self) -> ClusterConfig:
        """Returns the cluster's configuration. Raises ConfigurationError if there is none, or it became another's."""
        session = self._joined()
        znode = session.read(self._layout.config)
        if znode is None:
            raise ConfigurationError(
                f"there is no cluster at {self._layout.root}: make it with `outbox delay init`, or correct the path"
            )
        config = decode_config(znode.data, path=self._layout.config)
        require_kind(config, self._kind, root=self._layout.root)
        if self._cluster not in {None, config.cluster}:
            raise ConfigurationError(f"the cluster at {self._layout.root} is another one than before: restart the node")
        self._cluster = config.cluster
        return config

    def is_asked_to_drain(self) -> bool:
        """Returns whether an operator asked this node to hand its shards over."""
        return self._record.name in self._current().children(self._layout.drains)

    def take(self, names: Sequence[str]) -> Mapping[str, ShardPermit]:
        """Become the owner of shards that have none; returns the permits of those that this node owns then.

        See Registry.take: of two nodes that take a shard at once, one gets it.
        """
        session, permits = self._current(), {}
        record = encode(OwnerRecord(node=session.id, state="opening"))
        for shard in names:
            znode = session.create(self._layout.owner(shard), record, ephemeral=True)
            if znode is None:  # another node was first, or an earlier create of this session succeeded unanswered
                znode = session.read(self._layout.owner(shard))
            if znode is not None and znode.session == session.id:
                permits[shard] = ShardPermit(shard, self.lease, epoch=znode.epoch)
        return permits

    def mark(self, shard: str, *, state: str, reason: str | None = None) -> None:
        """Record what this node does with a shard that it owns."""
        session = self._current()
        record = encode(OwnerRecord(node=session.id, state=state, reason=reason))
        znode = session.read(self._layout.owner(shard))
        if znode is not None and znode.session == session.id and znode.data != record:
            session.write(self._layout.owner(shard), record)

    def release(self, names: Sequence[str]) -> None:
        """Stop owning shards; those of other nodes stay theirs. Idempotent."""
        session = self._current()
        for shard in names:
            path = self._layout.owner(shard)
            znode = session.read(path)
            if znode is not None and znode.session == session.id:
                session.delete(path)  # requests of one session are executed in order: it is still this session's

    def lead(self, view: ClusterView) -> bool:
        """Become the leader if there is none; returns whether this node is the leader."""
        session = self._current()
        if view.leader is not None and view.leader in view.nodes:
            return view.leader == session.id
        return session.create(self._layout.leader, encode(LeaderRecord(node=session.id)), ephemeral=True) is not None

    def assign(self, shards: Mapping[str, str]) -> bool:
        """Record the assignment; False if it was changed since this node read it."""
        session = self._current()
        current = session.read(self._layout.assignment)
        record = encode(AssignmentRecord(leader=session.id, shards=dict(sorted(shards.items()))))
        if current is None:
            return session.create(self._layout.assignment, record) is not None
        return session.write(self._layout.assignment, record, version=current.version) is not None

    def leave(self, names: Sequence[str]) -> None:
        """Release shards and end the session, at stop. Idempotent; without contact, the session expires."""
        if self._session is None:
            return
        try:
            self.release(names)
        except OutboxError as error:
            logger.warning("cluster_leave_failed", extra={"node": self.me, "error": str(error)})
        self._drop("this node left the cluster")

    # -- one session -------------------------------------------------------------------------------------------------

    def _joined(self) -> ZooKeeperSession:
        if self._session is not None and self._session.is_ended:
            self._drop("its session with ZooKeeper ended")
        if self._session is None:
            session = self._connect()
            self._session = session
            self.lease = OwnershipLease(session_timeout_ms=session.timeout_ms, clock_ms=self._clock_ms)
            try:
                self._register(session)
            except BaseException:
                self._drop("this node could not register")
                raise
            logger.info(
                "cluster_joined",
                extra={"node": session.id, "node_name": self._record.name, "session_timeout_ms": session.timeout_ms},
            )
        return self._session

    def _register(self, session: ZooKeeperSession) -> None:
        """Prepare the first contact. The node's record follows it, since the contact shows whether the node is able to
        take shards: the leader would give it some meanwhile.
        """
        self.config()  # a cluster that this program does not know is left alone
        session.create(self._layout.contact(session.id), b"", ephemeral=True)

    def _current(self) -> ZooKeeperSession:
        if self._session is None:
            raise SessionEnded("there is no session with ZooKeeper")
        return self._session

    def _drop(self, reason: str) -> None:
        self.lease.end(reason)
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _contact(self, session: ZooKeeperSession) -> None:
        """Write to a znode of the session, which proves it alive, and extend the lease from when that was sent."""
        # In this order: time that passes between the two readings makes the cluster's clock late, never early.
        sent_wall_ms = self._wall.now_ms()
        sent_boot_ms = self._clock_ms()
        znode = session.write(self._layout.contact(session.id), b"")
        if znode is None or znode.session != session.id:
            raise SessionEnded("the session with ZooKeeper ended")
        self.lease.shorten(session.timeout_ms)
        self.lease.extend(sent_boot_ms)
        contact = Contact(
            sent_boot_ms=sent_boot_ms, sent_wall_ms=sent_wall_ms, answered_wall_ms=self._wall.now_ms(),
            dated_ms=znode.dated_ms,
        )  # fmt: skip
        self._unable = self.clock.correct(contact)

    def _update_record(self, session: ZooKeeperSession) -> None:
        record = self._record
        if self._unable is not None:
            record = msgspec.structs.replace(record, unable=self._unable)
        path, data = self._layout.node(session.id), encode(record)
        znode = session.read(path)
        if znode is None:
            session.create(path, data, ephemeral=True)
        elif znode.data != data:
            session.write(path, data)


def read_view(session: ZooKeeperSession, layout: ZnodeLayout) -> ClusterView:
    """Returns the cluster as a session sees it."""
    leader = session.read(layout.leader)
    assignment = session.read(layout.assignment)
    return ClusterView(
        me=session.id,
        nodes=_records(session, layout.nodes, NodeRecord),
        leader=None if leader is None else decode(leader.data, LeaderRecord, path=layout.leader).node,
        assigned={} if assignment is None else decode(assignment.data, AssignmentRecord, path=layout.assignment).shards,
        owners=_records(session, layout.owners, OwnerRecord),
    )


def _records(session: ZooKeeperSession, folder: str, kind: type[Record]) -> dict[str, Record]:
    """Returns the records of a folder's children by name; those that were deleted meanwhile are missing."""
    names = session.children(folder)
    paths = [f"{folder}/{name}" for name in names]
    znodes: list[Znode | None] = session.read_all(paths)
    return {
        name: decode(znode.data, kind, path=path)
        for name, path, znode in zip(names, paths, znodes, strict=True)
        if znode is not None
    }
