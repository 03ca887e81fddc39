"""One row of evidence for each message and consumer group: expected deliveries, the broker's actions, inbox rows.

A tagged union and one group-by. Transforms DataFrames; reads and classifies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spark_reconcile.core.dataframes import among, grouped, listed, union
from spark_reconcile.core.time_buckets import EVER_MS
from spark_reconcile.rules.delivery_rules import FilterAnswer, LastKind
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_KINDS: Final = {
    "delivered": LastKind.DELIVERED,
    "extended": LastKind.DELIVERED,
    "requeued": LastKind.REQUEUED,
    "acked": LastKind.ACKED,
    "died": LastKind.DIED,
    "redriven": LastKind.REDRIVEN,
    "redrive_stopped": LastKind.DIED,
    "discarded": LastKind.DISCARDED,
    "edited": LastKind.REDRIVEN,  # and what is delivered from then on has another id
}
_EXPECTED: Final = (
    "stored", "deliver_at_ms", "message_ready_ms", "stored_ms", "sequence", "canceled", "floor", "since_ms", "seeks",
    "last_seek_ms", "last_seek_position", "deleted", "deleted_position", "paused", "filtered", "has_inbox",
    "inbox_reach_ms", "inbox_until_ms",
    "published_ms",
)  # fmt: skip
_COUNTED: Final = ("deliveries", "acks", "nacks", "redrives", "edits", "effects")
_GROUP_SCHEMA: Final = (
    "topic string, consumer_group string, floor bigint, since_ms bigint, seeks bigint, last_seek_ms bigint, "
    "last_seek_position bigint, deleted bigint, deleted_position bigint, paused bigint, filtered bigint, "
    "has_inbox bigint, inbox_reach_ms bigint, "
    "inbox_until_ms bigint"
)
_UNDECLARED: Final = {"filtered": 1}
"""Facts of a group whose declaration is not in the log: it may have a filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts of a group as a whole by the action log, and the time range that its inbox covers.

    `floor`: the first sequence of the group, by its start or its last seek; `since_ms`: when it began;
    `last_seek_position`: log position of that seek (-1: none); `deleted`: it was, and was not created again;
    `deleted_position`: log position of that (-1: never); `filtered`: it has, had or may have a filter, which may reject
    messages for good; `filter`: its present filter; `filter_since_ms`: messages appended later were evaluated by no
    other filter (0: none were at all, -1: not known).
    """

    topic: str
    consumer_group: str
    floor: int = 0
    since_ms: int = 0
    seeks: int = 0
    last_seek_ms: int = 0
    last_seek_position: int = -1
    deleted: int = 0
    deleted_position: int = -1
    paused: int = 0
    filtered: int = 0
    filter: str = ""
    filter_since_ms: int = 0
    has_inbox: int = 0
    inbox_reach_ms: int = 0
    inbox_until_ms: int = 0


def group_facts(
    events: Iterable[Event], *, inboxes: dict[tuple[str, str], int],
    until: Mapping[tuple[str, str], int], acting: Mapping[tuple[str, str], int],
) -> list[GroupFacts]:  # fmt: skip
    """Returns groups from their own actions, (kind, topic, group, sequence, position, at_ms, filter), in any order.

    `inboxes`: since when the inbox of a (topic, group) is complete; topic "" is any topic; `until`: and
    until when. `acting`: if the beginning of the log was dropped, each (topic, group) with actions, and since when;
    its declaration may have been dropped.
    """
    facts_by_group: dict[tuple[str, str], dict[str, int]] = {}
    ordered = sorted(events, key=lambda event: event[4])
    filters = filters_in_force(ordered, acting=acting)
    for kind, topic, group, sequence, position, at_ms, filter_ in ordered:
        begun = {"floor": sequence or 0, "since_ms": at_ms} if at_ms <= acting.get((topic, group), at_ms) else {}
        facts = facts_by_group.setdefault((topic, group), begun if kind == "declared" else dict(_UNDECLARED))
        match kind:
            case "deleted":  # like a seek: delivered messages may be redelivered, to a new group of this name
                seeks = facts.get("seeks", 0) + 1
                facts_by_group[topic, group] = {"seeks": seeks, "deleted": 1, "deleted_position": position}
            case "declared" if facts.get("deleted"):
                facts.update(deleted=0, floor=sequence or 0, since_ms=at_ms, filtered=int(bool(filter_)))
            case "sought":
                facts.update(
                    floor=sequence or 0, seeks=facts.get("seeks", 0) + 1, last_seek_ms=at_ms,
                    last_seek_position=position,
                )  # fmt: skip
            case "paused" | "resumed":
                facts["paused"] = int(kind == "paused")
            case _ if filter_:
                facts["filtered"] = 1  # permanently: messages it rejected are not delivered after its removal
            case _:
                pass  # declared again: new settings, the same position
    for topic_group in acting:
        facts_by_group.setdefault(topic_group, dict(_UNDECLARED))
    return [
        GroupFacts(
            topic=topic, consumer_group=group, **facts, **_inbox_of(topic, group, inboxes, until),
            filter=filters[topic, group].text, filter_since_ms=filters[topic, group].since_ms,
        )
        for (topic, group), facts in sorted(facts_by_group.items())
    ]  # fmt: skip


def delivery_evidence(
    messages: DataFrame, actions: DataFrame, rows: DataFrame, *, groups: Sequence[GroupFacts],
    asides: DataFrame | None = None,
) -> DataFrame:  # fmt: skip
    """`messages`: the result of message_evidence(); `rows`: the inboxes' inputs; `asides`: the actions of kind ASIDE,
    each of which is expected in its own group.
    """
    groups_frame = listed(messages.sparkSession, [_values(facts) for facts in groups], _GROUP_SCHEMA)
    stored = messages.where("broker > 0").withColumnsRenamed(
        {"broker": "stored", "ready_ms": "message_ready_ms", "created_ms": "published_ms"}
    )
    expected = stored.join(groups_frame.hint("broadcast"), "topic")
    united = union(
        _input(expected, **{name: name for name in _EXPECTED}),
        _actions_input(actions),
        _input(rows.where(f"input_kind = '{InputKind.INBOX}'"), effects="1L", effect_ms="at_ms"),
        *([] if asides is None else [_aside_input(asides, groups_frame)]),
    )
    return _after_seeks(grouped(united, "id", "topic", "consumer_group", **_aggregates()))


def _aside_input(asides: DataFrame, groups_frame: DataFrame) -> DataFrame:
    """What `expected` has of stored messages. It was not canceled: it was in its topic before."""
    of_message = {
        "stored": "1L", "deliver_at_ms": "attempt", "message_ready_ms": "greatest(visible_at_ms, attempt)",
        "stored_ms": "visible_at_ms", "published_ms": "at_ms", "canceled": "0L",
    }  # fmt: skip
    expected = asides.join(groups_frame.hint("broadcast"), ["topic", "consumer_group"])
    return _input(expected, **{name: of_message.get(name, name) for name in _EXPECTED})


def _actions_input(actions: DataFrame) -> DataFrame:
    def when(kind: str, value: str, otherwise: str = "cast(null as bigint)") -> str:
        return f"if(kind = '{kind}', {value}, {otherwise})"

    kinds = " ".join(f"when '{name}' then {int(code)}L" for name, code in _KINDS.items())
    return _input(
        actions.where(among("kind", _KINDS)),
        deliveries=when("delivered", "1L", "0L"),
        acks=when("acked", "1L", "0L"),
        nacks=when("requeued", "1L", "0L"),
        redrives="if(kind in ('redriven', 'edited'), 1L, 0L)",
        edits=when("edited", "1L", "0L"),
        first_delivered_ms=when("delivered", "at_ms"),
        last_delivered_ms=when("delivered", "at_ms"),
        first_ack_ms=when("acked", "at_ms"),
        last_kind=f"case kind {kinds} end",
        last_ms="at_ms",
        visible_ms="coalesce(visible_at_ms, 0L)",
        position="position",
    )


_TIMES: Final = (
    "first_delivered_ms", "last_delivered_ms", "first_ack_ms", "last_kind", "last_ms", "visible_ms", "position",
    "effect_ms",
)  # fmt: skip


def _input(frame: DataFrame, **columns: str) -> DataFrame:
    """Returns an input with the common columns: unknown values are null, absent counts are 0."""
    counts = [f"{columns.get(name, '0L')} as {name}" for name in _COUNTED]
    other_columns = [f"cast({columns.get(name, 'null')} as bigint) as {name}" for name in (*_EXPECTED, *_TIMES)]
    return frame.selectExpr("id", "topic", "consumer_group", *counts, *other_columns)


def _aggregates() -> dict[str, str]:
    least = ("first_delivered_ms", "first_ack_ms", "effect_ms")
    last = ("last_kind", "visible_ms")
    return {
        **{name: f"sum({name})" for name in _COUNTED},
        **{name: f"coalesce(max({name}), {-1 if name == 'sequence' else 0}L)" for name in _EXPECTED},
        **{name: f"coalesce(min({name}), 0L)" for name in least},
        **{name: f"coalesce(max_by({name}, position), 0L)" for name in last},
        "last_delivered_ms": "coalesce(max(last_delivered_ms), 0L)",
        "last_ms": "coalesce(max(last_ms), 0L)",
        "last_position": "coalesce(max(position), -1L)",
    }


def _after_seeks(by_group: DataFrame) -> DataFrame:
    """A seek makes messages ahead of it ready again, whether they were in flight, released or dead letters,
    or discarded ones.

    A deletion makes all messages ready again.
    """
    ends = f"{LastKind.DIED:d}, {LastKind.DISCARDED:d}"
    sought = f"last_position < last_seek_position and (sequence >= floor or last_kind not in ({ends}))"
    reset = f"(acks = 0 and (last_position < deleted_position or ({sought})))"
    return by_group.selectExpr(
        "id", "topic", "consumer_group", *_COUNTED, "stored", "deliver_at_ms", "stored_ms", "sequence", "canceled",
        "floor", "seeks", "deleted", "paused", "filtered", "has_inbox", "inbox_reach_ms", "inbox_until_ms",
        "first_delivered_ms", "last_delivered_ms", "first_ack_ms", "effect_ms", "last_ms", "published_ms",
        f"if({reset}, {LastKind.NOTHING:d}L, last_kind) as last_kind",
        f"if({reset}, 0L, visible_ms) as visible_ms",
        f"greatest(message_ready_ms, since_ms, if({reset}, last_seek_ms, 0L)) as ready_ms",
        f"{FilterAnswer.NOT_KNOWN:d}L as wanted",
    )  # fmt: skip


def _inbox_of(
    topic: str, group: str, inboxes: Mapping[tuple[str, str], int], until: Mapping[tuple[str, str], int]
) -> dict[str, int]:
    reach_ms = inboxes.get((topic, group), inboxes.get(("", group)))
    if reach_ms is None:
        return {}
    until_ms = min(until.get((topic, group), EVER_MS), until.get(("", group), EVER_MS))
    return {"has_inbox": 1, "inbox_reach_ms": reach_ms, "inbox_until_ms": until_ms}


def _values(facts: GroupFacts) -> tuple[Any, ...]:
    return (
        facts.topic, facts.consumer_group, facts.floor, facts.since_ms, facts.seeks, facts.last_seek_ms,
        facts.last_seek_position, facts.deleted, facts.deleted_position, facts.paused, facts.filtered,
        facts.has_inbox, facts.inbox_reach_ms, facts.inbox_until_ms,
    )  # fmt: skip


Event = tuple[str, str, str, int | None, int, int, str | None]
"""A group's own action: kind, topic, group, sequence, position in the log, at_ms, filter."""
TopicGroup = tuple[str, str]
"""A topic and a group."""
UNKNOWN_MS: Final = -1


