"""Discarding dead letters: those that are meant and no others, durably, with who and why in the action log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal.dead_letter_records import Discarded
from outbox_core.messages.message import DeadFilter, GroupConfig, Message
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.message_log import message_segments

TOPIC, GROUP = "orders", "billing"
DAY_MS = 86_400_000
BY = {"by": "ops", "why": "paid by hand"}
type_of_open = Callable[..., Engine]


def die(engine: Engine, *ids: str, reason: str = "broken", key: str | None = None, **headers: str) -> None:
    """Messages of which the group gives up at the first attempt."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.publisher.publish([Message(id=one, topic=TOPIC, key=key, headers=headers, body=b"x") for one in ids])
    receipts = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000)]
    engine.settler.nack(receipts, delay_ms=0, reason=reason)


def dead(engine: Engine) -> list[str]:
    return [one.id for one in engine.admin.dead(TOPIC, GROUP, limit=1_000)[0]]


def discarded(folder: Path) -> list[tuple[str, str, list[tuple[int, int]]]]:
    """What the action log says of discards."""
    return [(one.by, one.why, one.entries) for one in actions_of(folder) if isinstance(one, Discarded)]


def test_what_is_discarded_is_gone_for_this_group_alone(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    engine.admin.declare_group(TOPIC, "others", GroupConfig())
    die(engine, "m0", "m1", "m2", "m3")

    assert engine.dead_letters.discard(TOPIC, GROUP, ids=["m1", "m2", "unknown"], **BY) == 2

    assert dead(engine) == ["m0", "m3"]
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=["m1", "m2"], **BY) == 0, "a repeat finds nothing"
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 2
    assert [one.id for one in engine.puller.pull(TOPIC, GROUP)] == ["m0", "m3"]
    assert len(engine.puller.pull(TOPIC, "others")) == 4
    assert engine.counters()["discarded", TOPIC, GROUP] == 2
    engine = open_engine()
    assert dead(engine) == []
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0
    assert discarded(folder) == [("ops", "paid by hand", [(1, 2)])]


CHOICES: list[tuple[dict[str, Any], list[str]]] = [
    ({"reason": "customer"}, ["a", "b", "d"]),
    ({"reason": "no such customer"}, ["a", "b"]),
    ({"key": "k1"}, ["a", "c"]),
    ({"headers": {"type": "card"}}, ["b", "c"]),
    ({"headers": {"type": "card", "part": "1"}}, ["c"]),
    ({"key": "k1", "reason": "customer"}, ["a"]),
    ({"reason": "customer", "from_ms": 2_000}, ["d"]),
    ({"reason": "customer", "from_ms": 1_000, "to_ms": 2_000}, ["b"]),
    ({"reason": "nothing"}, []),
]


@pytest.mark.parametrize(("where", "expected"), CHOICES)
def test_those_that_fit_are_counted_and_discarded(
    engine: Engine, clock: ManualClock, where: dict[str, Any], expected: list[str]
) -> None:
    start_ms = clock.now_ms()
    times = {name: start_ms + value for name, value in where.items() if name in {"from_ms", "to_ms"}}
    die(engine, "a", reason="no such customer 17", key="k1")
    clock.advance(1_000)
    die(engine, "b", reason="no such customer 18", type="card")
    clock.advance(1_000)
    die(engine, "c", reason="time out", key="k1", type="card", part="1")
    die(engine, "d", reason="customer locked")
    chosen = DeadFilter(**{**where, **times})

    counted = engine.dead_letters.count(TOPIC, GROUP, where=chosen)
    count = engine.dead_letters.discard(TOPIC, GROUP, where=chosen, **BY)

    assert (counted.count, count) == (len(expected), len(expected))
    assert dead(engine) == [one for one in "abcd" if one not in expected]


