"""Handlers of a server as a whole: cordon and status. Run in worker threads."""

from __future__ import annotations

from bisect import bisect_right

from outbox_broker.http.access_control import Role
from outbox_broker.http.request_context import Call
from outbox_broker.http.service_ports import ForOperators
from outbox_core.common.errors import NotSupported
from outbox_core.protocol.wire import CordonRequest, NoAnswer, NoRequest, PageQuery, StatusAnswer


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
        next=page[-1].topic if start + len(page) < len(left) else None,
    )  # fmt: skip


def _operations(call: Call) -> ForOperators:
    if call.served.operations is None:
        raise NotSupported(
            "a node of a delay cluster is not cordoned: `outbox delay drain` has it hand what it owns to other nodes"
        )
    return call.served.operations
