"""An action of which both copies are damaged costs no message: what it may have delivered comes again, to whoever it
was for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.messages.message import Delivery, GroupConfig, Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.action_log import action_segments, damage_action, stored_actions

TOPIC = "orders"
DAY_MS = 86_400_000
GROUPS = {
    "plain": GroupConfig(backoff_initial_ms=1, backoff_max_ms=1),
    "picky": GroupConfig(filter="size = 'large'", backoff_initial_ms=1, backoff_max_ms=1),
    "ordered": GroupConfig(ordered=True, backoff_initial_ms=1, backoff_max_ms=1),
}
type_of_open = Callable[..., Engine]


def messages(count: int) -> list[Message]:
    return [
        Message(
            id=f"m{number}", topic=TOPIC, body=b"x", key=f"k{number % 5}",
            headers={"size": "large" if number % 3 == 0 else "small"},
        )
        for number in range(count)
    ]  # fmt: skip


def drained(engine: Engine, group: str, clock: ManualClock) -> set[str]:
    """All that a group still gets, dead letters among it, after all invisible times have run out."""
    clock.advance(DAY_MS)
    found: set[str] = set()
    for _ in range(100):
        if not (taken := engine.puller.pull(TOPIC, group, max_messages=1_000)):
            break
        engine.settler.ack([one.receipt for one in taken])
        found |= {one.id for one in taken}
    return found | {one.id for one in engine.admin.dead(TOPIC, group, limit=1_000)[0]}


def some_hours(engine: Engine, clock: ManualClock, random: Random) -> dict[str, set[str]]:
    """Consumers of all groups at work; returns what each group has acknowledged."""
    acked: dict[str, set[str]] = {group: set() for group in GROUPS}
    held: list[tuple[str, Delivery]] = []
    batch = messages(60)
    for group, config in GROUPS.items():
        engine.admin.declare_group(TOPIC, group, config)
    for step in range(30):
        if step % 6 == 0:
            engine.publisher.publish(batch[step * 2 : step * 2 + 12])
        group = random.choice(list(GROUPS))
        held += [(group, one) for one in engine.puller.pull(TOPIC, group, max_messages=random.randint(1, 6))]
        random.shuffle(held)
        for name, one in held[:4]:
            match random.randrange(3):
                case 0:
                    if engine.settler.ack([one.receipt]) == ["acked"]:
                        acked[name].add(one.id)
                case 1:
                    engine.settler.nack([one.receipt], delay_ms=random.choice([0, 5]), reason="no stock")
                case _:
                    continue  # its consumer has died
        del held[:4]
        clock.advance(random.choice([0, 1, 40_000]))
    return acked


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_whatever_action_is_damaged_every_group_gets_all_that_it_has_not_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    options, clock = EngineOptions(durability=Durability.OS, reserve_bytes=4096), ManualClock()
    engine = Engine.open(tmp_path / "whole", clock=clock, options=options)
    acked = some_hours(engine, clock, Random(seed))
    engine.close()
    [log] = action_segments(tmp_path / "whole")
    wanted = {group: {one.id for one in messages(60)} - acked[group] for group in GROUPS}
    wanted["picky"] = {one.id for one in messages(60) if one.headers["size"] == "large"} - acked["picky"]

    for stored in stored_actions(log):
        action = stored.action
        if isinstance(action, journal.Declared | journal.Opened):
            continue
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        damage_action(copy / "actions" / log.name, stored)
        engine = Engine.open(copy, clock=clock, options=options)
        try:
            for group in GROUPS:
                found = drained(engine, group, clock)
                assert wanted[group] <= found, (action, group, sorted(wanted[group] - found))
                if group == "picky":
                    assert all(int(one[1:]) % 3 == 0 for one in found), (action, found)
        finally:
            engine.close()
            shutil.rmtree(copy)


def test_what_comes_again_is_told_and_comes_once_again_after_another_restart(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    engine.publisher.publish(messages(30))
    for _ in range(3):
        engine.puller.pull(TOPIC, "plain", max_messages=10)
    [log] = action_segments(folder)
    damage_action(log, [stored for stored in stored_actions(log) if isinstance(stored.action, journal.Handed)][1])

    for _ in range(2):
        engine = open_engine()
        assert engine.admin.group_figures(TOPIC, "plain")["backlog"] == 10
        assert [record.messages_again for record in caplog.records if event_name(record) == "lost_action"] == [10]  # type: ignore[attr-defined]
        caplog.clear()
    again = engine.puller.pull(TOPIC, "plain", max_messages=100)

    assert [one.id for one in again] == [f"m{number}" for number in range(10, 20)]
    engine.settler.ack([one.receipt for one in again])
    engine = open_engine()
    assert engine.admin.group_figures(TOPIC, "plain")["backlog"] == 0
