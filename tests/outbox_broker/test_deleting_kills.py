"""Whatever storage call is the last: a group or a topic is there, or gone, and what is not deleted is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.killed_deletion import KEPT, deleting_run
from tests.outbox_broker.killed_engine import DAY_MS, GROUP, RESERVE_BYTES, START_MS, TOPIC, copy_at_each_call
from tests.outbox_broker.test_engine_kills import Told, told_in

AUDIT = "audit"


def drained(engine: Engine, topic: str, group: str) -> list[str]:
    """All that is ready, settled."""
    ids: list[str] = []
    while found := engine.puller.pull(topic, group, max_messages=1_000):
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"] * len(found)
        ids += [one.id for one in found]
    return ids


def canceled_in(folder: Path) -> set[str]:
    """What the action log says to be canceled."""
    return {one for action in actions_of(folder) if isinstance(action, journal.Canceled) for one in action.ids}


def check_recovered(folder: Path, told: Told) -> str:
    """Open what the killed process left behind, hold it against what it told; returns what became of the topic."""
    clock = ManualClock(START_MS)
    options = EngineOptions(
        segment_bytes=4096, reserve_bytes=RESERVE_BYTES, durability=Durability.OS, retention_ms=None
    )  # fmt: skip
    for _ in range(2):  # what the first opening does is not undone by the second
        engine = Engine.open(folder, clock=clock, options=options)
        topics = set(engine.admin.topics())
        is_grouped = TOPIC in topics and GROUP in engine.admin.groups(TOPIC)
        engine.close()
    engine = Engine.open(folder, clock=clock, options=options)
    try:
        came: set[str] = set()
        kept: list[str] = []
        for passing_ms in (0, 30 * DAY_MS):
            clock.advance(passing_ms)
            came.update(drained(engine, TOPIC, AUDIT))
            kept += drained(engine, KEPT, AUDIT)
        assert engine.log_figures()["scheduled"] == 0
    finally:
        engine.close()
    canceled = canceled_in(folder)

    assert set(kept) >= told.answered["kept"]
    assert len(kept) == len(set(kept))
    assert came <= told.asked["old"] | told.asked["scheduled"] | told.asked["new"], "invented"
    assert came >= told.answered["new"], "lost"
    before = told.answered["old"] | told.answered["scheduled"]
    if told.answered["delete_group"] and not told.asked["pull"]:
        assert not is_grouped
    if not told.asked["delete_topic"]:
        assert came >= before, "lost"
        return "there"
    if came & before:
        assert not told.answered["delete_topic"], "came back"
        assert came >= before, "deleted by half"
        return "there"
    assert canceled == told.answered["scheduled"], "canceled, and not told"
    return "gone"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions", "power-schedule"])
def test_whatever_storage_call_is_the_last_a_topic_is_there_or_gone(tmp_path: Path, way: str) -> None:
    copy_at_each_call(deleting_run, tmp_path, way=way)

    became = []
    for path in sorted(tmp_path.glob("*.told"), key=lambda one: int(one.stem)):
        print(f"call {path.stem}")
        became.append(check_recovered(tmp_path / path.stem, told_in(path.read_bytes())))

    assert len(became) > 40
    assert (became[0], became[-1]) == ("there", "gone")
