"""A consumer killed at any step of a delivery's journey: nothing is lost, and no effect happens twice."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from broker_adapter.http import HttpBroker
from outbox import Consumer, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.testing import AdvancingClock
from outbox_core import Delivery, GroupConfig, Message
from tests.broker_adapter.servers import served
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.consuming import poisoned_consumer
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import WatchedBroker, message

pytestmark = pytest.mark.processes

CHILD = "tests.outbox.consuming.dying_consumer"
POISONED = "tests.outbox.consuming.poisoned_consumer"
INVISIBLE_MS = 60_000
POISONED_INVISIBLE_MS = 1_500
"""Longer than a slow machine takes from a pull to the handler: what waits longer is given back untried."""

POINTS = {
    # point: how many effects the dead one leaves, at least and at most: acks go beside the handling
    "pulled": (0, 0),
    "effect done": (1, 1),
    "before commit": (1, 1),
    "after commit": (2, 2),
    "committed": (2, 3),
    "acked": (2, 3),
}


def run_until_killed(point: str, shop: Shop, folder: Path) -> None:
    """Run the dying process; anything but its death by SIGKILL is a failure of the test."""
    arguments = [point, shop.database.url, shop.database.schema or "", f"embedded:{folder}", str(INVISIBLE_MS)]
    with shop.last_connections_ended():
        done = fork_server().run(CHILD, *arguments, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("point", POINTS)
def test_a_consumer_killed_at_any_step_loses_nothing_and_does_nothing_twice(
    shop: Shop, tmp_path: Path, point: str, watched: WatchedBroker
) -> None:
    watched.publish([message(number) for number in (1, 2, 3)])
    watched.close()

    run_until_killed(point, shop, tmp_path / "watched")

    left, (least, most) = shop.payments(), POINTS[point]
    assert left == [1, 2, 3][: len(left)]
    assert least <= len(left) <= most
    later = AdvancingClock()
    later.advance(INVISIBLE_MS)
    again = WatchedBroker(tmp_path / "watched", clock=later)
    unsettled = unsettled_of(again)
    assert unsettled <= 3 - (point == "acked") * 2
    with ConsumerRunner([paying(shop)], broker=again) as runner:
        again.wait_for(lambda: again.acked == unsettled)
    figures = again.admin.figures("orders", "payments")
    again.close()
    assert shop.payments() == [1, 2, 3]
    assert runner.figures.handled == 3 - len(left)
    assert runner.figures.deduplicated == unsettled - runner.figures.handled
    assert (figures["backlog"], figures["in_flight"], figures["dead"]) == (0, 0, 0)
    with shop.engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(shop.tables.inbox)) == 3


@pytest.mark.parametrize("place", range(3))
def test_a_message_that_kills_its_consumer_is_the_only_dead_letter_whatever_waited_behind_it(
    tmp_path: Path, place: int
) -> None:
    with served(tmp_path / "broker") as server, closing(HttpBroker(server.url)) as broker:
        broker.admin.declare_group(poisoned_consumer.TOPIC, poisoned_consumer.GROUP, GroupConfig(max_attempts=3))
        bodies = [b"innocent"] * 12
        bodies[place] = poisoned_consumer.POISON
        broker.publish(
            [Message(id=f"m{number}", topic=poisoned_consumer.TOPIC, body=body) for number, body in enumerate(bodies)]
        )

        deaths = 0
        command = [POISONED, server.url, str(POISONED_INVISIBLE_MS)]
        while fork_server().run(*command, env=environment()).returncode == -signal.SIGKILL:
            deaths += 1

        letters, _ = broker.admin.dead(poisoned_consumer.TOPIC, poisoned_consumer.GROUP)
        assert [(letter.id, letter.attempts) for letter in letters] == [(f"m{place}", 3)]
        assert deaths == 4  # at the first of them nobody knew which message it was


def test_a_death_counts_although_a_consumer_gave_the_message_back_untried_before(tmp_path: Path) -> None:
    topic, group = poisoned_consumer.TOPIC, poisoned_consumer.GROUP
    with served(tmp_path / "broker") as server, closing(HttpBroker(server.url)) as broker:
        broker.admin.declare_group(topic, group, GroupConfig(max_attempts=3))
        broker.publish([Message(id="m0", topic=topic, body=poisoned_consumer.POISON)])

        command = [POISONED, server.url, str(POISONED_INVISIBLE_MS)]
        for deaths_left in (3, 2, 1, 0):  # at the first of them nobody suspects it
            assert fork_server().run(*command, env=environment()).returncode == -signal.SIGKILL
            if deaths_left:
                [delivery] = broker.pull(topic, group, wait_ms=20_000, invisible_ms=INVISIBLE_MS, begins=True)
                broker.nack([delivery.receipt], counts=False, reason="consumer stops")

        assert fork_server().run(*command, env=environment()).returncode == 0
        [letter], _ = broker.admin.dead(topic, group)
        assert (letter.id, letter.attempts) == ("m0", 3)


def unsettled_of(broker: WatchedBroker) -> int:
    figures = broker.admin.figures("orders", "payments")
    return figures["backlog"] + figures["in_flight"]


def paying(shop: Shop) -> Consumer:
    """The same consumer, in good health."""

    @consumer("orders", group="payments", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))

    return pay
