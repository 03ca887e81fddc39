"""Servers that fail under an Outbox and a compensator: what is committed is stored once or more, in order of its key.

A test module of an engine imports all of these tests and has a fixture `faulty`: an EngineUnderFault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Message
from tests.compensator.serving import WatchedMetrics, serving
from tests.engines.engine_under_fault import EngineUnderFault
from tests.engines.outbox_load import ROWS_MAX, Load, first_copies_by_key, wait_for
from tests.engines.recorded_broker import recorded_broker
from tests.fixtures.databases import Database
from tests.outbox.shop import Shop, open_shop

WAIT_SECONDS = 300
TIMEOUT_MS = 2_000
"""Shorter than an election, so that publishes end without an answer and the compensator has work."""
CUT_BYTES = 3_000
"""In the middle of a batch of the load, or of the one behind it."""


@pytest.fixture
def shop(sqlite: Database) -> Iterator[Shop]:
    """A shop on SQLite."""
    with open_shop(sqlite) as opened:
        yield opened


def leader_killed(engine: EngineUnderFault, topic: str) -> None:
    """A crash."""
    engine.kill_leader(topic)


def leader_paused(engine: EngineUnderFault, topic: str) -> None:
    """A machine that hangs."""
    engine.pause_leader(topic)


def network_partitioned(engine: EngineUnderFault, topic: str) -> None:
    """The server that clients publish through cannot be reached, and does not say so."""
    engine.proxy_in_use(topic).partition()


def connections_cut(engine: EngineUnderFault, topic: str) -> None:
    """Each proxy cuts the next connection that carries so many bytes."""
    for proxy in engine.proxies:
        proxy.cut_after(request_bytes=CUT_BYTES)


def answers_cut(engine: EngineUnderFault, topic: str) -> None:
    """What was in the last answer is stored, and nobody knows it."""
    for proxy in engine.proxies:
        proxy.cut_after(answer_bytes=1)


@pytest.mark.parametrize("fault", [leader_killed, leader_paused, network_partitioned, connections_cut, answers_cut])
def test_a_fault_under_load_loses_no_message_and_no_order_of_a_key(
    faulty: EngineUnderFault, shop: Shop, topic: str, fault: Callable[[EngineUnderFault, str], None]
) -> None:
    check_fault_under_load(faulty, shop, topic, fault)


def check_fault_under_load(
    faulty: EngineUnderFault,
    shop: Shop,
    topic: str,
    fault: Callable[[EngineUnderFault, str], object],
    *,
    is_ridden_over: bool = False,
) -> None:
    """Commit while a fault comes and goes. All is stored then, each as often as it was in doubt, and once more.

    `is_ridden_over`: the other servers take over, and messages are accepted, before the fault goes.
    """
    faulty.make_ordered_topic(topic)
    metrics, in_doubt = WatchedMetrics(), Counter[str]()
    broker = recorded_broker(faulty.url, in_doubt, timeout_ms=TIMEOUT_MS)
    box = shop.box(broker, ordered={topic})
    load = Load(shop, box, topic)
    service, close = serving([shop], [broker], metrics=metrics)

    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        for end in (lambda: end_faults(faulty), broker.close, box.close, close, service.stop, load.end):
            ending.callback(end)
        service.start()
        loading = pool.submit(load.run)
        load.wait_for_more(100)
        committed = len(load.ids)
        fault(faulty, topic)
        # Until the fault has struck, or the other servers have taken over.
        wait_for(lambda: len(in_doubt) > 0 or len(load.ids) > committed + 2 * ROWS_MAX)
        if is_ridden_over:
            load.wait_for_more(100)
        restore(faulty)
        load.wait_for_more(100)
        load.end()
        loading.result(WAIT_SECONDS)
        wait_for(lambda: not load.left())
        partitions = faulty.read_partitions(topic)

    copies = Counter(one.id for partition in partitions for one in partition)
    repeated = copies - Counter(set(load.ids))
    print(f"{len(load.ids)} committed, {len(in_doubt)} in doubt, {repeated.total()} duplicates, {metrics.breakers}")
    assert set(copies) == set(load.ids)
    assert [one for one in copies if copies[one] > (1 + in_doubt[one]) * faulty.copies_per_publish_max] == []
    for partition in partitions:
        for numbers in first_copies_by_key(partition).values():
            assert numbers == sorted(numbers)


def test_while_no_server_can_be_reached_no_attempt_is_counted_and_the_breaker_opens_until_one_can(
    faulty: EngineUnderFault, shop: Shop, topic: str
) -> None:
    faulty.make_ordered_topic(topic)
    metrics, in_doubt = WatchedMetrics(), Counter[str]()
    broker = recorded_broker(faulty.url, in_doubt, timeout_ms=TIMEOUT_MS)
    service, close = serving([shop], [broker], metrics=metrics)

    with ExitStack() as ending:
        for end in (lambda: restore(faulty), broker.close, close, service.stop):
            ending.callback(end)
        wait_for(lambda: is_taken(broker, Message(id="before", topic=topic, body=b"x")))  # a new connection is slow
        for proxy in faulty.proxies:
            proxy.partition()
        ids = shop.add_due(50, topic=topic)
        service.start()
        metrics.wait_for(lambda it: it.breakers.count("open") >= 3)
        waiting = shop.rows()
        restore(faulty)
        wait_for(lambda: is_taken(broker, Message(id="after", topic=topic, body=b"x")))  # else rows wait a minute more
        shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == len(ids))
        partitions = faulty.read_partitions(topic)

    copies = Counter(one.id for partition in partitions for one in partition)
    print(f"{in_doubt.total()} in doubt, {copies.total() - len(copies)} duplicates, {metrics.breakers}")
    assert {(row["state"], row["attempts"] <= 2) for row in waiting} == {("pending", True)}
    assert metrics.breakers[-1] in {"closing", "closed"}  # by the first claim after its ramp
    assert set(copies) == {*ids, "before", "after"}
    assert [one for one in copies if copies[one] > (1 + in_doubt[one]) * faulty.copies_per_publish_max] == []


def is_taken(broker: Broker, message: Message) -> bool:
    """Publish it once."""
    try:
        return broker.publish([message])[0].status.is_success
    except BrokerError:
        return False


def end_faults(engine: EngineUnderFault) -> None:
    """Restore, without the cuts that no connection has come to: they would meet another test, or a replica."""
    for proxy in engine.proxies:
        proxy.cut_after()
    restore(engine)


def restore(engine: EngineUnderFault) -> None:
    """Mend the network, then the servers."""
    for proxy in engine.proxies:
        proxy.heal()
    engine.restore()
