"""Whenever its process is killed or the power fails: what was answered holds, and nothing is invented."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.ids import edited_id
from outbox_core.messages.message import Delivery
from tests.fixtures.fork_server import fork_server
from tests.outbox_broker.killed_engine import (
    DAY_MS,
    GROUP,
    REDRIVEN,
    RESERVE_BYTES,
    START_MS,
    TOPIC,
    arriving_run,
    cleaning_run,
    copy_at_each_call,
    dead_letter_run,
    edit_run,
    edited,
    message,
    redrive_run,
    rolling_run,
    scheduling_run,
    short_run,
    type_of_run,
)
from tests.outbox_broker.message_log import message_segments

ROOT = Path(__file__).parents[2]


class Told:
    """What a killed process had asked for and been answered."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.asked: defaultdict[str, set[str]] = defaultdict(set)
        self.answered: defaultdict[str, set[str]] = defaultdict(set)
        self.due_ms: dict[str, int] = {}
        self.edits: dict[str, list[str]] = {}
        """What was asked to be edited, by the operation."""
        self.now_ms = START_MS
        self.dead_then: set[str] = set()
        """What was dead when all that was ready had been delivered after the death."""
        self.segments = 0
        """How many files of the message log the death left behind."""
        for line in lines:
            self.now_ms = line.get("now_ms", self.now_ms)
            for what in ("asked", "answered"):
                getattr(self, what)[line.get(what, "")].update(line.get("ids", ()))
            if "operation" in line:
                self.edits[line["operation"]] = line["ids"]
            if line.get("due_ms"):
                self.due_ms.update(dict.fromkeys(line["ids"], line["due_ms"]))

    def must_come(self) -> set[str]:
        """What was stored, or became of it, and nobody even asked to have it settled, canceled, discarded or edited."""
        ends = ("ack", "cancel", "discard", "edit")
        return (self.answered["publish"] | self.edited()).difference(*(self.asked[end] for end in ends))

    def must_not_come(self) -> set[str]:
        """What was said to be acknowledged, canceled or discarded; and what was to be edited, which was repeated."""
        return self.answered["ack"] | self.answered["cancel"] | self.answered["discard"] | self.asked["edit"]

    def edited(self) -> set[str]:
        """What becomes of all that was asked to be edited."""
        return {edited_id(name, TOPIC, GROUP, one) for name, ids in self.edits.items() for one in ids}


def drained(engine: Engine) -> list[Delivery]:
    """All that is ready, settled."""
    found: list[Delivery] = []
    while deliveries := engine.puller.pull(TOPIC, GROUP, max_messages=1_000):
        assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)
        found += deliveries
    return found


def check_recovered(folder: Path, told: Told, *, knows_all: bool = True) -> set[str]:
    """Open what the killed process left behind, and hold it against what it told; returns what is dead then.

    `knows_all`: retention dropped nothing, with which a restart forgets which ids there were.
    """
    clock = ManualClock(told.now_ms)
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES, durability=Durability.OS)
    engine = Engine.open(folder, clock=clock, options=options)
    try:
        answered = sorted(told.answered["publish"])
        if knows_all:
            again = engine.publisher.publish([message(one, deliver_at_ms=told.due_ms.get(one)) for one in answered])
            assert [one.status for one in again] == ["duplicate"] * len(answered)

        for operation, ids in told.edits.items():
            edited(engine, operation, ids)  # whoever had no answer repeats what he asked for

        came: list[str] = []
        for passing_ms in (0, 1_000, 10_000, 700 * DAY_MS):
            clock.advance(passing_ms)
            for delivery in drained(engine):
                assert delivery.body == message(delivery.id).body or delivery.id in told.edited()
                assert (delivery.deliver_at_ms or 0) <= clock.now_ms(), "early"
                came.append(delivery.id)
        dead = {one.id for one in engine.admin.dead(TOPIC, GROUP)[0]}

        assert len(came) == len(set(came))
        assert told.must_come() - set(came) - dead == set(), "lost"
        assert (set(came) | dead) & told.must_not_come() == set(), "came back"
        assert (set(came) | dead) - told.asked["publish"] - told.edited() == set(), "invented"
        assert engine.admin.topic_figures(TOPIC)["scheduled"] == 0
        return dead
    finally:
        engine.close()


def killed_at_each_call(folder: Path, way: str, run: type_of_run, *, knows_all: bool = True) -> dict[int, Told]:
    """Hold what a death at each storage call of a run leaves behind against what it had told."""
    copy_at_each_call(run, folder, way=way)
    told = {int(path.stem): told_in(path.read_bytes()) for path in folder.glob("*.told")}
    for number, one in sorted(told.items()):
        print(f"call {number}")
        # What opens the folder lets years pass, and its retention drops files whenever its thread comes to it.
        one.segments = len(message_segments(folder / str(number)))
        one.dead_then = check_recovered(folder / str(number), one, knows_all=knows_all)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-schedule"])
