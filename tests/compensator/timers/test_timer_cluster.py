"""The timer worker on a real cluster: adds that a failover loses, a master that is paused, slots that move."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest

from compensator.service.timer_worker import TimerWorker
from outbox import Outbox
from outbox_core import Message, SystemClock
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_cluster import RedisClusterServers, redirections, redis_cluster
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import SOON, held, move, opened, patient, source_over, timer, worker_over
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

pytestmark = pytest.mark.slow

SLOTS = 16
HOUR = timedelta(hours=1)
SOON_DUE = timedelta(milliseconds=300)


@pytest.fixture
def cluster() -> Iterator[RedisClusterServers]:
    """A cluster of the test's own."""
    with redis_cluster() as joined:
        yield joined


@pytest.fixture
def url(cluster: RedisClusterServers) -> str:
    return f"{cluster.url}?name=shop&slots={SLOTS}&timeout_ms=2000"


@pytest.fixture
def store(url: str) -> Iterator[TimingStore]:
    with opened(url) as found:
        yield found


@pytest.fixture
def worker(mysql_shop: Shop, prompt: PromptBroker, url: str, serve: Serve, store: TimingStore) -> Iterator[TimerWorker]:
    """That of a service, which also polls; its timing store is complete."""
    with source_over(mysql_shop, prompt) as source:
        running = TimerWorker(source, connect_timing(url), options=SOON, metrics=WatchedMetrics(), clock=SystemClock())
        service = serve(mysql_shop, prompt, timers=[running])
        service.start()
        assert wait_until(lambda: is_complete(store))
        yield running
        assert service.stop()


def is_complete(store: TimingStore) -> bool:
    return all(one.complete for one in store.figures())


def due_key(slot: int) -> str:
    return f"outbox:timing:{{shop:{slot}}}:due"


def generation_key(slot: int) -> str:
    return f"outbox:timing:{{shop:{slot}}}:generation"


def schedule(box: Outbox, count: int, *, delay: timedelta) -> list[Message]:
    with box.begin():
        return [box.publish("reminder", {"n": number}, delay=delay) for number in range(count)]


def schedule_until(box: Outbox, reached: Callable[[], bool]) -> list[Message]:
    """Schedule messages, due soon, until the condition holds, and some more."""
    messages: list[Message] = []

    def goes_on() -> bool:
        messages.extend(schedule(box, 5, delay=SOON_DUE))
        return reached()

    assert wait_until(goes_on)
    return [*messages, *schedule(box, 20, delay=SOON_DUE)]


def assert_each_was_sent_once(prompt: PromptBroker, shop: Shop, messages: Sequence[Message]) -> None:
    """What the database still has is sent later: so first wait until it has none of them."""
    assert wait_until(lambda: not shop.rows())
    assert sorted(prompt.ids) == sorted(one.id for one in messages)
    assert prompt.duplicates == []
    assert shop.archived() == len(messages)


def is_master(server: RedisServer) -> bool:
    return re.search(rb"role:master", server.ask("INFO", "replication")) is not None


def test_timers_that_a_failover_lost_after_they_were_acknowledged_fire_by_the_polls(
    mysql_shop: Shop, prompt: PromptBroker, cluster: RedisClusterServers, url: str, store: TimingStore, serve: Serve
) -> None:
    with worker_over(mysql_shop, prompt, url):
        assert wait_until(lambda: is_complete(store))
    victim = cluster.masters[0]
    heir = cluster.replica_of(victim)
    cluster.wait_until_replicated(victim)
    with heir.paused():
        victim.ask("CLIENT", "KILL", "TYPE", "replica")  # else the replica reads on, once it is resumed
        box = mysql_shop.box(prompt, timing=patient(url))
        messages = schedule(box, 64, delay=HOUR)
        assert box.close()
        assert held(store) == (64, 0), "all were acknowledged"
        lost = sum(victim.ask("ZCARD", due_key(slot)) for slot in on(cluster, victim))
        assert 0 < lost < 64
        victim.kill()
    assert wait_until(lambda: is_master(heir))

    assert wait_until(lambda: held(store) == (64 - lost, 0))
    assert is_complete(store), "no generation shows it"
    move(mysql_shop, in_ms=0)
    serve(mysql_shop, prompt).start()
    with worker_over(mysql_shop, prompt, url):
        prompt.wait_for(lambda broker: len(broker.stored) >= 64)
        assert_each_was_sent_once(prompt, mysql_shop, messages)


def test_while_a_master_is_paused_and_after_it_comes_back_each_row_is_sent_once(
    mysql_shop: Shop, prompt: PromptBroker, cluster: RedisClusterServers, url: str, worker: TimerWorker
) -> None:
    victim = cluster.masters[1]
    heir = cluster.replica_of(victim)
    box = mysql_shop.box(prompt, timing=url)
    messages = schedule_until(box, lambda: len(prompt.ids) >= 50)
    with victim.paused():
        messages += schedule_until(box, lambda: is_master(heir))
    messages += schedule_until(box, lambda: not is_master(victim))
    messages += schedule_until(box, lambda: worker.problem is None)
    assert box.close()

    assert_each_was_sent_once(prompt, mysql_shop, messages)


def test_a_worker_goes_on_where_the_slots_of_its_timers_move_in_the_middle_of_its_scripts(
    mysql_shop: Shop, prompt: PromptBroker, cluster: RedisClusterServers, url: str, store: TimingStore,
    worker: TimerWorker,
) -> None:  # fmt: skip
    source, target = cluster.masters[:2]
    moved = on(cluster, source)
    assert moved
    box = mysql_shop.box(prompt, timing=url)
    later = schedule(box, 64, delay=HOUR)
    messages = schedule_until(box, lambda: held(store)[0] >= 64 and len(prompt.ids) >= 50)
    for slot in moved:
        messages += reshard(cluster, slot, box, source=source, target=target)
    messages += schedule_until(box, lambda: worker.problem is None)
    assert box.close()

    assert wait_until(lambda: len(mysql_shop.rows()) == len(later))
    assert wait_until(lambda: held(store) == (len(later), 0))
    assert is_complete(store), "nothing was lost, so nothing was rebuilt"
    assert redirections(source)["ASK"] + redirections(source)["TRYAGAIN"] >= len(moved)
    assert redirections(source)["MOVED"] >= 1
    move(mysql_shop, in_ms=0)
    store.add([timer(mysql_shop, one.id) for one in later])
    assert_each_was_sent_once(prompt, mysql_shop, [*messages, *later])


def on(cluster: RedisClusterServers, master: RedisServer) -> list[int]:
    """The slots of the store that began on this master."""
    return [slot for slot in range(SLOTS) if cluster.master_of(due_key(slot)) is master]


def reshard(
    cluster: RedisClusterServers, slot: int, box: Outbox, *, source: RedisServer, target: RedisServer
) -> list[Message]:
    """Move a slot's keys one by one, under load; returns the load."""
    messages: list[Message] = []
    for before in cluster.move_slot(due_key(slot), source=source, target=target):
        messages += schedule_until(box, lambda before=before: redirections(source) != before)
    return messages
