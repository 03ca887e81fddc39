"""Editing dead letters: the group in which they died gets what they become, once, under another id, and no other group;
durably, with who and why in the action log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal.dead_letter_records import Edited
from outbox_core.messages.message import (
    DUE_HEADER,
    EDITED_HEADER,
    DeadEdit,
    DeadFilter,
    EditResult,
    GroupConfig,
    Message,
)
from tests.outbox_broker.action_log import actions_of

TOPIC, GROUP, OTHERS = "orders", "billing", "mail"
DAY_MS = 86_400_000
ONCE = EditOperation(name="op-1", by="ops", why="typo")
AGAIN = EditOperation(name="op-2", by="ops", why="typo")
EU = DeadEdit(headers={"region": "eu"})
type_of_open = Callable[..., Engine]


def die(engine: Engine, *ids: str, reason: str = "broken", key: str | None = None, **headers: str) -> None:
    """Messages of which the group gives up at the first attempt."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.admin.declare_group(TOPIC, OTHERS, GroupConfig())
    engine.publisher.publish([Message(id=one, topic=TOPIC, key=key, headers=headers, body=b"x") for one in ids])
    die_of(engine, reason=reason)


def die_of(engine: Engine, *, reason: str = "broken") -> None:
    """The group gives up on all that is ready."""
    receipts = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000)]
    engine.settler.nack(receipts, delay_ms=0, reason=reason)


def dead(engine: Engine) -> list[str]:
    return [one.id for one in engine.admin.dead(TOPIC, GROUP, limit=1_000)[0]]


def edit(engine: Engine, edits: Mapping[str, DeadEdit], operation: EditOperation = ONCE) -> list[EditResult]:
    return engine.dead_letters.edit(TOPIC, GROUP, edits, operation=operation)


def new_ids(results: list[EditResult]) -> list[str]:
    return [one.new_id or "" for one in results]


def pulled(engine: Engine, group: str = GROUP) -> list[tuple[str, bytes, dict[str, str]]]:
    found = engine.puller.pull(TOPIC, group, max_messages=1_000)
    return [(one.id, one.body, dict(one.headers)) for one in found]


def acked(engine: Engine, group: str = GROUP) -> list[str]:
    found = engine.puller.pull(TOPIC, group, max_messages=1_000)
    assert set(engine.settler.ack([one.receipt for one in found])) <= {"acked"}
    return [one.id for one in found]


def test_the_group_in_which_it_died_gets_what_was_edited_at_once_and_no_other_group_does(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine()
    die(engine, "m0", "m1", "m2", key="k1", region="us", part="1")
    clock.advance(1_000)

    [one] = edit(engine, {"m1": DeadEdit(body=b"y", headers={"region": "eu"}, remove_headers=("part",))})

    assert (one.id, one.status) == ("m1", "edited")
    assert dead(engine) == ["m0", "m2"]
    [delivery] = engine.puller.pull(TOPIC, GROUP)
    assert (delivery.id, delivery.topic, delivery.key, delivery.body) == (one.new_id, TOPIC, "k1", b"y")
    assert dict(delivery.headers) == {"region": "eu", EDITED_HEADER: "m1"}
    assert (delivery.attempt, delivery.created_at_ms, delivery.deliver_at_ms) == (1, clock.now_ms(), None)
    assert [id_ for id_, _, _ in pulled(engine, OTHERS)] == ["m0", "m1", "m2"]
    assert [one.id for one in engine.reader.read(TOPIC, start="earliest").messages] == ["m0", "m1", "m2"]
    assert engine.counters()["edited", TOPIC, GROUP] == 1
    assert engine.settler.ack([delivery.receipt]) == ["acked"]
    assert engine.settler.ack([delivery.receipt]) == ["already_acked"]
    [action] = [one for one in actions_of(folder) if isinstance(one, Edited)]
    [(sequence, _, _, new_id)] = action.entries
    assert (action.by, action.why, sequence, new_id) == ("ops", "typo", 1, one.new_id)


def test_an_edit_outlives_restarts_with_and_without_a_checkpoint_until_it_is_settled(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    die(engine, "m0", "m1")
    [new_id] = new_ids(edit(engine, {"m0": EU}))
    engine = open_engine()
    assert [id_ for id_, _, _ in pulled(engine)] == [new_id]
    engine.writer.write_checkpoint()
    engine = open_engine()
    clock.advance(30_000)

    assert dead(engine) == [new_id, "m1"], "its one attempt ran out"
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=[new_id]) == 1
    assert acked(engine) == [new_id]
    engine = open_engine()

    assert pulled(engine) == []
    assert dead(engine) == ["m1"]
    assert edit(engine, {"m0": EU})[0].new_id == new_id, "a repeat is known after restarts"


def test_a_repeat_of_an_operation_edits_nothing_twice_and_says_the_same(engine: Engine) -> None:
    die(engine, "m0", "m1")
    first = edit(engine, {"m0": EU, "m1": EU, "m9": EU})

    repeated = edit(engine, {"m0": EU, "m1": EU, "m9": EU})

    assert [one.status for one in first] == ["edited", "edited", "not_dead"]
    assert repeated == first
    assert [one.status for one in edit(engine, {"m0": EU}, AGAIN)] == ["not_dead"]
    assert acked(engine) == new_ids(first)[:2]
    assert edit(engine, {"m0": EU, "m1": EU, "m9": EU}) == first
    assert pulled(engine) == []


def test_what_is_dead_again_under_its_former_id_needs_another_operation(engine: Engine) -> None:
    die(engine, "m0")
    [first] = edit(engine, {"m0": EU})
    acked(engine)
    engine.admin.seek(TOPIC, GROUP, to_offset=0)
    assert [id_ for id_, _, _ in pulled(engine)] == ["m0"], "what was published is delivered again"
    engine.admin.seek(TOPIC, GROUP, to_offset=0)
    die_of(engine)

    [refused] = edit(engine, {"m0": EU})
    [second] = edit(engine, {"m0": EU}, AGAIN)

    assert (refused.status, second.status) == ("refused", "edited")
    assert "another operation" in (refused.error or "")
    assert second.new_id != first.new_id
    assert acked(engine) == [second.new_id]


def test_what_was_edited_may_be_edited_again_redriven_and_discarded_by_its_new_id(engine: Engine) -> None:
    die(engine, "m0", "m1", "m2")
    edited = new_ids(edit(engine, {"m0": EU, "m1": EU, "m2": EU}))
    die_of(engine)
    assert dead(engine) == edited

    [twice] = edit(engine, {edited[0]: DeadEdit(body=b"z")}, AGAIN)
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=[edited[1]]) == 1
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=[edited[2]], by="ops", why="wrong") == 1

    assert pulled(engine) == [
        (twice.new_id, b"z", {"region": "eu", EDITED_HEADER: edited[0]}),
        (edited[1], b"x", {"region": "eu", EDITED_HEADER: "m1"}),
    ]
    assert dead(engine) == []


