"""Handlers of topics and groups: settings, statistics, deletion, seek, pause, dead letters. Run in worker threads."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.http import content_negotiation
from outbox_broker.http.access_control import Role
from outbox_broker.http.delivery_handlers import ANSWER_COPIES
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_core.common.errors import InUse
from outbox_core.messages.message import DeadCount, DeadLetter, EditPage, Record
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    DeadCountRequest,
    DeleteQuery,
    DiscardAnswer,
    DiscardRequest,
    EditRequest,
    GroupAnswer,
    GroupSettings,
    GroupStall,
    NoAnswer,
    NoRequest,
    PageQuery,
    PurgeAnswer,
    PurgeRequest,
    RedriveAnswer,
    RedriveRequest,
    SeekRequest,
    StopRedriveAnswer,
    TopicAnswer,
    TopicsAnswer,
)
from outbox_core.protocol.wire_conversion import dead_edit_of, group_config_of, group_settings_of, json_dead_letter

_REASON_CHAR_BYTES: Final = 4
_CURSOR: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


def topics(call: Call) -> TopicsAnswer:
    """List the names of the topics that the sender's token covers."""
    query = call.read_query(PageQuery)
    names = call.catalog.topics()
    start = bisect_right(names, query.after) if query.after is not None else 0
    covered = [name for name in names[start:] if call.principal.covers(name)]
    page = covered[: query.limit]
    return TopicsAnswer(topics=page, next=page[-1] if len(covered) > len(page) else None)


def topic(call: Call) -> TopicAnswer:
    """Returns a topic's statistics."""
    with _not_found():
        figures, groups = call.catalog.topic_figures(call.topic), call.catalog.groups(call.topic)
    return TopicAnswer(topic=call.topic, figures=dict(figures), groups=groups)


def group(call: Call) -> GroupAnswer:
    """Returns a group's statistics and settings, and why nothing is delivered to it, if that is so."""
    with _not_found():
        figures = call.broker.admin.group_figures(call.topic, call.group)
        config = call.broker.admin.group_config(call.topic, call.group)
        stall = call.broker.stalls.stall_of(call.topic, call.group)
        paused, resume_offset = call.broker.admin.group_progress(call.topic, call.group)
    return GroupAnswer(
        topic=call.topic, group=call.group, figures=dict(figures), settings=group_settings_of(config),
        paused=paused, resume_offset=resume_offset,
        stall=None if stall is None else msgspec.convert(stall, GroupStall, from_attributes=True),
    )  # fmt: skip


def declare(call: Call) -> NoAnswer:
    """Create a group, or change its settings."""
    config = group_config_of(call.read(GroupSettings))
    call.broker.admin.declare_group(call.topic, call.group, config, quota=call.principal.quota)
    return NoAnswer()


def delete_group(call: Call) -> NoAnswer:
    """Delete a group; waiting pulls make it in use, as do in-flight messages, which the engine checks."""
    force = call.read_query(DeleteQuery).force
    waiting = call.services.polls.waiting_in(call.topic, call.group)
    with _not_found():
        if waiting and not force:
            call.broker.admin.group_config(call.topic, call.group)
            raise InUse(
                f"the consumer group {call.group} of {call.topic} is in use: {waiting} pulls wait; stop its consumers, "
                "or force the deletion"
            )
        call.broker.deletion.delete_group(call.topic, call.group, force=force)
    call.services.metrics.forget(call.topic, call.group)
    return NoAnswer()


def delete_topic(call: Call) -> NoAnswer:
    """Delete a topic."""
    force = call.read_query(DeleteQuery).force
    with _not_found():
        call.broker.deletion.delete_topic(call.topic, force=force)
    call.services.metrics.forget(call.topic)
    return NoAnswer()


def purge(call: Call) -> PurgeAnswer:
    """Purge a topic."""
    request = call.read(PurgeRequest) if call.body else PurgeRequest()
    with _not_found():
        return call.broker.purger.purge_topic(
            call.topic, scheduled=request.scheduled, dead=request.dead, by=call.principal.name
        )


def seek(call: Call) -> NoAnswer:
    """Move a group to a time or an offset."""
    request = call.read(SeekRequest)
    with _not_found():
        call.broker.admin.seek(call.topic, call.group, to_ms=request.to_ms, to_offset=request.to_offset)
    return NoAnswer()


def pause(call: Call) -> NoAnswer:
    """Stop deliveries to a group."""
    return _pause(call, paused=True)


def resume(call: Call) -> NoAnswer:
    """Resume deliveries to a group."""
    return _pause(call, paused=False)


