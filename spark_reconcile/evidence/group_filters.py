"""Which filter a group has, and since when it is the only one that can have been asked. Pure; evaluates no filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

Event = tuple[str, str, str, int | None, int, int, str | None]
"""A group's own action: kind, topic, group, sequence, position in the log, at_ms, filter."""
Place = tuple[str, str]
"""A topic and a group."""
UNKNOWN_MS: Final = -1


class GroupFilter(NamedTuple):
    """`text`: the filter, empty where the group takes every message. `since_ms`: the broker has asked no other about
    messages that are placed later; 0: about no message at all, UNKNOWN_MS: the log does not tell.
    """

    text: str
    since_ms: int


_UNKNOWN: Final = GroupFilter("", UNKNOWN_MS)


def filters_in_force(events: Iterable[Event], *, acting: Mapping[Place, int]) -> dict[Place, GroupFilter]:
    """The filter of each group, from its own actions in the order of the log.

    `acting`: where the log has lost its beginning, each (topic, group) that did anything, and since when. The broker
    asks a changed filter about what the group has not passed, so only a change ends what is known of messages placed
    before. A seek has everything asked again that is the group's; a group that is made again has no past.
    """
    found: dict[Place, GroupFilter] = {}
    deleted: set[Place] = set()
    for kind, topic, group, _, _, at_ms, text in events:
        place = (topic, group)
        known = found.get(place)
        match kind:
            case "declared":
                is_made = place in deleted or (known is None and at_ms <= acting.get(place, at_ms))
                found[place] = _declared(known, text or "", at_ms=at_ms, is_made=is_made)
                deleted.discard(place)
            case "deleted":
                found[place] = GroupFilter("", 0)
                deleted.add(place)
            case "sought" if known is not None and known.since_ms != UNKNOWN_MS:
                found[place] = known._replace(since_ms=0)
            case _:
                found.setdefault(place, _UNKNOWN)
    return {**dict.fromkeys(acting, _UNKNOWN), **found}


def _declared(known: GroupFilter | None, text: str, *, at_ms: int, is_made: bool) -> GroupFilter:
    if is_made:
        return GroupFilter(text, 0)
    if known is not None and known.since_ms != UNKNOWN_MS and known.text == text:
        return known
    return GroupFilter(text, at_ms)