class GroupFilter(NamedTuple):
    """`text`: the filter, empty if the group gets every message. `since_ms`: the broker has evaluated no other filter
    on messages appended later; 0: on no message at all, UNKNOWN_MS: the log does not tell.
    """

    text: str
    since_ms: int


_UNKNOWN: Final = GroupFilter("", UNKNOWN_MS)


def filters_in_force(events: Iterable[Event], *, acting: Mapping[TopicGroup, int]) -> dict[TopicGroup, GroupFilter]:
    """Returns the filter of each group, from its own actions in the order of the log.

    `acting`: if the beginning of the log was dropped, each (topic, group) with actions, and since when. The broker
    evaluates a changed filter on messages beyond the group's position, so only a change makes the filter of earlier
    messages unknown. After a seek all messages ahead are evaluated again; a group created again has no past.
    """
    filters: dict[TopicGroup, GroupFilter] = {}
    deleted: set[TopicGroup] = set()
    for kind, topic, group, _, _, at_ms, text in events:
        topic_group = (topic, group)
        before = filters.get(topic_group)
        match kind:
            case "declared":
                is_made = topic_group in deleted or (before is None and at_ms <= acting.get(topic_group, at_ms))
                filters[topic_group] = _declared(before, text or "", at_ms=at_ms, is_made=is_made)
                deleted.discard(topic_group)
            case "deleted":
                filters[topic_group] = GroupFilter("", 0)
                deleted.add(topic_group)
            case "sought" if before is not None and before.since_ms != UNKNOWN_MS:
                filters[topic_group] = before._replace(since_ms=0)
            case _:
                filters.setdefault(topic_group, _UNKNOWN)
    return {**dict.fromkeys(acting, _UNKNOWN), **filters}


def _declared(before: GroupFilter | None, text: str, *, at_ms: int, is_made: bool) -> GroupFilter:
    if is_made:
        return GroupFilter(text, 0)
    if before is not None and before.since_ms != UNKNOWN_MS and before.text == text:
        return before
    return GroupFilter(text, at_ms)
