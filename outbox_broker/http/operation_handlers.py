"""Handlers of a server as a whole: cordon, status, snapshot. Run in worker threads."""

from __future__ import annotations

from bisect import bisect_right

from outbox_broker.http.access_control import Role
from outbox_broker.http.ledger_snapshots import LedgerSnapshots
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_broker.http.service_ports import ForOperators
from outbox_core.common.errors import NotSupported
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    CordonRequest,
    NoAnswer,
    NoRequest,
    PageQuery,
    SnapshotAnswer,
    SnapshotRequest,
    StatusAnswer,
)


def cordon(call: Call) -> NoAnswer:
    """Take no new messages from now on."""
    call.require(Role.ADMIN, None)
    reason = call.read(CordonRequest).reason if call.body else ""
    _operations(call).cordon.begin(reason=reason)
    return NoAnswer()


def uncordon(call: Call) -> NoAnswer:
    """Take messages again."""
    call.require(Role.ADMIN, None)
    if call.body:
        call.read(NoRequest)
    _operations(call).cordon.end()
    return NoAnswer()


def status(call: Call) -> StatusAnswer:
    """Returns whether new messages are taken, what is left of all topics, and a page of what is left by topic."""
    call.require(Role.READ, None)
    query = call.read_query(PageQuery)
    operations = _operations(call)
    is_dispatching = operations.is_dispatching()  # asked first: what has arrived meanwhile is counted in its topic
    left = list(operations.remainder())
    groups = [group for topic in left for group in topic.groups]
    ready, in_flight = sum(group.ready for group in groups), sum(group.in_flight for group in groups)
    scheduled = sum(topic.scheduled for topic in left)
    start = 0 if query.after is None else bisect_right(left, query.after, key=lambda topic: topic.topic)
    page = left[start : start + query.limit]
    return StatusAnswer(
        cordon=operations.cordon.note, drained=not (ready or in_flight or scheduled or is_dispatching), ready=ready,
        in_flight=in_flight, scheduled=scheduled, dead=sum(group.dead for group in groups), topics=page,
        oldest_unacked_age_ms=max(
            (group.oldest_unacked_age_ms for group in groups if group.ready or group.in_flight), default=None
        ),
        next=page[-1].topic if start + len(page) < len(left) else None,
    )  # fmt: skip


def snapshot(call: Call) -> SnapshotAnswer:
    """Have what the data folder holds now stand still for the backup that asks, which reads it beside the server. Of
    what bookies keep, say where it ends now.
    """
    call.require(Role.ADMIN, None)
    token, snapshots = call.read(SnapshotRequest).token, call.served.snapshots
    if snapshots is None:
        raise NotSupported("what this server keeps is not in a folder: its segments are kept by bookies")
    if isinstance(snapshots, LedgerSnapshots):
        return snapshots.take()
    taken = snapshots.take(token)
    if taken is None:
        raise Problem(
            ProblemKind.NOT_FOUND, "no backup waits for a snapshot: `outbox broker backup` does, beside the broker"
        )
    return SnapshotAnswer(
        at_ms=taken.at_ms, files=len(taken.files), size_bytes=sum(file.size_bytes for file in taken.files)
    )  # fmt: skip


def _operations(call: Call) -> ForOperators:
    if call.served.operations is None:
        raise NotSupported(
            "a node of a delay cluster is not cordoned: `outbox delay drain` has it hand what it owns to other nodes"
        )
    return call.served.operations
