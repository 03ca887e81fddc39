"""Assigns sources evenly to live instances. Pure: instances that read the same rows compute the same assignment.

Leases, time and the database are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox_core.assignment.resource import Resource


def assign(
    sources: Sequence[Resource], *, instances: Mapping[str, str | None], holders: Mapping[str, str]
) -> dict[str, str]:
    """Returns the instance of each source; empty if there is no instance.

    `instances` are the live ones with their zones; `holders`: source -> its present holder. Sources of a zone go to its
    instances if it has any, else, like those without a zone, to any. Loads differ by at most one among the instances
    that may serve a source. As few sources as possible move: a holder keeps its sources, up to a fair share.
    """
    if not instances:
        return {}
    loads = dict.fromkeys(sorted(instances), 0)
    shared: dict[str, str] = {}
    for zone, names in _by_zone(sources, instances):
        eligible = {one: load for one, load in loads.items() if zone is None or instances[one] == zone}
        part = _balance(names, loads=eligible, holders=holders)
        for instance in part.values():
            loads[instance] += 1
        shared |= part
    return shared


def _by_zone(sources: Sequence[Resource], instances: Mapping[str, str | None]) -> list[tuple[str | None, list[str]]]:
    """Group names by the zone that binds them, zones first: sources that may go anywhere then level the loads."""
    populated = set(instances.values()) - {None}
    bound: dict[str, list[str]] = {}
    free: list[str] = []
    for source in sorted(set(sources), key=lambda one: one.name):
        if source.zone is not None and source.zone in populated:
            bound.setdefault(source.zone, []).append(source.name)
        else:
            free.append(source.name)
    return [*sorted(bound.items()), (None, free)]


def _balance(names: Sequence[str], *, loads: Mapping[str, int], holders: Mapping[str, str]) -> dict[str, str]:
    """Assign one group; `loads`: the instances that may serve it -> how many sources each already has."""
    held: dict[str, list[str]] = {one: [] for one in loads}
    loose: list[str] = []
    for name in names:
        held.get(holders.get(name, ""), loose).append(name)
    quotas = _quotas(len(names), loads=loads, held={one: len(some) for one, some in held.items()})
    shared: dict[str, str] = {}
    for one, some in held.items():
        shared |= dict.fromkeys(some[: quotas[one]], one)
        loose += some[quotas[one] :]
    room = (one for one in loads for _ in range(quotas[one] - min(quotas[one], len(held[one]))))
    return shared | dict(zip(sorted(loose), room, strict=True))


def _quotas(count: int, *, loads: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """How many each instance gets, so that loads become level; the remainder goes to those that hold most."""
    level = _level(count, loads=loads)
    quotas = {one: max(0, level - load) for one, load in loads.items()}
    rest = count - sum(quotas.values())
    lowest = [one for one, load in loads.items() if load <= level]
    for one in sorted(lowest, key=lambda one: (held[one] <= quotas[one], one))[:rest]:
        quotas[one] += 1
    return quotas


def _level(count: int, *, loads: Mapping[str, int]) -> int:
    """The highest level to which `count` more sources can raise all loads."""
    low, high = min(loads.values()), min(loads.values()) + count
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(0, middle - load) for load in loads.values()) <= count:
            low = middle
        else:
            high = middle - 1
    return low
