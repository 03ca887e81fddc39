"""What only saves time when a broker opens: checkpoints and footers. Lost, stale or damaged ones change nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.group.dead_letters import DeadRun
from outbox_broker.journal import message_reader
from outbox_broker.log.topic_index import BlockPlace, Runs
from outbox_broker.state import checkpoint
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import decode_segment_head
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.action_log import action_segments, damage_checkpoints, whole_checkpoint
from tests.outbox_broker.message_log import (
    clear_footer,
    flip_directory,
    flip_footer,
    flip_ids,
    footers_of,
    message_segments,
)

TOPIC, GROUP = "orders", "billing"
SMALL = {"segment_bytes": 4096, "checkpoint_bytes": 1024}
HOUR_MS = 3_600_000
type_of_open = Callable[..., Engine]


class NoBlocks:
    """Of a state without sealed segments."""

    def load(self, place: BlockPlace) -> Runs:
        """Never asked."""
        raise StorageFailed(f"there is no block {place}")


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> list[str]:
    messages = [Message(id=one, topic=topic, body=one.encode() * 20, deliver_at_ms=deliver_at_ms) for one in ids]
    return [str(one.status) for one in engine.publisher.publish(messages)]


def pull_ids(engine: Engine, *, topic: str = TOPIC) -> list[str]:
    return [one.id for one in engine.puller.pull(topic, GROUP, max_messages=1_000)]


def busy_past(engine: Engine, clock: ManualClock) -> dict[str, str]:
    """Many segments of both logs, with something of each kind in them; returns what is settled: receipts by id."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2, backoff_initial_ms=100))
    publish(engine, "fires", "gone", deliver_at_ms=clock.now_ms() + 1_000)
    publish(engine, "waits", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.publisher.cancel(["gone", "unborn"])
    settled: dict[str, str] = {}
    for number in range(60):
        publish(engine, f"a{number}", f"b{number}", f"c{number}")
        publish(engine, f"other{number}", topic=f"topic{number % 7}")
        deliveries = engine.puller.pull(TOPIC, GROUP, max_messages=2, invisible_ms=HOUR_MS)
        engine.settler.ack([deliveries[0].receipt])
        settled[deliveries[0].id] = deliveries[0].receipt
        if number % 9 == 0:
            engine.settler.nack([deliveries[1].receipt], delay_ms=0, reason="broken")
    clock.advance(1_000)
    engine.publisher.cancel([])  # what is due has taken its place
    engine.writer.write_checkpoint()
    publish(engine, "unborn")
    return settled


def held(engine: Engine) -> dict[str, tuple[int, int]]:
    """How much each topic has stored and scheduled, whatever its groups have made of it."""
    figures = {topic: engine.admin.topic_figures(topic) for topic in engine.admin.topics()}
    return {topic: (one["stored"], one["scheduled"]) for topic, one in figures.items()}


def seen(engine: Engine) -> object:
    """All that can be seen of an engine without changing it."""
    groups = [(topic, group) for topic in engine.admin.topics() for group in engine.admin.groups(topic)]
    return (
        {topic: dict(engine.admin.topic_figures(topic)) for topic in engine.admin.topics()},
        {place: dict(engine.admin.group_figures(*place)) for place in groups},
        {place: engine.admin.dead(*place) for place in groups},
        engine.publisher.scheduled(),
    )


def drained(engine: Engine) -> list[str]:
    ids: list[str] = []
    while found := pull_ids(engine):
        ids += found
    return ids


def lose_footers(folder: Path) -> None:
    """Leave nothing of them."""
    for footer in footers_of(folder):
        clear_footer(footer)


def damage_directories(folder: Path) -> None:
    """Flip a bit in each footer's directory."""
    for footer in footers_of(folder):
        flip_directory(footer)


def damage_ids(folder: Path) -> None:
    """Flip a bit in each footer's ids."""
    for footer in footers_of(folder):
        flip_ids(footer)


def damage_all_checkpoints(folder: Path) -> None:
    """Flip a bit in each part of each checkpoint."""
    assert damage_checkpoints(folder)


def nothing(folder: Path) -> None:
    """Leave everything as it is."""


@pytest.mark.parametrize("restores", ["actions", "checkpoint"])
def test_a_message_given_back_untried_is_still_suspected_after_a_restart(
    open_engine: type_of_open, clock: ManualClock, restores: str
) -> None:
    engine = open_engine()
    publish(engine, "a")
    engine.puller.pull(TOPIC, GROUP, invisible_ms=1_000)
    clock.advance(1_000)
    [suspected] = engine.puller.pull(TOPIC, GROUP, invisible_ms=1_000, begins=True)
    engine.settler.nack([suspected.receipt], counts=False)
    if restores == "checkpoint":
        engine.writer.write_checkpoint()
    engine.close()

    [again] = open_engine().puller.pull(TOPIC, GROUP, begins=True)

    assert (again.id, again.expired, again.attempt) == ("a", True, 2)


@pytest.mark.parametrize("harm", [nothing, lose_footers, damage_directories, damage_ids, damage_all_checkpoints])
def test_what_saves_time_may_be_lost_stale_or_damaged_and_nothing_changes(
    open_engine: type_of_open, folder: Path, clock: ManualClock, harm: Callable[[Path], None]
) -> None:
    engine = open_engine(**SMALL)
    settled = busy_past(engine, clock)
    before = seen(engine)
    engine.close()
    assert len(message_segments(folder)) > 5
    assert len(action_segments(folder)) > 2

    harm(folder)
    engine = open_engine(**SMALL)

    assert seen(engine) == before
    assert engine.settler.ack(list(settled.values())) == ["already_acked"] * len(settled)
    assert publish(engine, "a0", "b30", "c59", "fires", "waits", "gone") == ["duplicate"] * 6
    ready = drained(engine)
    assert "fires" in ready
    assert not {"gone", "unborn", "waits"} & set(ready)
    clock.advance(2 * HOUR_MS)
    came = {*ready, *drained(engine), *(one.id for one in engine.admin.dead(TOPIC, GROUP)[0])}
    published = {f"{name}{number}" for name in "abc" for number in range(60)}
    assert came == {"fires", "waits", *published} - set(settled)


def test_a_block_of_a_footer_that_is_damaged_while_the_broker_runs_is_made_anew_at_once(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**SMALL)
    busy_past(engine, clock)
    engine.close()
    engine = open_engine(**SMALL)
    flip_footer(footers_of(folder)[0])

    assert [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=3)] == ["a0", "b0", "c0"]

    engine.check_ready()
    assert "segment_footer_made" in map(event_name, caplog.records)
    engine = open_engine(**SMALL)
    assert [one.id for one in engine.puller.pull(TOPIC, "third", max_messages=3)] == ["a0", "b0", "c0"]


