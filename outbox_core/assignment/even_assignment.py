"""Assigns resources evenly to live members. Pure: members that read the same records compute the same assignment.

A resource is a source of rows, a shard or a slot; a member is described by its registration.

Leases, time, databases and ZooKeeper are elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import ConfigurationError

RESOURCE_NAME_CHARS_MAX: Final = 255
ZONE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Resource:
    """A name that is the same for every member, the zone whose members should have it, if any, and its priority.

    Those of a higher priority are assigned first. Raises ConfigurationError for what a registry cannot hold.
    """

    name: str
    zone: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_word(self.name, "a resource's name", chars_max=RESOURCE_NAME_CHARS_MAX)
        check_zone(self.zone)


def check_zone(zone: str | None) -> None:
    """Raise ConfigurationError for a zone that a registry cannot hold."""
    if zone is not None:
        check_word(zone, "a zone", chars_max=ZONE_CHARS_MAX)


def check_word(word: str, what: str, *, chars_max: int) -> None:
    """Raise ConfigurationError if a word is empty, too long or not printable ASCII."""
    if not 0 < len(word) <= chars_max or not word.isascii() or not word.isprintable():
        raise ConfigurationError(f"{what} is 1 to {chars_max} printable ASCII characters, not {word[:80]!r}")


@dataclass(frozen=True, slots=True)
class Member:
    """The zone in which a member runs, and how many resources it can have at most; None: no zone, no limit."""

    zone: str | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        check_zone(self.zone)
        if self.capacity is not None and self.capacity < 0:
            raise ConfigurationError(f"a member's capacity is 0 or more, not {self.capacity}")

    def limit(self, unlimited: int) -> int:
        """Returns the capacity, or `unlimited` where it has none."""
        return unlimited if self.capacity is None else self.capacity


def assign(
    resources: Sequence[Resource], *, members: Mapping[str, Member], holders: Mapping[str, str]
) -> dict[str, str]:
    """Returns the member of each resource; one that no member has room for is missing.

    `members` are the live ones; `holders`: resource -> its present holder. The rules, each within those before it:

    1. Resources of a zone go to its members if it has any, else, like those without a zone, to any member.
    2. No member gets more than its capacity; the resources of the lowest priority remain without one.
    3. The loads of the members that may have a resource differ by at most one, unless one is at its capacity. That
       holds for the resources of the highest priority, for those of the two highest, and so on.
    4. As few resources as possible move: a holder keeps its resources, up to a fair share.
    5. What cannot be divided is spread over the zones of the members.

    Moves come before zones: a move pauses a shard, and a remainder in one zone costs nothing until that zone fails.
    """
    loads = dict.fromkeys(sorted(members), 0)
    assigned: dict[str, str] = {}
    for zone, names in _groups(resources, members) if members else ():
        eligible = {
            member_id: load for member_id, load in loads.items() if zone is None or members[member_id].zone == zone
        }
        assigned_part = _balance(names, loads=eligible, members=members, holders=holders)
        for member_id in assigned_part.values():
            loads[member_id] += 1
        assigned |= assigned_part
    return assigned


def _groups(resources: Sequence[Resource], members: Mapping[str, Member]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield names by priority and by the zone that binds them, zones first: what may go anywhere then levels loads."""
    populated = {member.zone for member in members.values()} - {None}
    groups: dict[tuple[int, bool, str], list[str]] = {}
    for resource in sorted(set(resources), key=lambda resource: resource.name):
        zone = resource.zone if resource.zone in populated else None
        groups.setdefault((-resource.priority, zone is None, zone or ""), []).append(resource.name)
    for (_, is_free, zone), names in sorted(groups.items()):
        yield None if is_free else zone, names


def _balance(
    names: Sequence[str], *, loads: Mapping[str, int], members: Mapping[str, Member], holders: Mapping[str, str]
) -> dict[str, str]:
    """Assign one group; `loads`: the members that may have it -> how many resources each already has."""
    held: dict[str, list[str]] = {member_id: [] for member_id in loads}
    loose: list[str] = []
    for name in names:
        held.get(holders.get(name, ""), loose).append(name)
    quotas = _quotas(
        len(names),
        loads=loads,
        members=members,
        held={member_id: len(held_names) for member_id, held_names in held.items()},
    )
    assigned: dict[str, str] = {}
    for member_id, held_names in held.items():
        assigned |= dict.fromkeys(held_names[: quotas[member_id]], member_id)
        loose += held_names[quotas[member_id] :]
    room = (
        member_id
        for member_id in loads
        for _ in range(quotas[member_id] - min(quotas[member_id], len(held[member_id])))
    )
    return assigned | dict(zip(sorted(loose), room, strict=False))


def _quotas(
    count: int, *, loads: Mapping[str, int], members: Mapping[str, Member], held: Mapping[str, int]
) -> dict[str, int]:
    """How many each member gets, so that loads become level.

    The remainder goes to those that hold more than the level, then to the zones that have the fewest above it.
    """
    limits = {member_id: members[member_id].limit(load + count) for member_id, load in loads.items()}
    level = _level(count, loads=loads, limits=limits)
    quotas = {member_id: max(0, min(level, limits[member_id]) - load) for member_id, load in loads.items()}
    open_to_more = {member_id for member_id, load in loads.items() if load <= level < limits[member_id]}
    above = Counter(members[member_id].zone for member_id, load in loads.items() if load > level)
    for _ in range(min(count - sum(quotas.values()), len(open_to_more))):
        chosen_id = min(
            open_to_more,
            key=lambda member_id: (held[member_id] <= quotas[member_id], above[members[member_id].zone], member_id),
        )
        open_to_more.remove(chosen_id)
        above[members[chosen_id].zone] += 1
        quotas[chosen_id] += 1
    return quotas


def _level(count: int, *, loads: Mapping[str, int], limits: Mapping[str, int]) -> int:
    """The highest level to which `count` more resources can raise all loads, each up to its limit."""
    low, high = min(loads.values()), max(loads.values()) + count
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(0, min(middle, limits[member_id]) - load) for member_id, load in loads.items()) <= count:
            low = middle
        else:
            high = middle - 1
    return low
