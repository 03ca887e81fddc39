"""The moves of the timer store in all interleavings: each message is in exactly one place, whoever moves when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.broker_adapter.redis.timers.timer_model import ACKED, ModelGroup, ModelSlot, check

TimerReceipt = tuple[str, int]
Ack = Callable[[ModelSlot, str, str, int], int]


@dataclass(slots=True)
class World:
    """A slot and the receipt that each worker holds."""

    slot: ModelSlot
    group_of: dict[str, str]
    held: dict[str, TimerReceipt | None]
    time_max: int
    deliveries_max: int

    def copy(self) -> World:
        return replace(self, slot=self.slot.copy(), held=dict(self.held))

    def key(self) -> object:
        return (self.slot.key(), tuple(self.held.items()))


def steps(world: World, ack: Ack) -> Iterator[Callable[[World], None]]:
    """What may happen next: any step of a worker, the reaper, the canceler, the operator, and the clock."""
    yield lambda one: one.slot.fire()
    if world.slot.now < world.time_max:
        yield advance
    for group in world.slot.groups:
        yield lambda one, group=group: one.slot.expire(group)
        for dead in world.slot.groups[group].dead:
            yield lambda one, group=group, dead=dead: one.slot.redrive(group, dead)
    yield lambda one: one.slot.cancel("later")
    for worker, held in world.held.items():
        if held is None and world.slot.epoch < world.deliveries_max:
            yield lambda one, worker=worker: take(one, worker)
        if held is not None:
            yield lambda one, worker=worker: settle(one, worker, ack)
            yield lambda one, worker=worker: give_back(one, worker)
            yield lambda one, worker=worker: one.held.update({worker: None})  # it crashes


def advance(world: World) -> None:
    world.slot.now += 1


def take(world: World, worker: str) -> None:
    for one, epoch, _ in world.slot.take(world.group_of[worker], limit=1, invisible=1):
        world.held[worker] = (one, epoch)


def settle(world: World, worker: str, ack: Ack) -> None:
    one, epoch = world.held[worker] or ("", 0)
    group = world.group_of[worker]
    newest = world.slot.groups[group].state.get(one, (0, 0))[0]
    if ack(world.slot, group, one, epoch) == ACKED:
        assert newest == epoch, "a stale receipt settled the delivery of another worker"
    world.held[worker] = None


def give_back(world: World, worker: str) -> None:
    one, epoch = world.held[worker] or ("", 0)
    world.slot.nack(world.group_of[worker], one, epoch, delay=1)
    world.held[worker] = None


def explore(world: World, ack: Ack = ModelSlot.ack) -> int:
    """Check all states that can be reached; how many."""
    world.slot.add(["now"], 0)
    world.slot.add(["later"], 2)
    seen, pending = {world.key()}, [world]
    while pending:
        state = pending.pop()
        check(state.slot)
        for step in steps(state, ack):
            following = state.copy()
            step(following)
            if (key := following.key()) not in seen:
                seen.add(key)
                pending.append(following)
    return len(seen)


def two_workers_of_one_group() -> World:
    slot = ModelSlot({"g": ModelGroup()}, max_attempts=2)
    return World(slot, {"one": "g", "two": "g"}, {"one": None, "two": None}, time_max=4, deliveries_max=5)


@pytest.mark.slow
def test_each_message_is_in_one_place_in_all_interleavings_of_two_workers_and_a_reaper() -> None:
    assert explore(two_workers_of_one_group()) > 1_000


@pytest.mark.slow
def test_each_message_is_in_one_place_for_each_of_two_groups_and_goes_when_both_acknowledged_it() -> None:
    slot = ModelSlot({"g": ModelGroup(), "h": ModelGroup()}, max_attempts=1)

    world = World(slot, {"one": "g", "two": "h"}, {"one": None, "two": None}, time_max=3, deliveries_max=3)

    assert explore(world) > 1_000


def test_without_the_comparison_of_epochs_a_stale_receipt_settles_the_delivery_of_another_worker() -> None:
    def ack_whatever_the_epoch(slot: ModelSlot, group: str, one: str, epoch: int) -> int:
        newest = slot.groups[group].state.get(one, (epoch, 0))[0]
        return slot.ack(group, one, newest)

    with pytest.raises(AssertionError, match="stale receipt"):
        explore(two_workers_of_one_group(), ack_whatever_the_epoch)
