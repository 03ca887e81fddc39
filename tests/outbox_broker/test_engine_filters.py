"""Groups with a filter, on a real disk: what they get, what counts as consumed, what a restart leaves of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.filter import compile_condition, parse
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import FilterError
from outbox_core.messages.message import GroupConfig, Message

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
WAIT_MS = 60_000
PAID = "type = 'paid'"

type_of_open = Callable[..., Engine]


def publish(engine: Engine, *types: str, first: int = 0, deliver_at_ms: int | None = None) -> list[str]:
    """Publish messages of these types; their ids are their type and number."""
    ids = [f"{kind}-{number}" for number, kind in enumerate(types, first)]
    engine.publisher.publish([
        Message(id=one, topic=TOPIC, body=b"x", headers={"type": kind}, deliver_at_ms=deliver_at_ms)
        for one, kind in zip(ids, types, strict=True)
    ])  # fmt: skip
    return ids


def declare(engine: Engine, text: str | None = PAID, *, max_attempts: int = 16) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(filter=text, max_attempts=max_attempts))


def pull_ids(engine: Engine, *, max_messages: int = 100, wait_ms: int = 0) -> list[str]:
    return [one.id for one in engine.puller.pull(TOPIC, GROUP, max_messages=max_messages, wait_ms=wait_ms)]


def test_a_group_gets_what_its_filter_takes_and_the_rest_counts_as_consumed(engine: Engine) -> None:
    declare(engine)
    publish(engine, "made", "paid", "made", "paid", "made")

    assert pull_ids(engine) == ["paid-1", "paid-3"]
    assert pull_ids(engine) == []

    figures = engine.admin.group_figures(TOPIC, GROUP)
    assert (figures["backlog"], figures["position"], figures["in_flight"]) == (0, 5, 2)
    assert len(engine.puller.pull(TOPIC, "everything")) == 5


def test_a_pull_takes_no_more_than_it_asked_for_and_skips_nothing_that_is_wanted(engine: Engine) -> None:
    declare(engine)
    publish(engine, *["made", "paid", "paid"] * 20)

    found = [pull_ids(engine, max_messages=7) for _ in range(7)]

    assert [len(ids) for ids in found] == [7, 7, 7, 7, 7, 5, 0]
    assert len({one for ids in found for one in ids}) == 40


def test_half_of_a_pull_is_fresh_messages_that_the_filter_takes_while_retries_wait(engine: Engine) -> None:
    declare(engine)
    failed = publish(engine, *["paid"] * 10)
    engine.settler.nack([delivery.receipt for delivery in engine.puller.pull(TOPIC, GROUP)], delay_ms=0)
    published = publish(engine, *["made", "paid"] * 10, first=10)
    fresh = [message_id for message_id in published if message_id.startswith("paid")]

    pulled = [pull_ids(engine, max_messages=8) for _ in range(3)]

    assert [len(set(ids) & set(fresh)) for ids in pulled] == [4, 4, 2]
    assert sorted(one for ids in pulled for one in ids) == sorted([*failed, *fresh])


def test_retries_get_the_whole_pull_where_the_filter_takes_nothing_fresh(engine: Engine) -> None:
    declare(engine)
    failed = publish(engine, *["paid"] * 8)
    engine.settler.nack([delivery.receipt for delivery in engine.puller.pull(TOPIC, GROUP)], delay_ms=0)
    publish(engine, *["made"] * 20, first=8)

    assert pull_ids(engine, max_messages=8) == failed
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_a_filter_and_what_it_passed_over_survive_a_restart(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, "made", "paid", "made", "paid", "made")
    engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1)])

    engine = open_engine()

    assert engine.admin.group_config(TOPIC, GROUP).filter == PAID
    assert pull_ids(engine) == ["paid-3"]
    assert pull_ids(open_engine()) == []


def test_a_message_far_behind_what_is_not_wanted_ends_a_long_poll(open_engine: type_of_open) -> None:
    # No publish wakes the consumer for it: each pass that found nothing must see to the next one itself.
    engine = open_engine(filter_scan_max=10)
    declare(engine)
    publish(engine, *["made"] * 95, "paid")

    assert pull_ids(engine, wait_ms=WAIT_MS) == ["paid-95"]


def test_a_pull_that_found_nothing_yet_has_its_group_woken_to_look_on(open_engine: type_of_open) -> None:
    engine = open_engine(filter_scan_max=10)
    publish(engine, *["made"] * 15)  # before there is a filter that could be asked at once
    declare(engine)
    woken: list[int] = []
    unsubscribe = engine.wakeups.subscribe(
        TOPIC, GROUP, lambda: woken.append(engine.admin.group_figures(TOPIC, GROUP)["position"])
    )

    for _ in range(3):
        pull_ids(engine, max_messages=1)

    unsubscribe()
    assert woken == [10, 15], "and no more once the end is reached"


def test_a_pull_looks_through_a_bounded_number_of_messages(open_engine: type_of_open) -> None:
    engine = open_engine(filter_scan_max=10)
    declare(engine)
    publish(engine, *["made"] * 25, "paid")

    assert pull_ids(engine, max_messages=1) == []

    assert engine.admin.group_figures(TOPIC, GROUP)["position"] == 10
    assert [pull_ids(engine, max_messages=1) for _ in range(2)] == [[], ["paid-25"]]


def test_a_changed_filter_is_asked_of_what_lies_ahead_and_not_of_what_was_handed_out(engine: Engine) -> None:
    declare(engine)
    publish(engine, "paid", "made")
    [held] = engine.puller.pull(TOPIC, GROUP)
    assert pull_ids(engine) == []

    declare(engine, "type = 'made'")
    publish(engine, "paid", "made", first=2)
    engine.settler.nack([held.receipt], delay_ms=0)

    assert pull_ids(engine) == ["paid-0", "made-3"]


def test_a_group_whose_filter_is_taken_away_gets_everything_from_then_on(engine: Engine) -> None:
    declare(engine)
    publish(engine, "made")
    assert pull_ids(engine) == []

    declare(engine, None)
    ids = publish(engine, "made", "paid", first=1)

    assert pull_ids(engine) == ids


def test_a_dead_letter_is_redriven_whatever_the_filter_has_become(engine: Engine) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "paid")
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)], reason="broken")

    declare(engine, "type = 'made'")
    engine.dead_letters.redrive(TOPIC, GROUP)

    assert pull_ids(engine) == ["paid-0"]


def test_a_seek_asks_the_filter_again(engine: Engine) -> None:
    declare(engine)
    publish(engine, "made", "paid")
    pull_ids(engine)

    declare(engine, "type = 'made'")
    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert pull_ids(engine) == ["made-0"]


def test_a_scheduled_message_is_filtered_when_it_falls_due(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "made", "paid", deliver_at_ms=clock.now_ms() + HOUR_MS)
    assert pull_ids(engine) == []

    clock.advance(HOUR_MS)

    assert pull_ids(engine) == ["paid-1"]


def test_a_filter_that_cannot_be_read_is_refused_and_makes_no_group(engine: Engine) -> None:
    with pytest.raises(FilterError, match="at character 12"):
        declare(engine, "type = paid'")

    assert engine.admin.topics() == []


def test_groups_together_get_what_naive_filtering_gives(open_engine: type_of_open, random_seed: int) -> None:
    engine = open_engine(filter_scan_max=16)
    chance = random.Random(random_seed)
    filters = {
        f"g{number}": text
        for number, text in enumerate(
            [
                "type = 'a'",
                "type <> 'a'",
                "type IN ('a', 'b') AND n > 50",
                "n BETWEEN 10 AND 20 OR type IS NULL",
                "FALSE",
            ]
        )
    }
    for name, text in filters.items():
        engine.admin.declare_group(TOPIC, name, GroupConfig(filter=text))
    batch = [
        Message(id=f"m{number}", topic=TOPIC, body=b"", headers={"type": chance.choice("abc"), "n": str(number % 100)})
        for number in range(300)
    ]
    engine.publisher.publish(batch)

    for name, text in filters.items():
        accepts = compile_condition(parse(text))
        expected = [one.id for one in batch if accepts(one.headers)]
        found: list[str] = []
        while engine.admin.group_figures(TOPIC, name)["backlog"]:
            deliveries = engine.puller.pull(TOPIC, name, max_messages=chance.randrange(1, 50))
            found += [one.id for one in deliveries]
            engine.settler.ack([one.receipt for one in deliveries])
        assert found == expected
