"""Dead letters in numbers: pages of them, redrives by id, and the bound on what they take in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message

TOPIC, GROUP = "orders", "billing"
type_of_open = Callable[..., Engine]


def publish(engine: Engine, count: int, *, body: bytes = b"x") -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=body) for number in range(count)])


def kill(engine: Engine, *, every: int = 1) -> None:
    """Give back every so-manieth message, for good, each for a reason of its own; acknowledge the others."""
    for number, one in enumerate(engine.puller.pull(TOPIC, GROUP, max_messages=1_000)):
        if number % every:
            engine.settler.ack([one.receipt])
        else:
            engine.settler.nack([one.receipt], reason=f"broken {one.id}")


def figures(engine: Engine) -> tuple[int, int, int]:
    found = engine.admin.group_figures(TOPIC, GROUP)
    return found["dead"], found["backlog"], found["in_flight"]


def listed(engine: Engine, *, limit: int) -> list[str]:
    ids: list[str] = []
    after: str | None = None
    while True:
        page, after = engine.admin.dead(TOPIC, GROUP, limit=limit, after=after)
        assert all(one.reason in {f"broken {one.id}", "damaged"} for one in page)
        ids += [one.id for one in page]
        if after is None:
            return ids


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("pull_bytes_max", [1 << 20, 1_000], ids=["short", "longer than a page may be"])
def test_all_are_listed_page_by_page(open_engine: type_of_open, every: int, pull_bytes_max: int) -> None:
    engine = open_engine()
    publish(engine, 50, body=b"x" * 400)
    kill(engine, every=every)
    engine = open_engine(pull_bytes_max=pull_bytes_max)

    expected = [f"m{number}" for number in range(0, 50, every)]
    assert [listed(engine, limit=limit) for limit in (1, 7, 1_000)] == [expected] * 3


def test_a_batch_that_is_given_back_at_once_is_one_run_and_is_listed_one_by_one(engine: Engine) -> None:
    publish(engine, 500)

    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=500)], reason="damaged")

    group = engine.context.state.group(TOPIC, GROUP)
    assert group is not None
    assert len(list(group.dead)) == 1
    assert len(listed(engine, limit=100)) == 500


@pytest.mark.parametrize("limit", range(1, 10))
def test_a_page_that_ends_inside_a_run_is_followed_by_the_rest_of_it(engine: Engine, limit: int) -> None:
    publish(engine, 12)
    held = engine.puller.pull(TOPIC, GROUP, max_messages=12)

    for first in range(0, 12, 4):
        engine.settler.nack([one.receipt for one in held[first : first + 3]], reason="damaged")

    assert listed(engine, limit=limit) == [f"m{number}" for number in range(12) if number % 4 < 3]


def test_those_that_are_named_are_redriven_wherever_they_are(open_engine: type_of_open) -> None:
    engine = open_engine(dead_search_messages_max=10)
    publish(engine, 100)
    kill(engine, every=2)

    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["m98", "m0", "m51", "m40", "nobody"]) == 3

    assert sorted(one.id for one in engine.puller.pull(TOPIC, GROUP)) == ["m0", "m40", "m98"]
    assert figures(engine)[0] == 47


def test_an_id_that_is_dead_twice_hides_no_other_that_is_named(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=1, dead_search_messages_max=1)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    for name in ("twice", "between", "twice", "last", "behind"):
        engine.publisher.publish([Message(id=name, topic=TOPIC, body=b"x")])
    kill(engine)

    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["twice", "last"]) == 3

    assert [one.id for one in engine.admin.dead(TOPIC, GROUP)[0]] == ["between", "behind"]


def test_messages_that_find_no_room_to_be_dead_wait_for_it_and_are_handed_to_nobody(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(dead_letters_bytes_max=3_000)
    publish(engine, 100)
    kill(engine)
    dead, waiting, _ = figures(engine)
    assert 0 < dead < 30
    assert dead + waiting == 100

    engine = open_engine(dead_letters_bytes_max=3_000)
    clock.advance(60_000)
    assert engine.puller.pull(TOPIC, GROUP) == []
    assert figures(engine) == (dead, waiting, 0)

    engine = open_engine()
    clock.advance(60_000)
    assert engine.puller.pull(TOPIC, GROUP) == []
    assert figures(engine) == (100, 0, 0)
    assert listed(engine, limit=1_000) == [f"m{number}" for number in range(100)]


def test_a_redrive_makes_room_for_those_that_wait(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(dead_letters_bytes_max=3_000)
    publish(engine, 20)
    kill(engine)
    dead, waiting, _ = figures(engine)

    assert engine.dead_letters.redrive(TOPIC, GROUP) == dead

    engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)])
    clock.advance(60_000)
    assert engine.puller.pull(TOPIC, GROUP) == []
    assert sum(figures(engine)) == waiting
    assert figures(engine)[0] > 0


def test_how_attempts_went_is_known_through_checkpoints_and_restarts(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    small = {"segment_bytes": 4096, "checkpoint_bytes": 4096}
    engine = open_engine(**small)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=3, backoff_initial_ms=1, backoff_max_ms=1))
    engine.publisher.publish([Message(id="m0", topic=TOPIC, body=b"x")])

    for reason in ("no stock", None, "gone"):
        [one] = engine.puller.pull(TOPIC, GROUP, max_messages=1, invisible_ms=1_000)
        if reason is None:
            clock.advance(1_000)
        else:
            engine.settler.nack([one.receipt], delay_ms=0, reason=reason)
        for number in range(100):
            engine.admin.pause(TOPIC, GROUP, paused=number % 2 == 0)
        engine = open_engine(**small)

    for _ in range(2):
        [letter], _ = engine.admin.dead(TOPIC, GROUP)
        assert letter.history == (("no stock", 1), ("invisible time ran out", 1), ("gone", 1))
        for number in range(100):
            engine.admin.pause(TOPIC, GROUP, paused=number % 2 == 0)
        engine = open_engine(**small)