def test_what_exceeds_a_limit_is_refused_and_stays_dead_as_it_was(engine: Engine) -> None:
    die(engine, "m0", "m1")

    results = edit(engine, {"m0": DeadEdit(headers={"big": "x" * 40_000}), "m1": EU})

    assert [one.status for one in results] == ["refused", "edited"]
    assert "more than the 32,768 allowed" in (results[0].error or "")
    assert dead(engine) == ["m0"]
    with pytest.raises(InvalidMessage, match="what to change"):
        DeadEdit()
    with pytest.raises(InvalidMessage, match="say why"):
        EditOperation(name="op", by="ops", why="")
    with pytest.raises(InvalidMessage, match="message id"):
        EditOperation(name="no name", by="ops", why="typo")
    with pytest.raises(KeyError, match="no consumer group"):
        engine.dead_letters.edit(TOPIC, "unknown", {"m0": EU}, operation=ONCE)


def test_many_are_edited_by_what_they_have_in_common_page_by_page(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(dead_search_messages_max=3)
    die(engine, *(f"a{number}" for number in range(5)), reason="no region")
    die(engine, *(f"b{number}" for number in range(2)), reason="time out")
    counted = engine.dead_letters.count(TOPIC, GROUP)
    clock.advance(1)
    die(engine, "a5", reason="no region")
    found: list[EditResult] = []
    sizes = []
    after: int | None = 0
    while after is not None:
        page = engine.dead_letters.edit_page(
            TOPIC, GROUP, EU, where=DeadFilter(reason="region"), dead_before_ms=counted.dead_before_ms, after=after,
            operation=ONCE,
        )  # fmt: skip
        found, after = found + page.results, page.next
        sizes.append(len(page.results))

    assert [one.id for one in found] == [f"a{number}" for number in range(5)]
    assert sizes == [3, 2, 0]
    assert dead(engine) == ["b0", "b1", "a5"]
    assert acked(engine) == new_ids(found)
    with pytest.raises(InvalidMessage, match="named by its id"):
        engine.dead_letters.edit_page(TOPIC, GROUP, DeadEdit(body=b"y"), operation=ONCE)
    with pytest.raises(InvalidMessage, match="a time alone"):
        engine.dead_letters.edit_page(TOPIC, GROUP, EU, where=DeadFilter(to_ms=1), operation=ONCE)


def test_an_id_that_is_dead_twice_is_edited_twice_to_one_id(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=1, dead_search_messages_max=1)
    for message_id in ("m0", "m1", "m0"):
        die(engine, message_id)

    [one] = edit(engine, {"m0": EU})

    assert one.status == "edited"
    assert [id_ for id_, _, _ in pulled(engine)] == [one.new_id, one.new_id]
    assert dead(engine) == ["m1"]


def test_a_message_that_was_due_long_ago_is_edited_without_its_due_time(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    due_ms = clock.now_ms() + 1_000
    engine.publisher.publish(
        [Message(id="m0", topic=TOPIC, body=b"x", headers={DUE_HEADER: str(due_ms)}, deliver_at_ms=due_ms)]
    )
    clock.advance(1_000)
    die_of(engine)

    edit(engine, {"m0": EU})

    [delivery] = engine.puller.pull(TOPIC, GROUP)
    assert delivery.deliver_at_ms is None
    assert dict(delivery.headers) == {"region": "eu", EDITED_HEADER: "m0"}


@pytest.mark.parametrize("ordered", [False, True])
def test_fresh_messages_and_retries_come_beside_what_was_edited(engine: Engine, ordered: bool) -> None:
    die(engine, "m0", "m1", "m2", key="k1")
    if ordered:
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1, ordered=True))
    engine.publisher.publish([Message(id="m3", topic=TOPIC, key="k1", body=b"x")])
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["m0", "m2"]) == 2
    [new_id] = new_ids(edit(engine, {"m1": EU}))

    assert sorted(acked(engine)) == sorted(["m0", new_id, "m2", "m3"])
    assert pulled(engine) == []


