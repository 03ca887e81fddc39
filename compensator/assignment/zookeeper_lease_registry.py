"""The registry of compensators in ZooKeeper: an instance, and each lease that it holds, is a znode of its session.

<root>/instances/<id>    InstanceRecord, ephemeral; the id is that of the instance's session
<root>/leases/<name>     LeaseRecord, ephemeral; the name of the resource, percent-encoded; its session is the holder

A lease that does not exist is free. One that is offered is replaced in one transaction by the instance that takes it.

No fence and no leader, unlike a delay cluster's shards: each row is claimed by compare-and-set, so two instances may
serve one source for a beat. A leader's assignment would be a second record that has to agree with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import quote, unquote

import msgspec

from compensator.assignment.instance_registry_port import LeaseOptions
from outbox_core.assignment.even_assignment import Member, check_zone
from outbox_core.assignment.lease_decision import Lease, View
from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError, OutboxError
from outbox_core.protocol.decoder_cache import json_decoder
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.zookeeper_errors import SessionEnded
from outbox_core.zookeeper.zookeeper_session import Znode, ZooKeeperSession

logger: EventLogger = EventLogger(__name__)
Record = TypeVar("Record", bound=msgspec.Struct)
_INSTANCES: Final = "instances"
_LEASES: Final = "leases"


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live compensator."""

    zone: str | None = None


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: whether others may take it. Its holder is the session whose ephemeral znode it is."""

    is_offered: bool = False


_HELD: Final = msgspec.json.encode(LeaseRecord())
_OFFERED: Final = msgspec.json.encode(LeaseRecord(is_offered=True))


class ZooKeeperLeaseRegistry:
    """An InstanceRegistry. An instance whose session ended is another one from its next beat on. Not thread-safe.

    Errors: those of ZooKeeperSession.
    """

    def __init__(
        self,
        root: str,
        *,
        connect: Callable[[], ZooKeeperSession],
        zone: str | None = None,
        options: LeaseOptions | None = None,
    ) -> None:
        """`root`: the path of all records; `connect` begins a session."""
        check_zone(zone)
        self._root = root
        self._connect = connect
        self._zone = zone
        self._options = options or LeaseOptions()
        self._session: ZooKeeperSession | None = None
        self._joined = False

    @property
    def instance(self) -> str:
        """The id of this process's instance, that of its session; empty without one."""
        return self._session.id if self._session is not None else ""

    @property
    def options(self) -> LeaseOptions:
        """The interval of beats. How long leases last is the session's matter."""
        return self._options

    @property
    def joined(self) -> bool:
        """Whether this instance was ever registered."""
        return self._joined

    def renew(self) -> View:
        """See Registry.renew. What has not changed is not read again: no request, if nothing changed."""
        session = self._registered()
        instances = self._znodes(session, _INSTANCES)
        leases = self._znodes(session, _LEASES)
        view = View(
            me=session.id,
            members={name: Member(_decode(znode, name, InstanceRecord).zone) for name, znode in instances}
            | {session.id: Member(self._zone)},
            leases={unquote(name): _lease(znode, name) for name, znode in leases},
        )
        self._joined = True
        return view

    def add(self, names: Sequence[str]) -> None:
        """Does nothing: a resource without a lease is free."""

    def take(self, names: Sequence[str]) -> set[str]:
        """See Registry.take."""
        session = self._current()
        paths = {name: self._lease_path(name) for name in names}
        created = session.create_ephemerals(list(paths.values()), _HELD)
        return {name for name, path in paths.items() if path in created or self._takes_over(session, path)}

    def offer(self, names: Sequence[str]) -> None:
        """See SharedRegistry.offer."""
        self._mark(names, _OFFERED)

    def keep(self, names: Sequence[str]) -> None:
        """See SharedRegistry.keep."""
        self._mark(names, _HELD)

    def release(self, names: Sequence[str]) -> None:
        """See Registry.release."""
        session = self._current()
        for name, znode in self._own(session, names):
            # By its version: an offered lease may be another instance's by now, whose znode begins with version 0.
            session.delete(self._lease_path(name), version=znode.version)

    def purge(self) -> None:
        """Does nothing: ZooKeeper deletes the records of instances that ended."""

    def leave(self, names: Sequence[str]) -> None:  # noqa: ARG002 - the session has them all
        """See Registry.leave: ZooKeeper deletes all records of the session."""
        self.close()

    def close(self) -> None:
        """End the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def reset_after_fork(self) -> None:
        """Become a new instance in a forked child; the session remains the parent's."""
        self._session = None
        self._joined = False

    # -- one session -------------------------------------------------------------------------------------------------

    def _registered(self) -> ZooKeeperSession:
        if self._session is not None and self._session.is_ended:
            self.close()
        if self._session is None:
            self._session = self._connect()
            logger.info("assignment_joined", extra={"instance": self.instance, "zone": self._zone})
        path = f"{self._root}/{_INSTANCES}/{self._session.id}"
        if self._session.read(path) is None:
            self._register(self._session, path)
        return self._session

    def _register(self, session: ZooKeeperSession, path: str) -> None:
        try:
            for folder in (_INSTANCES, _LEASES):
                session.create(f"{self._root}/{folder}", b"")
            session.create(path, msgspec.json.encode(InstanceRecord(zone=self._zone)), ephemeral=True)
        except OutboxError:
            self.close()
            raise

    def _current(self) -> ZooKeeperSession:
        if self._session is None:
            raise SessionEnded("there is no session with ZooKeeper")
        return self._session

    def _takes_over(self, session: ZooKeeperSession, path: str) -> bool:
        """Take a lease that exists, if it is offered; returns whether this instance holds it then."""
        znode = session.read(path)
        if znode is None:
            return False  # its holder released it just now: the next beat finds it free
        if znode.session == session.id:
            return True  # an earlier create succeeded unanswered
        return _lease(znode, path).ended and session.replace(path, _HELD, version=znode.version)

    def _mark(self, names: Sequence[str], record: bytes) -> None:
        session = self._current()
        for name, znode in self._own(session, names):
            if znode.data != record:
                session.write(self._lease_path(name), record, version=znode.version)

    def _own(self, session: ZooKeeperSession, names: Sequence[str]) -> list[tuple[str, Znode]]:
        """Returns those leases among `names` that this instance holds."""
        znodes = zip(names, session.read_all([self._lease_path(name) for name in names]), strict=True)
        return [(name, znode) for name, znode in znodes if znode is not None and znode.session == session.id]

    def _lease_path(self, name: str) -> str:
        encoded = quote(name, safe="").replace(".", "%2E")  # ZooKeeper has no names . and ..
        return f"{self._root}/{_LEASES}/{encoded}"

    def _znodes(self, session: ZooKeeperSession, folder: str) -> list[tuple[str, Znode]]:
        """Returns the znodes of a folder by name; those that were deleted meanwhile are missing."""
        names = session.children(f"{self._root}/{folder}")
        znodes = session.read_all([f"{self._root}/{folder}/{name}" for name in names])
        return [(name, znode) for name, znode in zip(names, znodes, strict=True) if znode is not None]


def _lease(znode: Znode, name: str) -> Lease:
    return Lease(holder=znode.session, ended=_decode(znode, name, LeaseRecord).is_offered)


def _decode(znode: Znode, name: str, kind: type[Record]) -> Record:
    try:
        record = json_decoder(kind).decode(znode.data)
    except DECODE_ERRORS:
        record = None
    if record is None or not znode.session:
        raise ConfigurationError(
            f"the znode {name} is not an ephemeral {kind.__name__}: another program uses this path; name another path "
            "in lease_url"
        )
    return record
