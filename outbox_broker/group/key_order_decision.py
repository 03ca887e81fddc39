"""Decides how messages that were read are filed in their group's key order. Pure: the pull applies the decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outbox_broker.group.consumer_group import Group
from outbox_broker.group.key_order import NOT_FILED, UNKEYED, KeyOrder, key_hash
from outbox_core.messages.message import Record


@dataclass(slots=True)
class OrderFiling:
    """`runs`: hashes of keys, from a sequence on. `position`: after the last fresh message that was scanned."""

    position: int
    runs: list[tuple[int, list[int]]] = field(default_factory=list)
    backlog_scan_end: int = 0
    filtered: int = 0
    ready: int = 0
    """The number of messages that may be delivered now."""
    is_enough: bool = False
    scanned: int = 0
    unordered: frozenset[int] = frozenset()
    """Fresh messages of a group that is no longer ordered: they are not filed, and may be delivered."""

    def add(self, sequence: int, key: int) -> None:
        """Append the hash of a message's key."""
        if self.runs and self.runs[-1][0] + len(self.runs[-1][1]) == sequence:
            self.runs[-1][1].append(key)
        elif key != NOT_FILED:
            self.runs.append((sequence, [key]))


def decide_filing(
    group: Group, order: KeyOrder, records: Mapping[int, Record | None], *, count_max: int
) -> OrderFiling:
    """File messages of backlogs that were reached, then fresh ones, until `count_max` are ready. Changes nothing."""
    filing = OrderFiling(group.position)
    filing.ready = sum(may_deliver(group, order, sequence) for sequence in records)
    backlog = sorted(entry for entry in records.items() if _is_in_backlog(group, order, entry[0]))
    _file_backlog(filing, order, backlog)
    fresh = sorted(entry for entry in records.items() if entry[0] >= group.position)
    filing.scanned = len(fresh)
    if group.config.ordered:
        _file_fresh(filing, group, order, fresh, count_max=count_max)
    else:
        filing.unordered = frozenset(sequence for sequence, _ in fresh)
    filing.is_enough = filing.ready >= count_max
    return filing


def may_deliver(group: Group, order: KeyOrder, sequence: int) -> bool:
    """Returns whether the key order lets a message that was read be delivered."""
    return order.is_ready(sequence) or group.unsettled.find(sequence) is not None


def _is_in_backlog(group: Group, order: KeyOrder, sequence: int) -> bool:
    return sequence < group.position and not may_deliver(group, order, sequence)


def _file_backlog(filing: OrderFiling, order: KeyOrder, records: Iterable[tuple[int, Record | None]]) -> None:
    taken: Counter[int] = Counter()
    for sequence, record in records:
        filing.backlog_scan_end = sequence + 1
        if record is None:  # its key is lost: it blocks no other message, and becomes a dead letter
            key = NOT_FILED if order.knows(sequence) else UNKEYED
        else:
            key = key_hash(record.key)
            if order.room(key, sequence) <= taken[key]:
                key = NOT_FILED
        filing.add(sequence, key)
        filing.ready += key == UNKEYED or (key != NOT_FILED and order.has_reached_backlog(key) and not taken[key])
        taken[key] += 1


def _file_fresh(
    filing: OrderFiling,
    group: Group,
    order: KeyOrder,
    records: Iterable[tuple[int, Record | None]],
    *,
    count_max: int,
) -> None:
    seen: set[int] = set()
    for sequence, record in records:
        if filing.ready >= count_max:
            return
        filing.position = sequence + 1
        if record is not None and group.accepts is not None and not group.accepts(record.headers):
            filing.filtered += 1
            filing.add(sequence, NOT_FILED)
            continue
        key = UNKEYED if record is None else key_hash(record.key)
        filing.add(sequence, key)
        filing.ready += key == UNKEYED or not (key in seen or order.is_busy(key))
        seen.add(key)