def test_what_was_edited_and_settled_holds_no_segment_back_and_what_is_not_is_moved(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(
        segment_bytes=4096, checkpoint_bytes=4096, retention_ms=DAY_MS, retention_check_ms=10**15
    )  # fmt: skip
    die(engine, "first")
    acked(engine, OTHERS)
    fill(engine)
    [new_id] = new_ids(edit(engine, {"first": DeadEdit(body=b"y")}))
    fill(engine, but=new_id)
    clock.advance(DAY_MS)
    engine.publisher.publish([Message(id="new", topic=TOPIC, body=b"x")])
    assert engine.retention.drop_outdated() > 10
    assert engine.cleaner.moved_messages > 0
    engine = open_engine(
        segment_bytes=4096, checkpoint_bytes=4096, retention_ms=DAY_MS, retention_check_ms=10**15
    )  # fmt: skip

    found = engine.puller.pull(TOPIC, GROUP, max_messages=100)

    assert [(one.id, one.body) for one in found if one.id == new_id] == [(new_id, b"y")]
    engine.settler.ack([one.receipt for one in found])
    acked(engine)
    fill(engine)
    clock.advance(DAY_MS)
    engine.publisher.publish([Message(id="newer", topic=TOPIC, body=b"x")])
    moved = engine.cleaner.moved_messages
    assert engine.retention.drop_outdated() > 10
    assert engine.cleaner.moved_messages == moved


def fill(engine: Engine, *, but: str = "") -> None:
    """More than ten segments of messages, which both groups settle, but for one message."""
    start = engine.admin.topic_figures(TOPIC)["stored"]
    for batch in range(16):
        engine.publisher.publish(
            [Message(id=f"m{start + batch}-{one}", topic=TOPIC, body=b"x" * 500) for one in range(8)]
        )
        acked(engine, OTHERS)
        found = engine.puller.pull(TOPIC, GROUP, max_messages=10, invisible_ms=60_000)
        engine.settler.ack([one.receipt for one in found if one.id != but])


def test_what_is_edited_while_it_is_redriven_by_another_is_delivered_once(engine: Engine) -> None:
    die(engine, "m0", "m1")
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["m0"]) == 1

    [gone, there] = edit(engine, {"m0": EU, "m1": EU})

    assert (gone.status, there.status) == ("not_dead", "edited")
    assert acked(engine) == ["m0", there.new_id]


def test_a_deleted_group_takes_its_edits_along(open_engine: type_of_open) -> None:
    engine = open_engine()
    die(engine, "m0")
    edit(engine, {"m0": EU})
    engine.deletion.delete_group(TOPIC, GROUP, force=True)

    assert [id_ for id_, _, _ in pulled(open_engine())] == ["m0"]


def test_the_memory_of_edits_counts_as_that_of_dead_letters_until_they_are_settled(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(dead_letters_bytes_max=2_000)
    die(engine, *(f"m{number}" for number in range(10)))
    edit(engine, {f"m{number}": EU for number in range(10)})
    engine.writer.write_checkpoint()
    engine = open_engine(dead_letters_bytes_max=2_000)
    first, *others = engine.puller.pull(TOPIC, GROUP)

    engine.settler.nack([first.receipt], delay_ms=0, reason="broken")
    dead_beside_others = dead(engine)
    engine.settler.ack([one.receipt for one in others])
    clock.advance(60_000)

    assert len(others) == 9
    assert dead_beside_others == [], "it is put off"
    assert dead(engine) == [first.id]
