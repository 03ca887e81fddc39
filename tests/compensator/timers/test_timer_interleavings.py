"""Two workers, the compensator's polls, a cancel, an operator and lost timers: all interleavings around one row.

The model has one row and its timer. What the timers' decision says is asked of the compensator's own function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from compensator.work.claim_and_relay import later_ms, unclaimed
from outbox_core.messages.timing_port import TimedRow

ROW: Final = TimedRow("message", "m")
END: Final = 4
"""Time goes on so far."""
ROW_LEASE, TIMER_LEASE = 3, 2
DUE: Final = 1
NOBODY: Final = ""
POLLS: Final = "polls"
WORKERS: Final = ("one", "other")


@dataclass(frozen=True, slots=True)
class Actor:
    """Where a worker, or the polls, is: idle, taken, claimed, sent, or settled in the table."""

    step: str = "idle"
    later: int | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Everything at one moment. `timer` is its time in the store, `taker` whose lease that is; the budgets are what may
    still go wrong.
    """

    now: int = 0
    due: int = DUE
    owner: str = NOBODY
    is_gone: bool = False
    is_withdrawn: bool = False
    timer: int | None = DUE
    taker: str = NOBODY
    actors: tuple[tuple[str, Actor], ...] = tuple((name, Actor()) for name in (*WORKERS, POLLS))
    published: int = 0
    deaths: int = 0
    crashes: int = 1
    flushes: int = 1
    moves: int = 1
    lost: bool = False

    def actor(self, name: str) -> Actor:
        return dict(self.actors)[name]

    def having(self, name: str, actor: Actor, **changes: object) -> World:
        actors = tuple((one, actor if one == name else was) for one, was in self.actors)
        return replace(self, actors=actors, **changes)  # type: ignore[arg-type]


def worker_steps(world: World, name: str) -> Iterator[World]:
    me = world.actor(name)
    match me.step:
        case "idle":
            if world.timer is not None and world.timer <= world.now:
                yield world.having(name, Actor("taken"), timer=world.now + TIMER_LEASE, taker=name)
        case "taken":
            yield claimed_by(world, name, me)
        case "claimed":
            yield world.having(name, replace(me, step="sent"), published=world.published + 1)
        case "sent":
            yield world.having(name, replace(me, step="settled"), is_gone=world.is_gone or world.owner == name)
        case "settled":
            if world.taker != name:  # set or taken by somebody else since then
                yield world.having(name, Actor())
            else:
                timer = None if me.later is None else world.now + me.later
                yield world.having(name, Actor(), timer=timer, taker=NOBODY)


def claimed_by(world: World, name: str, me: Actor) -> World:
    """The compare-and-set of the table, and the decision on a timer whose row was not claimed."""
    is_pending = not world.is_gone and not world.is_withdrawn
    if is_pending and world.due <= world.now:
        return world.having(name, replace(me, step="claimed"), owner=name, due=world.now + ROW_LEASE)
    rest = unclaimed([ROW], claimed=())
    later = later_ms(rest, due_in_us={ROW.id: (world.due - world.now) * 1_000} if is_pending else {})
    return world.having(name, replace(me, step="settled", later=later.get(ROW)))


def poll_steps(world: World) -> Iterator[World]:
    me = world.actor(POLLS)
    match me.step:
        case "idle":
            if not world.is_gone and not world.is_withdrawn and world.due <= world.now:
                yield world.having(POLLS, Actor("claimed"), owner=POLLS, due=world.now + ROW_LEASE)
        case "claimed":
            yield world.having(POLLS, Actor("sent"), published=world.published + 1)
        case "sent":
            yield world.having(POLLS, Actor(), is_gone=world.is_gone or world.owner == POLLS)


def other_steps(world: World) -> Iterator[World]:
    is_pending = not world.is_gone and not world.is_withdrawn
    at_work = [name for name, actor in world.actors if actor.step in {"claimed", "sent"} and world.owner == name]
    if world.now < END and not (at_work and world.due <= world.now + 1):
        yield replace(world, now=world.now + 1)  # who lives settles within the lease
    if is_pending and world.owner == NOBODY:
        yield replace(world, is_withdrawn=True)
        if world.moves:
            for due in (world.now, world.now + 2):  # an operator moves the row, and sets its timer
                yield replace(world, due=due, timer=due, taker=NOBODY, moves=0)
    if world.flushes:
        yield replace(world, timer=None, taker=NOBODY, flushes=0, lost=True)
    if world.lost and is_pending and world.timer is None:
        yield replace(world, timer=world.due, taker=NOBODY, lost=False)  # the rebuild
    if world.crashes:
        for name, actor in world.actors:
            if actor.step != "idle":
                yield world.having(name, Actor(), crashes=0, deaths=world.deaths + 1)


def steps(world: World) -> Iterator[World]:
    for name in WORKERS:
        yield from worker_steps(world, name)
    yield from poll_steps(world)
    yield from other_steps(world)


@lru_cache(maxsize=1)
def reachable() -> frozenset[World]:
    seen, waiting = {World()}, [World()]
    while waiting:
        for after in steps(waiting.pop()):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return frozenset(seen)


def ended(world: World) -> World:
    """What becomes of a world in which every process dies and only the polls go on."""
    while not world.is_gone and not world.is_withdrawn:
        alive = replace(world, now=max(world.now, world.due), actors=World().actors)
        for _ in range(3):
            [alive] = poll_steps(alive)
        world = alive
    return world


def test_a_row_is_sent_once_unless_a_sender_died_and_never_after_it_was_withdrawn() -> None:
    worlds = reachable()

    assert len(worlds) > 10_000, "the model explores little"
    assert any(world.published == 2 for world in worlds), "a death between send and settlement sends twice"
    for world in worlds:
        assert world.published <= 1 + world.deaths, world
        assert not (world.is_withdrawn and world.published), world
        assert not (world.published and world.now < DUE and world.moves), world


def test_every_row_that_was_not_withdrawn_is_sent_whatever_became_of_its_timer() -> None:
    for world in reachable():
        end = ended(world)
        assert end.is_withdrawn or end.published >= 1, world


def test_a_row_that_waits_has_its_timer_unless_the_store_lost_it_or_a_worker_died() -> None:
    """What is precise: as long as nothing broke, no interleaving leaves a waiting row to the polls alone."""
    for world in reachable():
        waits = not world.is_gone and not world.is_withdrawn and world.owner == NOBODY
        if waits and world.flushes and world.crashes:
            assert world.timer is not None, world


def test_a_timer_that_was_lost_comes_back_by_the_rebuild() -> None:
    assert any(world.flushes == 0 and not world.lost and world.timer is not None for world in reachable())
