"""The metadata of a broker as one document: topics, their groups with filters and settings, positions, and recurring
messages. What to do with it on another broker is decided first, as a plan, and then done.

A position is a number of messages of one broker's topic, and means nothing on another broker, unless that has the same
messages. So a group begins at the earliest message there, which may repeat some and skips none, or by another policy
if that is asked. Messages, dead letters, schedules and tokens are not metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

import msgspec

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import DECODE_ERRORS, NotAuthorized, UsageError
from outbox_core.messages.message import GroupConfig
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.protocol import wire
from outbox_core.protocol.wire_conversion import (
    body_bytes,
    group_config_of,
    recurring_message_of,
    recurring_settings_of,
)

FORMAT: Final = "outbox-mq-metadata"
VERSION: Final = 1
_UNFINISHED_AT_EARLIEST: Final = 1
_UNFINISHED_AT_LATEST: Final = 253_402_300_799_000
"""Times (ms) at which a group begins while an import is making it: right after 1970, and the end of 9999. None of these
has messages before it or after it, so they mean the earliest and the latest, and nobody else names them.
"""


class PositionPolicy(StrEnum):
    """Where a group begins that an import makes."""

    EARLIEST = "earliest"
    """At the earliest message that the broker has: some may come again, none is skipped."""
    LATEST = "latest"
    """Behind all that the broker has: what was published there before the import is skipped."""
    COPY = "copy-where-contents-match"
    """Where it was, if the message before that has the same id at the same offset; else at the earliest."""


class GroupMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A group. `resume_offset` is the first that it had still to get; `before_id` is the id of the message before it,
    null if there is none any more, or the token may not read it.
    """

    group: str
    settings: wire.GroupSettings
    paused: bool
    resume_offset: int
    before_id: str | None


class TopicMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A topic and its groups."""

    topic: str
    groups: list[GroupMetadata]


class RecurringMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A recurring message. Which of its occurrences are over is not in it: on another broker it begins anew."""

    name: str
    settings: wire.RecurringSettings


class MetadataDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a broker."""

    format: Literal["outbox-mq-metadata"] = FORMAT
    version: int = VERSION
    exported_at_ms: int
    source: str
    topics: list[TopicMetadata]
    recurring: list[RecurringMetadata] = []


class StepKind(StrEnum):
    """What an import does with one group."""

    MAKE = "make"
    KEEP = "keep"
    CHANGE = "change"
    """Its settings differ, and are changed only where that was allowed; its position is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportStep:
    """What is done with a group; `text` says it."""

    kind: StepKind
    topic: str
    group: str
    text: str
    config: GroupConfig
    paused: bool
    is_paused_now: bool = False
    to_offset: int | None = None
    """Where a group is moved that an import makes; None: it begins as its config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringStep:
    """What is done with a recurring message; `text` says it."""

    kind: StepKind
    name: str
    text: str
    message: RecurringMessage
    paused: bool
    is_same: bool = False
    """Whether it differs in nothing but whether it is paused."""


def parse_document(data: bytes) -> MetadataDocument:
    """Returns the document. Raises UsageError for what is none, or of a later version than this one knows."""
    try:
        document = msgspec.json.decode(data, type=MetadataDocument)
    except DECODE_ERRORS as error:
        raise UsageError(f"this is no export of a broker's metadata: {error}") from error
    if document.version != VERSION:
        raise UsageError(f"the document has version {document.version}, and this release knows {VERSION}")
    names = [(topic.topic, group.group) for topic in document.topics for group in topic.groups]
    if len(set(names)) != len(names):
        raise UsageError("the document has a group twice")
    if len({recurring.name for recurring in document.recurring}) != len(document.recurring):
        raise UsageError("the document has a recurring message twice")
    return document


def export_topics(client: AdminClient) -> Iterator[TopicMetadata]:
    """Yields the metadata of each topic that the token covers."""
    for name in client.topics():
        answers = [client.group(name, group) for group in client.topic(name).groups]
        yield TopicMetadata(
            topic=name,
            groups=[
                GroupMetadata(
                    group=answer.group, settings=answer.settings, paused=answer.paused,
                    resume_offset=answer.resume_offset, before_id=_id_before(client, name, answer.resume_offset),
                )
                for answer in answers
            ],
        )  # fmt: skip


def plan_import(
    client: AdminClient, document: MetadataDocument, *, policy: PositionPolicy, overwrite: bool
) -> list[ImportStep]:
    """Returns what an import does, group by group; changes nothing. Raises UsageError that names every group whose
    settings contradict the document's, unless they may be overwritten.
    """
    topics = set(client.topics())
    steps: list[ImportStep] = []
    for topic in document.topics:
        present = _groups_of(client, topic.topic) if topic.topic in topics else {}
        for group in topic.groups:
            answer = present.get(group.group)
            if answer is None or _is_unfinished(answer):
                steps.append(_made(client, topic.topic, group, policy, unfinished=answer))
            else:
                steps.append(_compared(topic.topic, group, answer))
    contradictions = [step for step in steps if step.kind is StepKind.CHANGE]
    if contradictions and not overwrite:
        texts = "; ".join(step.text for step in contradictions)
        raise UsageError(
            f"nothing was done, since groups are there with other settings (--overwrite changes them): {texts}"
        )
    return steps


def export_recurring(client: AdminClient) -> Iterator[RecurringMetadata]:
    """Yields the recurring messages on topics that the token covers. Raises NotAuthorized if it may not see them."""
    for listed in client.recurring():
        answer = client.recurring_message(listed.name, runs=1)
        if answer is None:
            continue  # it was deleted meanwhile
        if answer.body is None:
            raise NotAuthorized(
                f"the token may not see what the recurring message {listed.name} publishes: it needs the role consume"
            )
        settings = recurring_settings_of(_recurring_message(answer), paused=answer.paused)
        yield RecurringMetadata(name=answer.name, settings=settings)


def plan_recurring(client: AdminClient, document: MetadataDocument, *, overwrite: bool) -> list[RecurringStep]:
    """Returns what an import does with recurring messages; changes nothing. Raises UsageError that names every one that
    is there and differs, unless it may be overwritten.
    """
    steps = [_recurring_step(client, recurring) for recurring in document.recurring]
    contradictions = [step for step in steps if step.kind is StepKind.CHANGE]
    if contradictions and not overwrite:
        texts = "; ".join(step.text for step in contradictions)
        raise UsageError(
            f"nothing was done, since recurring messages are there that differ (--overwrite changes them): {texts}"
        )
    return steps


def apply_recurring(client: AdminClient, step: RecurringStep) -> None:
    """Does one step; a repeat finds it done. One that publishes something else is another one, and begins anew."""
    if step.kind is StepKind.KEEP:
        return
    if step.is_same:
        client.pause_recurring(step.name, paused=step.paused)
        return
    if step.kind is StepKind.CHANGE:
        client.delete_recurring(step.name)
    client.add_recurring(step.name, step.message, paused=step.paused)


def apply_step(client: AdminClient, step: ImportStep) -> None:
    """Does one step; a repeat finds it done. A new group is paused, where it is to be, before it is moved."""
    if step.kind is StepKind.KEEP:
        return
    # Until a new group is where it is to be, it has a start by which a repeat knows that it is not finished, whatever
    # cut the import. With its own it would be taken for one that was there before, and kept at the beginning.
    is_made_at_once = step.kind is not StepKind.MAKE or (step.paused is step.is_paused_now and step.to_offset is None)
    client.declare_group(step.topic, step.group, step.config if is_made_at_once else _unfinished(step.config))
    if step.paused is not step.is_paused_now:
        client.pause(step.topic, step.group, paused=step.paused)
    if step.to_offset is not None:
        client.seek(step.topic, step.group, to_offset=step.to_offset)
    if not is_made_at_once:
        client.declare_group(step.topic, step.group, step.config)


def _unfinished(config: GroupConfig) -> GroupConfig:
    at_ms = _UNFINISHED_AT_LATEST if config.start == "latest" else _UNFINISHED_AT_EARLIEST
    return replace(config, start="at", start_at_ms=at_ms)


def _is_unfinished(answer: wire.GroupAnswer) -> bool:
    start = answer.settings.start
    return isinstance(start, wire.StartAt) and start.at_ms in {_UNFINISHED_AT_EARLIEST, _UNFINISHED_AT_LATEST}


def _groups_of(client: AdminClient, topic: str) -> Mapping[str, wire.GroupAnswer]:
    return {group: client.group(topic, group) for group in client.topic(topic).groups}


def _made(
    client: AdminClient,
    topic: str,
    group: GroupMetadata,
    policy: PositionPolicy,
    *,
    unfinished: wire.GroupAnswer | None,
) -> ImportStep:
    """Makes a group, or finishes one that an import was cut in making, perhaps under another policy. Its consumers may
    have begun: it is moved back rather than left where it may have skipped messages.
    """
    start, to_offset, where = "earliest", None if unfinished is None else 0, "from the earliest message"
    match policy:
        case PositionPolicy.LATEST:
            start, to_offset, where = "latest", None, "from the end"
        case PositionPolicy.COPY if group.resume_offset > 0:
            if group.before_id is not None and group.before_id == _id_before(client, topic, group.resume_offset):
                to_offset, where = group.resume_offset, f"from offset {group.resume_offset}"
            else:
                where += f", since the message before offset {group.resume_offset} is not the same here"
        case _:
            pass
    settings = msgspec.structs.replace(group.settings, start=start)
    verb = "make" if unfinished is None else "finish making"
    return ImportStep(
        kind=StepKind.MAKE, topic=topic, group=group.group, config=group_config_of(settings), paused=group.paused,
        is_paused_now=unfinished is not None and unfinished.paused, to_offset=to_offset,
        text=f"{verb} {topic}/{group.group}, {where}{', paused' if group.paused else ''}",
    )  # fmt: skip


def _compared(topic: str, group: GroupMetadata, answer: wire.GroupAnswer) -> ImportStep:
    """A group that is there keeps its position; where it began, `start`, matters no more."""
    wanted = msgspec.structs.replace(group.settings, start=answer.settings.start)
    differing = [
        f"{name} {_shown(getattr(answer.settings, name))}, not {_shown(getattr(wanted, name))}"
        for name in wanted.__struct_fields__
        if getattr(answer.settings, name) != getattr(wanted, name)
    ]
    if answer.paused is not group.paused:
        differing.append(f"it {'is' if answer.paused else 'is not'} paused")
    kind = StepKind.CHANGE if differing else StepKind.KEEP
    text = f"{topic}/{group.group} has {', '.join(differing)}" if differing else f"keep {topic}/{group.group} as it is"
    return ImportStep(
        kind=kind, topic=topic, group=group.group, config=group_config_of(wanted), paused=group.paused,
        is_paused_now=answer.paused, text=text,
    )  # fmt: skip


def _recurring_step(client: AdminClient, recurring: RecurringMetadata) -> RecurringStep:
    name, paused, message = recurring.name, recurring.settings.paused, recurring_message_of(recurring.settings)
    answer = client.recurring_message(name, runs=1)
    if answer is None:
        text = f"add the recurring message {name} to {message.topic}{', paused' if paused else ''}"
        return RecurringStep(kind=StepKind.MAKE, name=name, text=text, message=message, paused=paused)
    present = _recurring_message(answer)
    differing = [field for field in message.__struct_fields__ if getattr(present, field) != getattr(message, field)]
    texts = [f"has another {field}" for field in differing]
    if answer.paused is not paused:
        texts.append(f"{'is' if answer.paused else 'is not'} paused")
    kind = StepKind.CHANGE if texts else StepKind.KEEP
    text = f"the recurring message {name} {', '.join(texts)}" if texts else f"keep the recurring message {name}"
    return RecurringStep(kind=kind, name=name, text=text, message=message, paused=paused, is_same=not differing)


def _recurring_message(answer: wire.RecurringAnswer) -> RecurringMessage:
    return RecurringMessage(
        topic=answer.topic, cron=answer.cron, tz=answer.tz, key=answer.key, headers=answer.headers or {},
        body=body_bytes(answer.body or "", answer.encoding), catch_up=answer.catch_up,
    )  # fmt: skip


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _id_before(client: AdminClient, topic: str, offset: int) -> str | None:
    """Returns the id of the message right before an offset; None if there is none, or the token may not read it."""
    if offset < 1:
        return None
    try:
        read = client.read(topic, offset=offset - 1, max_messages=1)
    except NotAuthorized:
        return None
    is_there = read.offset == offset - 1 and read.next_offset == offset and len(read.messages) == 1
    return read.messages[0].id if is_there else None
