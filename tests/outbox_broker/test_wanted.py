"""Filters at publish: only groups that want something are woken, the others come past it unread, and none is missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_broker.engine import puller
from outbox_broker.engine.engine import Engine
from outbox_broker.filter import compile_condition, parse
from outbox_broker.group.subscription_matcher import SubscriptionMatcher
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.failing_storage import HeldSyncs
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
PAID = "type = 'paid'"
HOUR_MS = 3_600_000
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *types: str, first: int = 0, topic: str = TOPIC, deliver_at_ms: int | None = None) -> None:
    engine.publisher.publish([
        Message(id=f"{topic}.{kind}-{number}", topic=topic, body=b"", headers={"type": kind, "kind": kind},
                deliver_at_ms=deliver_at_ms)
        for number, kind in enumerate(types, first)
    ])  # fmt: skip


def declare(engine: Engine, text: str | None = PAID, *, group: str = GROUP, ordered: bool = False) -> None:
    engine.admin.declare_group(TOPIC, group, GroupConfig(filter=text, ordered=ordered))


def pull_types(engine: Engine, group: str = GROUP) -> list[str]:
    found = engine.puller.pull(TOPIC, group, max_messages=1_000)
    engine.settler.ack([one.receipt for one in found])
    return [one.headers["type"] for one in found]


def is_locked(engine: Engine) -> bool:
    """Whether another thread holds an engine's lock, for longer than a step takes."""
    is_taken = engine.context.lock.acquire(timeout=0.2)
    if is_taken:
        engine.context.lock.release()
    return not is_taken


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each read of the message log brought."""
    counts: list[int] = []
    real = puller.read_runs

    def counting(*args: object, **options: object) -> object:
        found = real(*args, **options)  # type: ignore[arg-type]
        counts.append(len(found))
        return found

    monkeypatch.setattr(puller, "read_runs", counting)
    return counts


def test_only_groups_that_want_something_of_a_publish_are_woken(engine: Engine) -> None:
    woken: list[str] = []
    for name, text in {"paid": PAID, "made": "type = 'made'", "any": None, "else": "type <> 'paid'"}.items():
        declare(engine, text, group=name)
        engine.wakeups.subscribe(TOPIC, name, lambda name=name: woken.append(name))  # type: ignore[misc]

    publish(engine, "paid")
    assert sorted(woken) == ["any", "paid"]

    woken.clear()
    publish(engine, "made", first=1)
    assert sorted(woken) == ["any", "else", "made"]


def test_what_nobody_wants_is_passed_unread_and_counted(engine: Engine, reads: list[int]) -> None:
    declare(engine)
    publish(engine, *["made"] * 500)
    publish(engine, *["lost"] * 500, first=500)

    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0
    assert pull_types(engine) == []

    assert sum(reads) == 0
    assert engine.counters()["filtered", TOPIC, GROUP] == 1_000
    publish(engine, "made", "paid", "made", first=1_000)
    assert pull_types(engine) == ["paid"]
    assert pull_types(engine) == []
    assert engine.counters()["filtered", TOPIC, GROUP] == 1_002


def test_what_was_passed_in_between_what_is_wanted_is_counted_once(engine: Engine) -> None:
    declare(engine)
    publish(engine, "made", "paid", "made", "paid", "made")

    assert pull_types(engine) == ["paid", "paid"]
    assert pull_types(engine) == []

    assert engine.counters()["filtered", TOPIC, GROUP] == 3


def test_a_group_that_is_behind_reads_what_it_has_not_passed(engine: Engine) -> None:
    publish(engine, "paid")
    declare(engine)
    publish(engine, "made", first=1)

    assert pull_types(engine) == ["paid"]


def test_after_a_restart_what_was_not_passed_durably_is_asked_again(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, "made", "paid")

    engine = open_engine()
    publish(engine, "made", first=2)

    assert pull_types(engine) == ["paid"]
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_a_scheduled_message_that_falls_due_wakes_and_reaches_its_group(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "paid", deliver_at_ms=clock.now_ms() + HOUR_MS)
    publish(engine, "made", first=1)
    woken: list[int] = []
    engine.wakeups.subscribe(TOPIC, GROUP, lambda: woken.append(1))

    clock.advance(HOUR_MS)
    engine.publisher.cancel([])  # fires what is due, as the timer does
    publish(engine, "made", first=2)

    assert woken
    assert pull_types(engine) == ["paid"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_changed_filter_applies_from_then_on(open_engine: type_of_open, ordered: bool) -> None:
    engine = open_engine()
    declare(engine, ordered=ordered)
    publish(engine, "made")

    declare(engine, "type = 'made'", ordered=ordered)
    engine = open_engine()
    publish(engine, "paid", "made", first=1)
    assert pull_types(engine) == ["made"]

    declare(engine, None, ordered=ordered)
    publish(engine, "paid", "made", first=3)
    assert pull_types(engine) == ["paid", "made"]


@pytest.mark.parametrize("before", [None, "type <> 'made'"])
def test_what_was_not_durable_yet_when_another_filter_was_declared_wakes_its_group(
    open_engine: type_of_open, before: str | None
) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    declare(engine, "type = 'made'", group="other")  # what is published is matched at once
    declare(engine, before)
    publish(engine, "made")
    pull_types(engine)
    woken: list[bool] = []
    messages = engine.context.messages
    engine.wakeups.subscribe(TOPIC, GROUP, lambda: woken.append(messages.committed == messages.end))

    storage.hold()
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(publish, engine, "paid", first=1)
        assert storage.waiting.wait(120)
        declaring = pool.submit(declare, engine)
        until(lambda: is_locked(engine) or engine.admin.group_config(TOPIC, GROUP).filter == PAID)
        storage.release()
        publishing.result(120)
        declaring.result(120)

    assert True in woken, "a pull that waits would wait on"
    assert pull_types(engine) == ["paid"]


def test_a_filter_that_is_declared_again_as_it_was_changes_nothing(engine: Engine, reads: list[int]) -> None:
    declare(engine)
    publish(engine, "made")

    declare(engine)

    assert pull_types(engine) == []
    assert sum(reads) == 0


def test_a_seek_reads_again_what_was_passed_unread(engine: Engine) -> None:
    declare(engine)
    publish(engine, "made", "lost")
    declare(engine, "type = 'made'")

    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert pull_types(engine) == ["made"]


def test_retention_is_not_held_up_by_a_group_that_wants_nothing(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(segment_bytes=4096, retention_ms=1_000)
    declare(engine)
    for number in range(4):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x" * 3_000)])
    clock.advance(2_000)
    publish(engine, "made")

    assert engine.retention.drop_outdated() > 0


def test_each_topic_has_its_index_header(open_engine: type_of_open) -> None:
    engine = open_engine(filter_index_header="type", filter_index_headers={"orders": "kind"})
    declare(engine, "kind = 'paid'")
    engine.admin.declare_group("other", "g", GroupConfig(filter=PAID))

    publish(engine, "paid", "made")
    publish(engine, "paid", topic="other")

    assert pull_types(engine) == ["paid"]
    assert [delivery.id for delivery in engine.puller.pull("other", "g", max_messages=10)] != []


def test_of_two_publishers_at_once_none_takes_the_wake_of_the_other() -> None:
    wanted = SubscriptionMatcher("type")
    wanted.declare("g", PAID, end=0)
    wanted.published(0, [{"type": "paid"}], log_end=100)
    wanted.published(1, [{"type": "made"}], log_end=200)

    assert wanted.to_wake(["g"], durable_end=50, end=2) == ["g"], "told already, but not durable: told again"
    assert wanted.to_wake(["g"], durable_end=200, end=2) == ["g"]
    assert wanted.to_wake(["g"], durable_end=200, end=2) == []


def test_many_groups_get_what_naive_filtering_gives_whatever_happens_in_between(
    open_engine: type_of_open, random_seed: int, clock: ManualClock
) -> None:
    engine, chance = open_engine(), random.Random(random_seed)
    texts = {"a": "type = 'a'", "b": "type <> 'a'", "c": "type IN ('b', 'c')", "d": "n > '5'", "e": "FALSE"}
    for name, text in texts.items():
        declare(engine, text, group=name, ordered=name in "bd")
    stored: list[Message] = []
    found: dict[str, list[str]] = {name: [] for name in texts}
    for number in range(120):
        batch = [
            Message(id=f"{number}-{part}", topic=TOPIC, body=b"",
                    headers={"type": chance.choice("abcx"), "n": str(chance.randrange(10))})
            for part in range(chance.randrange(1, 4))
        ]  # fmt: skip
        if chance.random() < 0.1:
            engine.publisher.publish([Message(id=f"s{number}", topic=TOPIC, body=b"", headers={"type": "b", "n": "9"},
                                    deliver_at_ms=clock.now_ms() + 10)])  # fmt: skip
            clock.advance(10)
            engine.publisher.cancel([])
            stored.append(Message(id=f"s{number}", topic=TOPIC, body=b"", headers={"type": "b", "n": "9"}))
        engine.publisher.publish(batch)
        stored += batch
        name = chance.choice("abcde")
        taken = engine.puller.pull(TOPIC, name, max_messages=chance.randrange(1, 9))
        engine.settler.ack([one.receipt for one in taken])
        found[name] += [one.id for one in taken]
        if number % 40 == 39:
            engine = open_engine()

    for name, text in texts.items():
        while taken := engine.puller.pull(TOPIC, name, max_messages=1_000):
            engine.settler.ack([one.receipt for one in taken])
            found[name] += [one.id for one in taken]
        accepts = compile_condition(parse(text))
        assert found[name] == [one.id for one in stored if accepts(one.headers)]
        assert engine.admin.group_figures(TOPIC, name)["backlog"] == 0


def test_a_message_that_shares_a_run_with_one_that_nobody_wants_is_told_again_when_that_is_durable() -> None:
    wanted = SubscriptionMatcher("type")
    wanted.declare(GROUP, PAID, end=0)
    wanted.published(0, [{"type": "paid"}], log_end=100)
    wanted.published(1, [{"type": "made"}], log_end=200)

    assert wanted.to_wake([GROUP], durable_end=100, end=2) == [GROUP]
    wanted.published(2, [{"type": "made"}], log_end=300)
    assert wanted.to_wake([GROUP], durable_end=200, end=3) == [GROUP]
    assert wanted.to_wake([GROUP], durable_end=300, end=3) == []


def test_what_is_wanted_meanwhile_is_told_anew() -> None:
    wanted = SubscriptionMatcher("type")
    wanted.declare(GROUP, PAID, end=0)
    wanted.published(0, [{"type": "paid"}], log_end=100)
    wanted.published(1, [{"type": "made"}], log_end=200)
    assert wanted.to_wake([GROUP], durable_end=100, end=2) == [GROUP]

    wanted.published(2, [{"type": "paid"}], log_end=300)
    wanted.published(3, [{"type": "made"}], log_end=400)

    assert wanted.to_wake([GROUP], durable_end=300, end=4) == [GROUP]
    assert wanted.to_wake([GROUP], durable_end=400, end=4) == [GROUP]
    assert wanted.to_wake([GROUP], durable_end=400, end=4) == []
