"""Handlers of recurring messages: add, list, show, pause, resume, delete. They run in worker threads.

To a token that is limited to some topics those of other topics are not there.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress

from msgspec.structs import replace

from outbox_broker.engine.recurring_publisher import RecurringView
from outbox_broker.http.access_control import Role
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import check_recurring
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    NoAnswer,
    NoRequest,
    PageQuery,
    RecurringAnswer,
    RecurringListAnswer,
    RecurringQuery,
    RecurringSettings,
)
from outbox_core.protocol.wire_conversion import recurring_message_of, recurring_settings_of


def add_recurring(call: Call) -> NoAnswer:
    """Add a recurring message."""
    name = _name(call)
    settings = call.read(RecurringSettings)
    message = recurring_message_of(settings)
    message.check(name)
    call.require(Role.ADMIN, message.topic)
    call.broker.recurring.add(name, message, paused=settings.paused, quota=call.principal.quota)
    return NoAnswer()


def list_recurring(call: Call) -> RecurringListAnswer:
    """List those whose topics the token covers."""
    query = call.read_query(PageQuery)
    names = call.broker.recurring.names()
    start = 0 if query.after is None else bisect_right(names, query.after)
    page: list[RecurringAnswer] = []
    for name in names[start:]:
        with suppress(KeyError):  # it was deleted meanwhile
            view = call.broker.recurring.view(name)
            if not call.principal.covers(view.message.topic):
                continue
            if len(page) == query.limit:
                return RecurringListAnswer(recurring=page, next=page[-1].name)
            page.append(_answer(view, has_contents=False))
    return RecurringListAnswer(recurring=page)


def show_recurring(call: Call) -> RecurringAnswer:
    """Returns one, with its next occurrences."""
    query = call.read_query(RecurringQuery)
    view = _covered(call, runs=query.runs)
    topic = view.message.topic
    has_contents = call.principal.allows(Role.CONSUME, topic) or call.principal.allows(Role.ADMIN, topic)
    return _answer(view, has_contents=has_contents)


def pause_recurring(call: Call) -> NoAnswer:
    """Pause one."""
    return _pause(call, paused=True)


def resume_recurring(call: Call) -> NoAnswer:
    """Resume one."""
    return _pause(call, paused=False)


def delete_recurring(call: Call) -> NoAnswer:
    """Delete one."""
    name = _covered(call).name
    try:
        call.broker.recurring.delete(name)
    except KeyError as error:
        raise _not_found(name) from error
    return NoAnswer()


def _pause(call: Call, *, paused: bool) -> NoAnswer:
    if call.body:
        call.read(NoRequest)
    name = _covered(call).name
    try:
        call.broker.recurring.pause(name, paused=paused)
    except KeyError as error:
        raise _not_found(name) from error
    return NoAnswer()


def _covered(call: Call, *, runs: int = 1) -> RecurringView:
    """Returns the one that the path names. Raises Problem if there is none whose topic the token covers."""
    name = _name(call)
    try:
        view = call.broker.recurring.view(name, runs=runs)
    except KeyError as error:
        raise _not_found(name) from error
    if not call.principal.covers(view.message.topic):
        raise _not_found(name)
    return view


def _name(call: Call) -> str:
    try:
        return check_recurring(call.item)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where="path.name") from error


def _not_found(name: str) -> Problem:
    return Problem(ProblemKind.NOT_FOUND, f"there is no recurring message {name}")


def _answer(view: RecurringView, *, has_contents: bool) -> RecurringAnswer:
    answer = RecurringAnswer(
        name=view.name, topic=view.message.topic, cron=view.message.cron, tz=view.message.tz,
        catch_up=view.message.catch_up, paused=view.paused, generation=view.generation, added_at_ms=view.added_at_ms,
        fired_to_ms=view.fired_to_ms, next_ms=view.next_ms, failure=view.failure,
    )  # fmt: skip
    if not has_contents:
        return answer
    settings = recurring_settings_of(view.message)
    return replace(
        answer, key=settings.key, headers=dict(view.message.headers), body=settings.body, encoding=settings.encoding
    )
