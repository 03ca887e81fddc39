"""The metadata of a broker as one document: topics, their groups with filters and settings, and positions. What to do
with it on another broker is decided first, as a plan, and then done.

A position is a number of messages of one broker's topic, and means nothing on another broker, unless that has the same
messages. So a group begins at the earliest message there, which may repeat some and skips none, or by another policy
if that is asked. Messages, dead letters, schedules and tokens are not metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import msgspec

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import NotAuthorized, UsageError
from outbox_core.messages.message import GroupConfig
from outbox_core.protocol import wire
from outbox_core.protocol.wire_conversion import group_config_of

FORMAT: Final = "outbox-mq-metadata"
VERSION: Final = 1


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


class MetadataDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a broker."""

    format: Literal["outbox-mq-metadata"] = FORMAT
    version: int = VERSION
    exported_at_ms: int
    source: str
    topics: list[TopicMetadata]


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
    """Where a new group is moved; None: it begins as its config says."""


def parse_document(data: bytes) -> MetadataDocument:
    """Returns the document. Raises UsageError for what is none, or of a later version than this one knows."""
    try:
        document = msgspec.json.decode(data, type=MetadataDocument)
    except msgspec.DecodeError as error:
        raise UsageError(f"this is no export of a broker's metadata: {error}") from error
    if document.version != VERSION:
        raise UsageError(f"the document has version {document.version}, and this release knows {VERSION}")
    names = [(topic.topic, group.group) for topic in document.topics for group in topic.groups]
    if len(set(names)) != len(names):
        raise UsageError("the document has a group twice")
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
            step = (
                _made(client, topic.topic, group, policy) if answer is None else _compared(topic.topic, group, answer)
            )
            steps.append(step)
    contradictions = [step for step in steps if step.kind is StepKind.CHANGE]
    if contradictions and not overwrite:
        texts = "; ".join(step.text for step in contradictions)
        raise UsageError(
            f"nothing was done, since groups are there with other settings (--overwrite changes them): {texts}"
        )
    return steps


def apply_step(client: AdminClient, step: ImportStep) -> None:
    """Does one step; a repeat finds it done. A new group is paused, where it is to be, before it is moved."""
    if step.kind is StepKind.KEEP:
        return
    client.declare_group(step.topic, step.group, step.config)
    if step.paused is not step.is_paused_now:
        client.pause(step.topic, step.group, paused=step.paused)
    if step.to_offset is not None:
        client.seek(step.topic, step.group, to_offset=step.to_offset)


def _groups_of(client: AdminClient, topic: str) -> Mapping[str, wire.GroupAnswer]:
    return {group: client.group(topic, group) for group in client.topic(topic).groups}


def _made(client: AdminClient, topic: str, group: GroupMetadata, policy: PositionPolicy) -> ImportStep:
    start, to_offset, where = "earliest", None, "from the earliest message"
    match policy:
        case PositionPolicy.LATEST:
            start, where = "latest", "from the end"
        case PositionPolicy.COPY if group.resume_offset > 0:
            if group.before_id is not None and group.before_id == _id_before(client, topic, group.resume_offset):
                to_offset, where = group.resume_offset, f"from offset {group.resume_offset}"
            else:
                where += f", since the message before offset {group.resume_offset} is not the same here"
        case _:
            pass
    settings = msgspec.structs.replace(group.settings, start=start)
    return ImportStep(
        kind=StepKind.MAKE, topic=topic, group=group.group, config=group_config_of(settings), paused=group.paused,
        to_offset=to_offset, text=f"make {topic}/{group.group}, {where}{', paused' if group.paused else ''}",
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
