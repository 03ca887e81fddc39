"""Checks the groups and topics that the settings name against what the broker's logs and the sources have.

A misspelt one is an error with the nearest name: without the check all its rows would be findings. Reads no tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.checkpoint_group_reader import read_groups
from outbox_core.journal.checkpoint_parts import CheckpointParts
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import InboxSource, Settings
from spark_reconcile.load.read_plan import TableExtent
from spark_reconcile.sources.broker_logs import CHECKPOINT_KINDS, LogSegment, begins_whole, blocks_of
from spark_reconcile.sources.sql_statements import CANCELS, InputKind

if TYPE_CHECKING:
    from spark_reconcile.core.plausible_times import InputCount
    from spark_reconcile.evidence.delivery_evidence import GroupFacts


NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroups:
    """The (topic, group) pairs of a broker.

    `pairs`: all in the action log, including deleted ones; `deleted`: those that were deleted and not created again.
    `is_complete`: no other group exists; False if the beginning of the log was dropped and no checkpoint has the
    groups. `is_whole`: nothing of the log was dropped, so deleted groups are among them, too.
    """

    pairs: frozenset[tuple[str, str]]
    deleted: frozenset[tuple[str, str]]
    is_complete: bool
    is_whole: bool

    @property
    def live(self) -> frozenset[tuple[str, str]]:
        """The pairs without deleted groups."""
        return self.pairs - self.deleted

    def has(self, group: str, topics: Collection[str] = ()) -> bool:
        """Whether the group is known, on one of these topics if any are named."""
        return any(name == group and (not topics or topic in topics) for topic, name in self.pairs)


def known_groups(
    counts: Sequence[InputCount], facts: Sequence[GroupFacts], segments: Sequence[LogSegment]
) -> KnownGroups:
    """Find groups from the counts of the action log's rows, the facts of groups, and the log's segments.

    The broker drops old actions. Groups without remaining actions are in the log's newest checkpoint.
    """
    named = {(count.topic, count.note.partition(" ")[2]) for count in counts if count.input_kind == "actions"}
    pairs = {(topic, group) for topic, group in named if topic and group}
    is_whole = begins_whole(segments)
    carried = [] if is_whole else _carried(segments)
    return KnownGroups(
        pairs=frozenset(pairs.union(carried or [])),
        deleted=frozenset((group.topic, group.consumer_group) for group in facts if group.deleted),
        is_complete=carried is not None,
        is_whole=is_whole,
    )


def check_names(
    settings: Settings, known: KnownGroups, extents: Sequence[TableExtent], *, rows: Mapping[str, int]
) -> None:
    """Refuse settings that name a group unknown to the broker.

    `rows`: the number of rows of the broker's logs, "messages" and "actions". On a system without groups, an inbox
    without rows is no mistake. Raises ConfigurationError with the nearest name; NotComparable if the inbox has
    effects of that group, and no retention explains that the action log has no actions of it.
    """
    if not known.is_complete:
        return
    for inbox in settings.inboxes:
        if not known.has(inbox.group, inbox.topics):
            _refuse_inbox(inbox, known, extents)
    if not known.pairs and not rows["messages"] and not rows["actions"]:
        return
    for name in settings.groups:
        topic, _, group = name.rpartition("/")
        if not known.has(group, [topic] if topic else ()):
            raise ConfigurationError(f"[broker] groups: {_unknown(name, known, whole=bool(topic))}")


def _refuse_inbox(inbox: InboxSource, known: KnownGroups, extents: Sequence[TableExtent]) -> None:
    filled = [
        extent
        for extent in extents
        if extent.input_kind is InputKind.INBOX and extent.what == inbox.group and not extent.is_empty
    ]
    unknown = _unknown(inbox.group, known, topics=inbox.topics)
    if filled and known.is_whole:
        raise NotComparable(
            f"the {filled[0].name} has effects, so nothing is judged: {unknown}. Restore the broker's action log from "
            "a copy, or name the right group, or the folder of the broker that it consumes from"
        )
    if known.pairs:
        was_deleted = "; if it was deleted, leave it out" if filled else ""
        raise ConfigurationError(f"[[inboxes]]: {unknown}{was_deleted}")


def _unknown(name: str, known: KnownGroups, *, topics: Sequence[str] = (), whole: bool = False) -> str:
    names = sorted({f"{topic}/{group}" if whole else group for topic, group in known.pairs})
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    on = f" on {', '.join(topics[:NAMED_MAX])}" if topics else ""
    if near and near[0] != name:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"it knows {', '.join(names[:NAMED_MAX])}{', ...' if len(names) > NAMED_MAX else ''}" if names else ""
    return "; ".join(filter(None, (f"the broker's action log knows no group {name!r}{on}", hint or "it knows none")))


def _carried(segments: Sequence[LogSegment]) -> list[tuple[str, str]] | None:
    """Returns the groups of the newest complete checkpoint; None if there is none."""
    parts = CheckpointParts()
    for segment in reversed(segments):  # a checkpoint's parts may be in several
        for block in blocks_of(segment, wanted=CHECKPOINT_KINDS):
            parts.add(block.frames)
        checkpoint = parts.newest_whole()
        if checkpoint is not None:
            return read_groups(b"".join(checkpoint.parts))
    return None


NEAR: Final = 0.8
"""The similarity ratio (difflib) from which one topic is taken for a misspelling of another."""
_PUBLISHED: Final = frozenset({InputKind.OUTBOX, InputKind.ARCHIVE, "messages"})


def check_rule_topics(settings: Settings, counts: Sequence[InputCount], *, now_ms: int) -> None:
    """Raises ConfigurationError for a rule whose topic looks like a misspelling of another.

    The conditions: rows older than the grace time require messages on the topic; it has never had an outbox row,
    archive row, message or action; and a similar topic has messages that no rule covers. Without the check, all these
    rows would be lost, and no message on the other topic would be compared.
    """
    covered = {rule.topic for rule in settings.rules}
    published = {
        count.topic for count in counts if count.input_kind in _PUBLISHED and count.topic and count.topic != CANCELS
    }
    for rule_number, rule in enumerate(settings.rules):
        asking = [
            count for count in _unanswered(settings, counts, rule_number) if count.first_ms < now_ms - settings.grace.ms
        ]
        near = difflib.get_close_matches(rule.topic, sorted(published - covered), n=1, cutoff=NEAR)
        if asking and near:
            raise ConfigurationError(
                f"rule {rule.name}: {sum(count.rows for count in asking):,} rows ask for messages on the topic "
                f"{rule.topic!r}, on which there has never been a message, an outbox row or an action of a group; did "
                f"you mean {near[0]!r}? If the topic is right, give {near[0]!r} a rule of its own"
            )


def note_on_topic(settings: Settings, counts: Sequence[InputCount], rule_number: int) -> str:
    """Returns a note on the topic of the rule with this number if it was never used; else empty."""
    if not _unanswered(settings, counts, rule_number):
        return ""
    return (
        f"no message, outbox row or action of a group has ever been on its topic {settings.rules[rule_number].topic!r}"
    )


def _unanswered(settings: Settings, counts: Sequence[InputCount], rule_number: int) -> list[InputCount]:
    """Returns the rows of a rule whose topic was never used; else none."""
    topic = settings.rules[rule_number].topic
    if any(count.topic == topic for count in counts if count.input_kind in _PUBLISHED or count.input_kind == "actions"):
        return []
    return [
        count
        for count in counts
        if count.input_kind == InputKind.BUSINESS and count.note == str(rule_number) and count.rows
    ]