def test_whatever_call_is_the_last_while_a_schedule_moves_each_message_comes_once_unless_canceled(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, scheduling_run)

    assert len(told) > 100
    assert {"publish", "ack", "cancel", "pull"} <= {what for what, ids in told[max(told)].answered.items() if ids}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-schedule"])
def test_whatever_call_is_the_last_what_waits_outlives_the_segments_in_which_it_arrived(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, arriving_run, knows_all=False)

    whole = told[max(told)]
    assert len(told) > 100
    assert {"publish", "ack", "cancel", "pull", "drop"} <= {what for what, ids in whole.answered.items() if ids}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions", "power-schedule"])
def test_whatever_storage_call_is_the_last_what_was_answered_holds(tmp_path: Path, way: str) -> None:
    told = killed_at_each_call(tmp_path, way, short_run)

    whole = told[max(told)]
    assert len(told) > 40
    assert {"publish", "ack", "cancel", "die", "pull"} <= {what for what, ids in whole.answered.items() if ids}
    assert whole.segments > 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages"])
def test_whatever_storage_call_is_the_last_while_the_logs_roll_what_was_answered_holds(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, rolling_run)

    assert len(told) > 100
    whole = told[max(told)]
    assert {"publish", "ack", "pull"} <= {what for what, ids in whole.answered.items() if ids}
    assert whole.segments > 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions"])
def test_whatever_storage_call_is_the_last_what_was_discarded_stays_so_and_nothing_else_goes(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, dead_letter_run)

    assert len(told) > 20
    assert len(told[max(told)].answered["discard"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions"])
def test_whatever_storage_call_is_the_last_an_edit_that_is_repeated_makes_one_message_of_each_dead_letter(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, edit_run)

    whole = told[max(told)]
    assert len(told) > 20
    assert len(whole.answered["edit"]) == len(whole.edited()) == 5
    assert any(one.asked["edit"] and not one.answered["edit"] for one in told.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions"])
def test_whatever_storage_call_is_the_last_what_was_wanted_of_an_old_segment_is_there(tmp_path: Path, way: str) -> None:
    told = killed_at_each_call(tmp_path, way, cleaning_run, knows_all=False)

    moved = [int(one) for one in told[max(told)].answered["clean"]]
    assert len(told) > 80
    assert max(moved) > 8, "some of it twice"
    assert len(told[max(told)].answered["die"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-actions"])
def test_whatever_storage_call_is_the_last_a_redrive_was_stopped_for_all_that_waited_or_for_none(
    tmp_path: Path, way: str
) -> None:
    told = killed_at_each_call(tmp_path, way, redrive_run)

    waiting = set(REDRIVEN[4:])
    assert len(told) > 15
    assert [one.dead_then & waiting for one in told.values() if one.answered["stop"]].count(waiting) > 1
    assert all(one.dead_then & waiting in (waiting, set()) for one in told.values())
    assert all(one.dead_then & waiting == waiting for one in told.values() if one.answered["stop"])
    assert any(one.asked["stop"] and not one.answered["stop"] for one in told.values())


def test_a_busy_broker_that_is_killed_again_and_again_keeps_what_it_answered(tmp_path: Path, random_seed: int) -> None:
    random = Random(random_seed)
    lines = b""
    for number in range(3):
        process = fork_server().start(
            "tests.outbox_broker.killed_engine", str(tmp_path / "data"), f"r{number}",
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        with closing(process):
            assert process.stdout is not None
            for _ in range(random.randint(100, 1_500)):
                lines += process.stdout.readline()
            process.kill()
            lines += process.stdout.read()
        assert process.returncode == -9
    told = told_in(lines)
    assert told.answered["ack"]

    engine = Engine.open(tmp_path / "data")
    try:
        stored = [one for deliveries in pulls(engine, "audit") for one in deliveries]
        figures = engine.admin.group_figures(TOPIC, GROUP)
    finally:
        engine.close()

    ids = [one.id for one in stored]
    assert len(ids) == len(set(ids))
    assert told.answered["publish"] - set(ids) == set(), "lost"
    assert set(ids) - told.asked["publish"] == set(), "invented"
    assert all(one.body == message(one.id).body for one in stored)
    open_max = figures["backlog"] + figures["in_flight"]
    assert len(told.asked["ack"] & set(ids)) >= len(ids) - open_max >= len(told.answered["ack"])


def pulls(engine: Engine, group: str) -> Iterable[list[Delivery]]:
    """All that is ready for a group, by the batch."""
    while deliveries := engine.puller.pull(TOPIC, group, max_messages=1_000, invisible_ms=3_600_000):
        yield deliveries


def told_in(data: bytes) -> Told:
    """What whole lines tell; the last one may be cut short by the kill."""
    return Told(json.loads(line) for line in data.split(b"\n")[:-1])