def dead(call: Call) -> msgspec.Raw:
    """Returns one page of dead letters; contents only for tokens that may consume or administer the topic."""
    query = call.read_query(PageQuery)
    if query.after is not None and not _CURSOR.fullmatch(query.after):
        raise Problem(ProblemKind.INVALID_MESSAGE, "after must be the `next` of an earlier page", where="query.after")
    with _not_found():
        letters, after = call.broker.admin.dead(
            call.topic, call.group, limit=query.limit, after=query.after,
            bytes_max=call.services.settings.dead_page_bytes_max,
        )  # fmt: skip
    call.lease.resize(ANSWER_COPIES * sum(map(_letter_bytes, letters)))
    if not _shows_contents(call):
        letters = list(map(_without_contents, letters))
    entries = letters if call.is_packed else map(json_dead_letter, letters)
    return msgspec.Raw(
        content_negotiation.encode_list("dead", entries, call.answer_codec, count=len(letters), next=after)
    )


def redrive(call: Call) -> RedriveAnswer:
    """Redrive dead letters."""
    request = call.read(RedriveRequest)
    if (request.ids is None) != request.all:
        raise Problem(ProblemKind.WRONG_SHAPE, 'send {"ids": [...]} or {"all": true}', where="$")
    call.check_batch(request.ids or (), where="$.ids")
    with _not_found():
        count = call.broker.dead_letters.redrive(call.topic, call.group, ids=request.ids, per_second=request.per_second)
    return RedriveAnswer(redriven=count)


def stop_redrive(call: Call) -> StopRedriveAnswer:
    """Stop the redrives of a group."""
    _read_nothing(call)
    with _not_found():
        return StopRedriveAnswer(
            stopped=call.broker.dead_letters.stop_redrive(call.topic, call.group, by=call.principal.name)
        )


def count_dead(call: Call) -> DeadCount:
    """Count the dead letters that are meant."""
    request = call.read(DeadCountRequest)
    _check_choice(call, request)
    with _not_found():
        return call.broker.dead_letters.count(call.topic, call.group, ids=request.ids, where=request.where)


def discard(call: Call) -> DiscardAnswer:
    """Discard dead letters."""
    request = call.read(DiscardRequest)
    _check_choice(call, request)
    with _not_found():
        count = call.broker.dead_letters.discard(
            call.topic, call.group, ids=request.ids, where=request.where, dead_before_ms=request.dead_before_ms,
            by=call.principal.name, why=request.why,
        )  # fmt: skip
    return DiscardAnswer(discarded=count)


def edit(call: Call) -> EditPage:
    """Edit dead letters, and have the group get them once more."""
    request = call.read(EditRequest)
    if [request.edits is not None, request.where is not None, request.all].count(True) != 1 or (
        (request.edit is None) != (request.edits is not None)
    ):
        raise Problem(
            ProblemKind.WRONG_SHAPE,
            'send {"edits": [...]}, or {"edit": {...}} with {"where": {...}} or {"all": true}', where="$",
        )  # fmt: skip
    call.check_batch(request.edits or (), where="$.edits")
    operation = EditOperation(name=request.operation, by=call.principal.name, why=request.why)
    letters = call.broker.dead_letters
    with _not_found():
        if request.edit is not None:
            return letters.edit_page(
                call.topic, call.group, dead_edit_of(request.edit), where=request.where,
                dead_before_ms=request.dead_before_ms, after=request.after, operation=operation,
            )  # fmt: skip
        edits = {letter.id: dead_edit_of(letter) for letter in request.edits or ()}
        return EditPage(results=letters.edit(call.topic, call.group, edits, operation=operation))


def _check_choice(call: Call, request: DeadCountRequest) -> None:
    if [request.ids is not None, request.where is not None, request.all].count(True) != 1:
        raise Problem(ProblemKind.WRONG_SHAPE, 'send {"ids": [...]}, {"where": {...}} or {"all": true}', where="$")
    call.check_batch(request.ids or (), where="$.ids")


def _pause(call: Call, *, paused: bool) -> NoAnswer:
    _read_nothing(call)
    with _not_found():
        call.broker.admin.pause(call.topic, call.group, paused=paused)
    return NoAnswer()


def _read_nothing(call: Call) -> None:
    if call.body:
        call.read(NoRequest)


def _shows_contents(call: Call) -> bool:
    principal = call.principal
    return principal.allows(Role.CONSUME, call.topic) or principal.allows(Role.ADMIN, call.topic)


def _letter_bytes(letter: DeadLetter) -> int:
    return len(letter.body) + _REASON_CHAR_BYTES * sum(len(reason) for reason, _ in letter.history)


def _without_contents(letter: DeadLetter) -> DeadLetter:
    message = Record(id=letter.id, topic=letter.topic, body=b"")
    return msgspec.structs.replace(letter, message=message, has_contents=False)


@contextmanager
def _not_found() -> Iterator[None]:
    """Turns the engine's KeyError for a missing topic or group into a problem."""
    try:
        yield
    except KeyError as error:
        raise Problem(ProblemKind.NOT_FOUND, str(error.args[0])) from error