def test_all_of_a_group_are_discarded_those_of_damaged_records_too(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    die(engine, "m0", "m1", "m2")
    [path] = message_segments(folder)
    data = bytearray(path.read_bytes())
    at = data.index(b"m1")
    engine.close()
    path.write_bytes(bytes(data[:at] + b"?" + data[at + 1 :]))
    engine = open_engine()

    assert dead(engine) == ["m0", "", "m2"]
    assert engine.dead_letters.count(TOPIC, GROUP).count == 3
    assert engine.dead_letters.discard(TOPIC, GROUP, **BY) == 3

    assert dead(engine) == []


def test_no_more_are_discarded_than_were_counted(engine: Engine, clock: ManualClock) -> None:
    die(engine, "m0", "m1")
    counted = engine.dead_letters.count(TOPIC, GROUP)
    clock.advance(1)
    die(engine, "m2")

    count = engine.dead_letters.discard(TOPIC, GROUP, dead_before_ms=counted.dead_before_ms, **BY)

    assert (counted.count, count) == (2, 2)
    assert dead(engine) == ["m2"]


def test_a_time_alone_chooses_none_and_a_reason_must_be_said(engine: Engine) -> None:
    die(engine, "m0")

    with pytest.raises(InvalidMessage, match="a time alone"):
        engine.dead_letters.discard(TOPIC, GROUP, where=DeadFilter(to_ms=1 << 50), **BY)
    with pytest.raises(InvalidMessage, match="a time alone"):
        engine.dead_letters.count(TOPIC, GROUP, where=DeadFilter())
    for why in ("", "x" * 1_025, "\udcff"):
        with pytest.raises(InvalidMessage, match="say why"):
            engine.dead_letters.discard(TOPIC, GROUP, ids=["m0"], by="ops", why=why)
    with pytest.raises(KeyError, match="no consumer group"):
        engine.dead_letters.discard(TOPIC, "unknown", **BY)

    assert dead(engine) == ["m0"]


def test_what_was_discarded_holds_no_segment_back(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    engine = open_engine(
        segment_bytes=4096, checkpoint_bytes=4096, retention_ms=DAY_MS, retention_check_ms=10**15
    )  # fmt: skip
    engine.admin.declare_group(TOPIC, "slow", GroupConfig())
    die(engine, "first")
    for batch in range(20):
        engine.publisher.publish([Message(id=f"m{batch}-{one}", topic=TOPIC, body=b"x" * 500) for one in range(8)])
        engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=8)])
    clock.advance(DAY_MS)
    engine.publisher.publish([Message(id="new", topic=TOPIC, body=b"x")])
    pinned = engine.retention.drop_outdated()
    segments = len(message_segments(folder))

    engine.dead_letters.discard(TOPIC, GROUP, ids=["first"], **BY)
    while found := engine.puller.pull(TOPIC, "slow", max_messages=1_000):
        engine.settler.ack([one.receipt for one in found])

    assert pinned == 0
    assert engine.retention.drop_outdated() >= segments - 2 > 10
    assert engine.cleaner.moved_messages == 0


def test_a_discard_of_many_is_written_in_parts(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(redrive_batch_max=3)
    die(engine, *(f"m{number}" for number in range(16)))
    even = [f"m{number}" for number in range(0, 16, 2)]

    assert engine.dead_letters.discard(TOPIC, GROUP, ids=even, **BY) == 8

    assert dead(open_engine()) == [f"m{number}" for number in range(1, 16, 2)]
    assert [len(entries) for _, _, entries in discarded(folder)] == [3, 3, 2]


def die_again(engine: Engine, clock: ManualClock, *, reason: str) -> None:
    """All dead letters are redriven, and the group gives up on them once more, later."""
    clock.advance(1_000)
    engine.dead_letters.redrive(TOPIC, GROUP)
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)], delay_ms=0, reason=reason)


@pytest.mark.parametrize("chosen", [{"ids": ["m0"]}, {"where": DeadFilter(reason="no such customer")}, {}])
def test_what_died_since_it_was_counted_stays(engine: Engine, clock: ManualClock, chosen: dict[str, Any]) -> None:
    die(engine, "m0", reason="no such customer")
    counted = engine.dead_letters.count(TOPIC, GROUP, **chosen)
    assert counted.count == 1
    die_again(engine, clock, reason="no such customer")

    assert engine.dead_letters.discard(TOPIC, GROUP, **chosen, dead_before_ms=counted.dead_before_ms, **BY) == 0

    assert dead(engine) == ["m0"]


def test_an_id_that_is_dead_twice_is_discarded_twice(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=1)
    die(engine, "m0")
    die(engine, "m1")
    die(engine, "m0")

    assert engine.dead_letters.count(TOPIC, GROUP, ids=["m0"]).count == 2
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=["m0"], **BY) == 2

    assert dead(engine) == ["m1"]
