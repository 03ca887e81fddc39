"""Determines a group's filter, and since when no other filter can have been evaluated. Pure; evaluates no filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

Event = tuple[str, str, str, int | None, int, int, str | None]
"""A group's own action: kind, topic, group, sequence, position in the log, at_ms, filter."""
Place = tuple[str, str]
"""A topic and a group."""
UNKNOWN_MS: Final = -1


class GroupFilter(NamedTuple):
    """`text`: the filter, empty if the group gets every message. `since_ms`: the broker has evaluated no other filter
    on messages appended later; 0: on no message at all, UNKNOWN_MS: the log does not tell.
    """

    text: str
    since_ms: int


_UNKNOWN: Final = GroupFilter("", UNKNOWN_MS)


def filters_in_force(events: Iterable[Event], *, acting: Mapping[Place, int]) -> dict[Place, GroupFilter]:
    """Returns the filter of each group, from its own actions in the order of the log.

    `acting`: if the beginning of the log was dropped, each (topic, group) with actions, and since when. The broker
    evaluates a changed filter on messages beyond the group's position, so only a change makes the filter of earlier
    messages unknown. After a seek all messages ahead are evaluated again; a group created again has no past.
    """
    filters: dict[Place, GroupFilter] = {}
    deleted: set[Place] = set()
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