def test_replay_begins_at_the_newest_checkpoint(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**SMALL)
    busy_past(engine, clock)
    engine.admin.pause(TOPIC, GROUP, paused=True)
    engine.close()
    decode, replayed = journal.decode_action, []
    monkeypatch.setattr(journal, "decode_action", lambda payload: replayed.append(payload) or decode(payload))

    open_engine(**SMALL)

    captured = whole_checkpoint(folder)
    assert captured
    behind = sum(path.stat().st_size for path in action_segments(folder)) - captured
    assert 0 < sum(map(len, replayed)) <= behind


def test_only_the_segments_without_an_intact_footer_are_read(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**SMALL)
    busy_past(engine, clock)
    engine.close()
    paths = message_segments(folder)
    flip_directory(footers_of(folder)[2])
    decode, read = message_reader.decode_record, []
    monkeypatch.setattr(message_reader, "decode_record", lambda payload: read.append(payload) or decode(payload))

    open_engine(**SMALL)

    assert 0 < sum(map(len, read)) < paths[2].stat().st_size + paths[-1].stat().st_size


def test_what_is_in_memory_does_not_grow_with_what_is_stored(open_engine: type_of_open) -> None:
    engine = open_engine(segment_bytes=16_384, dedup_messages_max=100)

    for number in range(40):
        publish(engine, *(f"{number}-{part}" for part in range(100)))

    index = engine.context.state.topics[TOPIC].index
    assert len(index.tail) <= 10
    assert index.end == 4_000


def test_a_checkpoint_that_a_kill_cut_short_is_passed_over(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    busy_past(engine, clock)
    engine.writer.write_checkpoint()
    before = held(engine)
    engine.close()
    newest = action_segments(folder)[-1]
    newest.write_bytes(newest.read_bytes()[:-50])
    newest.with_suffix(".proven").unlink()  # it was not closed in order

    engine = open_engine(**SMALL)

    assert held(engine) == before


def with_dead_letters(count: int, *, reason: str) -> BrokerState:
    """A state with so many dead letters that died at the same time, each a run of its own."""
    state = BrokerState(EngineOptions(), NoBlocks())
    dead = state.declare(TOPIC, GROUP, GroupConfig(), position=0).dead
    for number in range(count):
        dead.add(DeadRun(2 * number, 2 * number + 1, 16, reason, 7))
    return state


def data_of(state: BrokerState) -> bytes:
    return b"".join(checkpoint.parts_of(state, messages_end=0))


def dead_of(state: BrokerState) -> list[DeadRun]:
    group = state.group(TOPIC, GROUP)
    assert group is not None
    return list(group.dead)


def test_dead_letters_take_no_more_in_a_checkpoint_than_in_memory() -> None:
    state = with_dead_letters(50_000, reason="e" * 200)

    data = data_of(state)

    assert len(data) < state.dead_letter_memory.size_bytes + 1_000
    restored = BrokerState(EngineOptions(), NoBlocks())
    checkpoint.restore(restored, data)
    assert dead_of(restored) == dead_of(state)
    assert restored.dead_letter_memory == state.dead_letter_memory


def test_dead_letters_are_there_after_a_restart_from_a_checkpoint(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(**SMALL)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, *(f"m{number}" for number in range(30)))
    for number, one in enumerate(engine.puller.pull(TOPIC, GROUP)):
        engine.settler.nack([one.receipt], reason=f"broken {number % 3}")
    before = engine.admin.dead(TOPIC, GROUP)
    engine.writer.write_checkpoint()
    engine.close()
    captured = whole_checkpoint(folder)
    assert captured
    for path, following in pairwise(action_segments(folder)):
        if decode_segment_head(following.read_bytes()).first <= captured:
            path.unlink()
    assert decode_segment_head(action_segments(folder)[0].read_bytes()).first > 0

    engine = open_engine(**SMALL)

    assert len(before[0]) == 30
    assert engine.admin.dead(TOPIC, GROUP) == before
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 30
