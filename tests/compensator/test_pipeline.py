"""A backlog goes in three steps side by side: nothing is lost, misordered or left leased when one ends early."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox_core import ManualClock, Message
from outbox_core.common.errors import BrokerUnavailable, DatabaseUnavailable
from tests.compensator.serving import WAIT_SECONDS, Serve, Simulation, Sources, WatchedMetrics, name_of, split
from tests.compensator.test_many_sources import Told
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop


class Counted:
    """Counts calls of a step, and lets a test wait for so many."""

    def __init__(self, step: Callable[..., Any], *, before: Callable[[int], None] = lambda _: None) -> None:
        self._step = step
        self._before = before
        self._changed = threading.Condition()
        self.begun = self.ended = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.begun += 1
        self._before(self.begun)
        result = self._step(*arguments, **named)
        with self._changed:
            self.ended += 1
            self._changed.notify_all()
        return result

    def wait_for(self, ended: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended >= ended, WAIT_SECONDS)


@pytest.mark.parametrize("good", [1, 2, 3, 5])
def test_an_outage_among_many_batches_gives_back_what_was_claimed_ahead(
    mysql_shop: Shop, sources: Sources, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    ids = mysql_shop.add_due(200)

    def rule(_batch: Sequence[Message]) -> None:
        if len(broker.batches) > good:
            claims.wait_for(good + 2)  # the next batch is ours by now
            raise BrokerUnavailable("down")

    broker = RecordingBroker(rule)
    source = sources(mysql_shop, broker)
    claims = Counted(source.batches.claim)
    monkeypatch.setattr(source.batches, "claim", claims)

    turn = Simulation([source], clock, batch_rows=10).step()

    left = mysql_shop.rows()
    assert turn.report.outage is not None
    assert len(broker.batches) == good + 1, "something was sent after the outage"
    assert sorted([*broker.ids, *(row["id"] for row in left)]) == ids
    assert {row["token"] for row in left} <= {None, "d" * 32}, "a row was left leased"
    assert {row["attempts"] for row in left} == {1}


def test_ordered_keys_go_on_in_order_while_the_batch_before_is_not_settled(
    mysql_shop: Shop, sources: Sources, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RecordingBroker()
    box = mysql_shop.box(broker, sender=NO_SENDER, ordered={"topic"})
    for number in range(60):
        with Session(mysql_shop.engine) as session, session.begin():
            for key in "abc":
                box.publish("topic", f"{number}", key=key, session=session)
    mysql_shop.end_leases()
    source, batches = sources(mysql_shop, broker), 180 // 10
    sends = Counted(source.batches.send)
    settles = Counted(
        source.batches.settle, before=lambda number: sends.wait_for(number + 1) if 1 < number < batches else None
    )
    monkeypatch.setattr(source.batches, "send", sends)
    monkeypatch.setattr(source.batches, "settle", settles)

    turn = Simulation([source], clock, batch_rows=10).step()

    by_key: dict[str, list[int]] = defaultdict(list)
    for message in broker.stored:
        by_key[message.key or ""].append(int(message.body))
    assert by_key == {key: list(range(60)) for key in "abc"}
    assert (turn.report.batches, turn.report.held) == (batches, 0)
    assert mysql_shop.rows() == []


def test_what_was_sent_while_the_batch_before_could_not_be_settled_is_settled_and_not_sent_again(
    mysql_shop: Shop, sources: Sources, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = mysql_shop.add_due(100)
    broker = RecordingBroker()
    source = sources(mysql_shop, broker)
    sends = Counted(source.batches.send)

    def fail_the_second(number: int) -> None:
        if number == 2:
            sends.wait_for(3)
            raise DatabaseUnavailable("down")

    settles = Counted(source.batches.settle, before=fail_the_second)
    monkeypatch.setattr(source.batches, "send", sends)
    monkeypatch.setattr(source.batches, "settle", settles)

    with pytest.raises(DatabaseUnavailable):
        Simulation([source], clock, batch_rows=10).step()

    left = {row["id"] for row in mysql_shop.rows()}
    assert len(broker.ids) == 30
    assert left == set(ids) - {*broker.ids[:10], *broker.ids[20:]}, "only the second batch is sent again"


def test_a_full_table_lets_the_others_go_before_its_next_batch(
    mysql_shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    full, other = split(mysql_shop, range(2))
    mysql_shop.add_due(500, prefix="full", table=full)
    late = mysql_shop.add_due(3, prefix="other", table=other)
    broker = RecordingBroker()

    Simulation([sources(mysql_shop, broker)], clock, batch_rows=50).step()

    assert set(late) <= set(broker.ids[:100])


def test_a_source_that_is_lost_in_its_turn_is_let_go_of_before_the_next_claim(
    shop: Shop, serve: Serve, metrics: WatchedMetrics
) -> None:
    told = Told(name_of(shop))
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    broker = RecordingBroker(hang)
    shop.add_due(100)
    service = serve(shop, broker, assignment=told, beat_ms=20)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    told.mine = frozenset()
    metrics.wait_for(lambda it: it.beats[-1] == (0, 0))
    go_on.set()
    metrics.wait_for(lambda it: bool(it.turns))  # the turn ended by itself, with nobody stopping the service

    assert (len(broker.stored), len(shop.rows())) == (10, 90)
