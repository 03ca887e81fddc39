"""Ordered groups on a real disk: one message of a key at a time, in order, whatever consumers and restarts do."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.engine import puller
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import Delivery, GroupConfig, Message
from tests.outbox_broker.action_log import action_segments

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000

type_of_open = Callable[..., Engine]


def declare(engine: Engine, *, ordered: bool = True, text: str | None = None, max_attempts: int = 16) -> None:
    config = GroupConfig(ordered=ordered, filter=text, max_attempts=max_attempts, backoff_initial_ms=100)
    engine.admin.declare_group(TOPIC, GROUP, config)


def publish(engine: Engine, *keys: str, first: int = 0, deliver_at_ms: int | None = None) -> list[str]:
    """One message for each key ("-": none), whose id is the key and a number."""
    ids = [f"{key}{number}" for number, key in enumerate(keys, first)]
    engine.publisher.publish([
        Message(id=one, topic=TOPIC, body=b"x", key=None if key == "-" else key, deliver_at_ms=deliver_at_ms,
                headers={"type": key})
        for one, key in zip(ids, keys, strict=True)
    ])  # fmt: skip
    return ids


def pull(engine: Engine, *, count: int = 100, wait_ms: int = 0, invisible_ms: int = 30_000) -> list[Delivery]:
    return engine.puller.pull(TOPIC, GROUP, max_messages=count, wait_ms=wait_ms, invisible_ms=invisible_ms)


def ids_of(deliveries: list[Delivery]) -> list[str]:
    return [one.id for one in deliveries]


def ack(engine: Engine, deliveries: list[Delivery]) -> None:
    assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)


def test_one_message_of_a_key_is_in_hand_at_a_time_and_other_keys_go_on(engine: Engine) -> None:
    declare(engine)
    publish(engine, "a", "a", "b", "-", "a", "-", "b")

    first = pull(engine)
    assert ids_of(first) == ["a0", "b2", "-3", "-5"]
    assert pull(engine) == []

    ack(engine, first[:1])
    second = pull(engine)
    assert ids_of(second) == ["a1"]
    ack(engine, [*first[1:], *second])
    assert ids_of(pull(engine)) == ["a4", "b6"]


def test_a_group_that_is_not_ordered_gets_all_of_a_key_at_once(engine: Engine) -> None:
    declare(engine, ordered=False)
    ids = publish(engine, "a", "a", "b")

    assert ids_of(pull(engine)) == ids


def test_a_key_waits_for_the_backoff_of_its_message_and_others_do_not(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "a", "a", "b")
    held = pull(engine)

    engine.settler.nack([held[0].receipt])
    assert pull(engine) == []
    ack(engine, held[1:])
    publish(engine, "b", first=9)
    assert ids_of(pull(engine)) == ["b9"]

    clock.advance(100)
    again = pull(engine)
    assert [(one.id, one.attempt) for one in again] == [("a0", 2)]
    ack(engine, again)
    assert ids_of(pull(engine)) == ["a1"]


def test_an_invisible_time_that_runs_out_keeps_the_order(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "a", "a")
    late = pull(engine, invisible_ms=50)

    clock.advance(50)

    assert ids_of(pull(engine)) == ["a0"]
    assert engine.settler.ack([late[0].receipt]) == ["stale"]
    assert pull(engine) == []


def test_a_dead_letter_lets_the_next_of_its_key_go_whether_refused_or_expired(
    engine: Engine, clock: ManualClock
) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "a", "a", "a")

    engine.settler.nack([pull(engine)[0].receipt])
    assert ids_of(pull(engine, invisible_ms=50)) == ["a1"]
    clock.advance(50)

    assert ids_of(pull(engine)) == ["a2"]


def test_a_redriven_message_is_outside_the_order(engine: Engine) -> None:
    declare(engine, max_attempts=1)
    publish(engine, "a", "a", "a")
    engine.settler.nack([pull(engine)[0].receipt])
    in_hand = pull(engine)

    engine.dead_letters.redrive(TOPIC, GROUP)

    redriven = pull(engine)
    assert (ids_of(in_hand), ids_of(redriven)) == (["a1"], ["a0"])
    ack(engine, redriven)
    assert pull(engine) == [], "its settlement lets nobody go"
    ack(engine, in_hand)
    assert ids_of(pull(engine)) == ["a2"]


def test_what_waits_for_its_key_survives_a_restart_and_keeps_its_order(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, *["a"] * 200, "b")
    held = [*pull(engine), *pull(engine)]
    assert ids_of(held) == ["a0", "b200"]

    engine = open_engine()
    assert pull(engine) == []
    ack(engine, held)
    engine = open_engine()

    for number in range(1, 200):
        if number % 50 == 0:
            engine = open_engine()
        found = pull(engine)
        assert ids_of(found) == [f"a{number}"]
        ack(engine, found)
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_a_checkpoint_keeps_the_order(open_engine: type_of_open) -> None:
    engine = open_engine(segment_bytes=4096)
    declare(engine)
    publish(engine, *["a", "b", "-"] * 100)
    held = pull(engine, count=5)
    for _ in range(40):  # enough actions for several segments
        engine.settler.extend([one.receipt for one in held] * 20, invisible_ms=30_000)
    engine.writer.write_checkpoint()

    engine = open_engine(segment_bytes=4096)

    assert len(action_segments(engine.context.folder)) > 1
    gone: defaultdict[str, list[int]] = defaultdict(list)
    ack(engine, held)
    while found := pull(engine, count=5):
        ack(engine, found)
        held += found
    for one in held:
        gone[one.id[0]].append(int(one.id[1:]))
    assert gone["a"] == list(range(0, 300, 3))
    assert gone["b"] == list(range(1, 300, 3))
    assert sorted(gone["-"]) == list(range(2, 300, 3))


def test_a_seek_begins_the_order_anew(engine: Engine) -> None:
    declare(engine)
    publish(engine, "a", "a", "a")
    ack(engine, pull(engine))
    held = pull(engine)

    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert engine.settler.ack([held[0].receipt]) == ["stale"]
    assert ids_of(pull(engine)) == ["a0"]


def test_a_paused_group_hands_out_nothing_and_what_is_settled_meanwhile_counts(engine: Engine) -> None:
    declare(engine)
    publish(engine, "a", "a")
    held = pull(engine)
    engine.admin.pause(TOPIC, GROUP, paused=True)

    ack(engine, held)
    assert pull(engine) == []

    engine.admin.pause(TOPIC, GROUP, paused=False)
    assert ids_of(pull(engine)) == ["a1"]


def test_scheduled_messages_take_the_order_in_which_they_fell_due(engine: Engine, clock: ManualClock) -> None:
    declare(engine)
    publish(engine, "a", deliver_at_ms=clock.now_ms() + 2 * HOUR_MS)
    publish(engine, "a", first=1, deliver_at_ms=clock.now_ms() + HOUR_MS)
    publish(engine, "a", first=2)

    order = []
    for _ in range(3):
        found = pull(engine)
        order += ids_of(found)
        ack(engine, found)
        clock.advance(HOUR_MS)

    assert order == ["a2", "a1", "a0"]


def test_what_fell_due_before_the_wall_clock_stepped_back_waits_in_its_order_and_holds_no_other_key(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, "a", "b", deliver_at_ms=clock.now_ms() + HOUR_MS)
    clock.advance(HOUR_MS)
    engine.publisher.cancel([])  # what is due has taken its place in the topic
    publish(engine, "a", "c", first=2)
    clock.step_wall(-HOUR_MS)
    written = engine.log_figures()["actions_bytes"]

    first = pull(engine)
    assert [ids_of(first), *(ids_of(pull(engine)) for _ in range(2))] == [["c3"], [], []]
    assert engine.log_figures()["actions_bytes"] - written < 1_000, "each is put aside once"
    ack(engine, first)
    engine = open_engine()
    assert pull(engine) == []
    clock.advance(HOUR_MS)
    due = pull(engine)
    assert ids_of(due) == ["a0", "b1"]
    ack(engine, due)
    assert ids_of(pull(engine)) == ["a2"]


def test_what_a_filter_passes_over_holds_no_key(engine: Engine) -> None:
    declare(engine, text="type <> 'no'")
    engine.publisher.publish(
        [Message(id=f"m{number}", topic=TOPIC, body=b"", key="k", headers={"type": kind})
         for number, kind in enumerate(["yes", "no", "no", "yes"])]
    )  # fmt: skip

    first = pull(engine)
    assert ids_of(first) == ["m0"]
    ack(engine, first)

    assert ids_of(pull(engine)) == ["m3"]


def test_a_message_that_waits_for_its_key_is_not_acknowledged_by_what_looks_like_its_receipt(engine: Engine) -> None:
    declare(engine)
    publish(engine, "a", "a")
    pull(engine)

    assert engine.settler.ack([f"{TOPIC}/{GROUP}/1.{1 << 32 | 1}.0"]) == ["unknown"]
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 1


def test_order_that_is_taken_away_holds_for_what_the_group_came_past_and_for_nothing_else(engine: Engine) -> None:
    declare(engine)
    publish(engine, "a", "a", "b")
    held = pull(engine)

    declare(engine, ordered=False)
    publish(engine, "a", "a", first=3)

    assert ids_of(pull(engine)) == ["a3", "a4"]
    ack(engine, held)
    assert ids_of(pull(engine)) == ["a1"]


def test_order_that_is_given_later_holds_for_what_the_group_has_not_come_past(engine: Engine) -> None:
    declare(engine, ordered=False)
    publish(engine, "a", "a")
    assert len(pull(engine)) == 2

    declare(engine)
    publish(engine, "a", "a", first=2)

    assert ids_of(pull(engine)) == ["a2"]


def test_a_settlement_wakes_who_waits_for_the_next_of_its_key(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, "a", "a")
    held = pull(engine)
    woken = threading.Event()
    unsubscribe = engine.wakeups.subscribe(TOPIC, GROUP, woken.set)

    ack(engine, held)

    unsubscribe()
    assert woken.is_set()


def test_damage_to_a_message_that_waits_for_its_key_holds_nobody_up(open_engine: type_of_open) -> None:
    engine = open_engine()
    declare(engine)
    publish(engine, *["a"] * 100)
    held = pull(engine)
    segment = next((engine.context.folder / "messages").glob("*.segment"))
    data = bytearray(segment.read_bytes())
    for number in (2, 80):  # one is known by its place, the other has to be looked up again
        data[data.index(f"a{number}".encode() + b"\xa6orders")] ^= 1
    segment.write_bytes(data)

    gone = ids_of(held)
    while held:
        ack(engine, held)
        held = pull(engine)
        gone += ids_of(held)

    assert gone == [f"a{number}" for number in range(100) if number not in {2, 80}]
    assert len(engine.admin.dead(TOPIC, GROUP)[0]) == 2


def test_retention_that_drops_what_a_key_holds_lets_its_next_message_go(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(segment_bytes=4096, retention_ms=1_000, retention_drops_unread=True)
    declare(engine)
    for number in range(6):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x" * 3_000, key="k")])
    held = pull(engine)
    assert ids_of(held) == ["m0"]
    clock.advance(2_000)
    engine.publisher.publish([Message(id="m6", topic=TOPIC, body=b"", key="k")])

    assert engine.retention.drop_outdated() > 0

    lost = engine.counters()["dropped_unread", TOPIC, GROUP]
    assert lost > 1
    assert ids_of(pull(engine)) == [f"m{lost}"]


def test_retention_that_drops_what_is_being_looked_up_keeps_the_order_of_the_rest(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(
        segment_bytes=4096, retention_ms=1_000, retention_check_ms=10**15, retention_drops_unread=True
    )  # fmt: skip
    declare(engine)
    publish(engine, *["k"] * 80)
    kept = publish(engine, *["k"] * 5, *["-"] * 10, *["k"] * 21, first=80)  # in a segment of their own
    while held := pull(engine):
        ack(engine, held)
        if "k64" in ids_of(held):  # all that was known by its place: from here on the key is looked up
            break
    dropped: list[int] = []

    def dropping(*args: object, **options: object) -> object:
        found = real(*args, **options)  # type: ignore[arg-type]
        if not dropped:
            clock.advance(1_000)
            dropped.append(engine.retention.drop_outdated())
        return found

    real = puller.read_runs
    monkeypatch.setattr(puller, "read_runs", dropping)

    gone: list[str] = []
    while held := pull(engine):
        ack(engine, held)
        gone += ids_of(held)

    assert dropped == [1]
    assert gone == [one for one in kept if one[0] == "k"]
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_one_hot_key_with_thousands_costs_others_no_more_than_one_look_at_each(
    open_engine: type_of_open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(durability=Durability.OS)
    declare(engine)
    others = [f"k{number}" for number in range(20)]
    for start in range(0, 10_000, 1_000):
        publish(engine, *["hot"] * 998, *others[start // 500 : start // 500 + 2], first=start)
    read = 0

    def counting(*args: object, **options: object) -> object:
        nonlocal read
        found = real(*args, **options)  # type: ignore[arg-type]
        read += len(found)
        return found

    real = puller.read_runs
    monkeypatch.setattr(puller, "read_runs", counting)

    found = [one for _ in range(40) for one in pull(engine, count=5)]

    assert sorted(one.key or "" for one in found) == sorted(["hot", *others])
    assert read <= 2 * 10_000 + 40 * 16, "each message once to file it, and what is handed out once more"
    read = 0
    assert [pull(engine) for _ in range(10)] == [[]] * 10
    assert read == 0, "a pull that has to wait for a key reads nothing"
    for _ in range(300):
        held, *_ = [one for one in found if one.key == "hot"]
        ack(engine, [held])
        found = pull(engine)
        assert [one.key for one in found] == ["hot"]
    assert read <= 4 * 300, "the hot key's messages once to look them up, and once to hand them out"


def test_many_consumers_keep_the_order_of_every_key(folder: Path, random_seed: int) -> None:
    engine = Engine.open(folder)
    chance = Random(random_seed)
    declare(engine)
    keys = [chance.choice(["a", "b", "c", *(f"k{number:02}" for number in range(30))]) for _ in range(600)]
    publish(engine, *keys)
    order: dict[str, list[int]] = {key: [] for key in keys}
    in_hand: set[str] = set()
    problems: list[str] = []
    lock = threading.Lock()

    def consume(seed: int) -> None:
        mine = Random(seed)
        while sum(len(found) for found in order.values()) < 660:
            found = pull(engine, count=mine.randint(1, 8), wait_ms=100, invisible_ms=HOUR_MS)
            for one in found:
                key = one.key or ""
                with lock:
                    if key in in_hand:
                        problems.append(one.id)
                    in_hand.add(key)
                    order[key].append(int(one.id.removeprefix(key)))
            for one in mine.sample(found, len(found)):
                with lock:
                    in_hand.discard(one.key or "")
                engine.settler.ack([one.receipt])

    threads = [threading.Thread(target=consume, args=(random_seed + number,)) for number in range(8)]
    for one in threads:
        one.start()
    for number in range(60):
        publish(engine, chance.choice("abc"), first=1_000 + number)
    for one in threads:
        one.join(300)
    engine.close()

    assert problems == []
    assert sum(len(found) for found in order.values()) == 660
    assert all(found == sorted(found) for found in order.values())
