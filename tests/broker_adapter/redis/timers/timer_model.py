"""A plain model of one slot of the timer store: the same moves on dicts with a logical clock, and what always holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

ACKED, ALREADY_ACKED, STALE, UNKNOWN = 1, 2, 3, 0
REQUEUED, DEAD = 1, 2
CANCELED, TOO_LATE = 1, 2
NO_EPOCH: Final = 0
Score = tuple[int, int]
"""A time, and a number for those of one call that keep its order."""


@dataclass(slots=True)
class ModelGroup:
    """A consumer group's places, and what it acknowledged so far."""

    position: int = 0
    retry: dict[str, Score] = field(default_factory=dict)
    prepare: dict[str, Score] = field(default_factory=dict)
    dead: dict[str, Score] = field(default_factory=dict)
    state: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Id to epoch and attempts."""
    acked: set[str] = field(default_factory=set)
    fresh_next: bool = False
    together: dict[str, int] = field(default_factory=dict)
    """How many were in the newest delivery of an id."""
    counts: dict[str, bool] = field(default_factory=dict)
    """Whether a deadline that passes is an attempt."""
    suspects: dict[str, int] = field(default_factory=dict)
    """How many were in the delivery of an id whose deadline passed last, 1 where that was an attempt of it alone; it is
    not among these once it was tried since."""

    def is_suspected(self, one: str) -> bool:
        return self.suspects.get(one, 0) > 1


@dataclass(slots=True)
class ModelSlot:
    """All groups begin with the earliest message."""

    groups: dict[str, ModelGroup]
    max_attempts: int
    now: int = 1
    offset: int = 0
    epoch: int = NO_EPOCH
    store: dict[str, Score] = field(default_factory=dict)
    log: dict[str, int] = field(default_factory=dict)
    body: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    canceled: set[str] = field(default_factory=set)

    def add(self, ids: Sequence[str], due: int) -> list[int]:
        """See add.lua; `due` 0 is now."""
        results = []
        is_behind = any(score <= (self.now, 0) for score in self.store.values())
        for number, one in enumerate(ids):
            results.append(int(one not in self.added))
            if one in self.added:
                continue
            self.added.add(one)
            if one in self.canceled:
                continue
            self.body.add(one)
            if due > self.now or is_behind:
                self.store[one] = (due or self.now, number)
            else:
                self._append(one)
        return results

    def fire(self) -> None:
        """See fire.lua."""
        for one in _due(self.store, self.now):
            del self.store[one]
            self._append(one)

    def take(self, group: str, *, limit: int, invisible: int, begins: bool = False) -> list[tuple[str, int, int]]:
        """See take.lua: id, epoch and attempt of each."""
        of = self.groups[group]
        again = _due(of.retry, self.now)[:limit]
        new = [one for one, offset in self.log.items() if offset > of.position][:limit]
        both_wait, again_share, taken = bool(again and new), max(1, limit // 2), list[str]()
        are_suspected = not begins and bool(again) and of.is_suspected(again[0])
        if not begins:
            again = _isolated(of, again)
        if are_suspected and both_wait:
            again, new, again_share = ([], new, again_share) if of.fresh_next else (again, [], limit)
        retried, turn = 0, of.fresh_next
        while len(taken) < limit and (new or retried < len(again)):
            is_fresh = bool(new) and (turn or retried == len(again) or retried >= again_share)
            taken.append(new.pop(0) if is_fresh else again[retried])
            retried += not is_fresh
            turn = not is_fresh
        if both_wait:
            of.fresh_next = not of.fresh_next if are_suspected else turn
        again, new = again[:retried], [one for one in taken if one not in again[:retried]]
        self.epoch += bool(taken)
        for one in again:
            del of.retry[one]
        for one in new:
            of.position = self.log[one]
        for one in taken:
            attempts = of.state.get(one, (NO_EPOCH, 0))[1] + 1
            of.state[one] = (self.epoch, attempts)
            of.prepare[one] = (self.now + invisible, 0)
            of.together[one] = len(taken)
            of.counts[one] = len(taken) == 1 and not begins
        return [(one, *of.state[one]) for one in taken]

    def ack(self, group: str, one: str, epoch: int) -> int:
        """See ack.lua."""
        of = self.groups[group]
        if one not in of.state:
            if one in self.log:
                return ALREADY_ACKED if self.log[one] <= of.position else STALE
            return ALREADY_ACKED if one in self.added else UNKNOWN
        if of.state[one][0] != epoch or not (one in of.prepare or one in of.retry):
            return STALE
        of.prepare.pop(one, None)
        of.retry.pop(one, None)
        del of.state[one]
        of.suspects.pop(one, None)
        of.acked.add(one)
        if all(one in each.acked for each in self.groups.values()):
            del self.log[one]
            self.body.remove(one)
        return ACKED

    def nack(self, group: str, one: str, epoch: int, *, delay: int, counts: bool = True) -> int:
        """See nack.lua."""
        of = self.groups[group]
        if one not in of.prepare or of.state[one][0] != epoch:
            return STALE
        attempts = of.state[one][1]
        of.state[one] = (NO_EPOCH, attempts if counts else attempts - 1)
        if counts:
            of.suspects.pop(one, None)
        del of.prepare[one]
        if counts and attempts >= self.max_attempts:
            of.dead[one] = (self.now, len(of.dead))
            return DEAD
        of.retry[one] = (self.now + delay, 0)
        return REQUEUED

    def expire(self, group: str) -> None:
        """See expire.lua."""
        of = self.groups[group]
        for one in _due(of.prepare, self.now):
            deadline = of.prepare.pop(one)
            epoch, attempts = of.state[one]
            of.suspects[one] = 1 if of.counts[one] else of.together[one]
            if not of.counts[one]:
                of.state[one] = (epoch, attempts - 1)
                of.retry[one] = deadline
            elif attempts >= self.max_attempts:
                of.state[one] = (NO_EPOCH, attempts)
                of.dead[one] = (self.now, len(of.dead))
            else:
                of.state[one] = (epoch, attempts)
                of.retry[one] = deadline

    def extend(self, group: str, one: str, epoch: int, *, invisible: int, begun: bool = False) -> int:
        """See extend.lua."""
        of = self.groups[group]
        if one not in of.prepare or of.state[one][0] != epoch:
            return STALE
        of.prepare[one] = (self.now + invisible, 0)
        of.counts[one] = of.counts[one] or begun
        return 1

    def cancel(self, one: str) -> int:
        """See cancel.lua."""
        if one in self.store:
            del self.store[one]
            self.body.remove(one)
            self.canceled.add(one)
            return CANCELED
        if one in self.canceled:
            return CANCELED if one in self.added else UNKNOWN
        if one in self.added:
            return TOO_LATE
        self.canceled.add(one)
        return UNKNOWN

    def redrive(self, group: str, one: str) -> int:
        """See redrive.lua."""
        of = self.groups[group]
        if one not in of.dead:
            return 0
        del of.dead[one]
        of.suspects.pop(one, None)
        of.state[one] = (NO_EPOCH, 0)
        of.retry[one] = (self.now, 1)
        return 1

    def copy(self) -> ModelSlot:
        """Another one in the same state."""
        groups = {
            name: ModelGroup(
                of.position,
                dict(of.retry),
                dict(of.prepare),
                dict(of.dead),
                dict(of.state),
                set(of.acked),
                of.fresh_next,
                dict(of.together),
                dict(of.counts),
                dict(of.suspects),
            )
            for name, of in self.groups.items()
        }
        return replace(
            self,
            groups=groups,
            store=dict(self.store),
            log=dict(self.log),
            body=set(self.body),
            added=set(self.added),
            canceled=set(self.canceled),
        )

    def key(self) -> object:
        """Equal for equal states."""
        groups = tuple(
            (name, of.position, _frozen(of.retry), _frozen(of.prepare), frozenset(of.dead), _frozen(of.state),
             frozenset(of.acked))
            for name, of in self.groups.items()
        )  # fmt: skip
        return (
            self.now, self.epoch, groups, _frozen(self.store), _frozen(self.log), frozenset(self.body),
            frozenset(self.added), frozenset(self.canceled),
        )  # fmt: skip

    def _append(self, one: str) -> None:
        self.offset += 1
        self.log[one] = self.offset


def check(slot: ModelSlot) -> None:
    """Raise AssertionError unless each message is in exactly one place for each group, and has a body while it must."""
    places_of = {name: places(slot, of) for name, of in slot.groups.items()}
    for one in slot.added:
        wanted = one not in slot.canceled and any(one not in of.acked for of in slot.groups.values())
        assert (one in slot.body) == wanted, f"{one}: body {one in slot.body}, wanted {wanted}"
        for name, of in slot.groups.items():
            count = sum(one in place for place in places_of[name])
            is_settled = one in of.acked or one in slot.canceled
            assert count == (0 if is_settled else 1), f"{one} is in {count} places of {name}"
    assert set(slot.log).isdisjoint(slot.store)


def places(slot: ModelSlot, of: ModelGroup) -> list[set[str]]:
    """The sets of ids that a group's messages lie in."""
    ahead = {one for one, offset in slot.log.items() if offset > of.position}
    return [set(slot.store), ahead, set(of.retry), set(of.prepare), set(of.dead)]


def _isolated(group: ModelGroup, again: Sequence[str]) -> list[str]:
    """Those before the first suspected one, or half of a suspected delivery."""
    if not again or not group.is_suspected(again[0]):
        return list(takewhile(lambda one: not group.is_suspected(one), again))
    isolated: list[str] = []
    for one in takewhile(group.is_suspected, again):
        if len(isolated) >= min(group.suspects[each] // 2 for each in (*isolated, one)):
            break
        isolated.append(one)
    return isolated


def _due(scores: Mapping[str, Score], now: int) -> list[str]:
    return sorted((one for one, score in scores.items() if score[0] <= now), key=lambda one: (scores[one], one))


def _frozen(mapping: Mapping[str, object]) -> frozenset[tuple[str, object]]:
    return frozenset(mapping.items())
