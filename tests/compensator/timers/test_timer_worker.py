"""The timer worker on real databases and a real Redis: what fires, and what becomes of rows when anything is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from compensator.assignment import LeaseOptions, open_assignment
from compensator.service.timer_worker import TimerWorker
from outbox_core import Message, SystemClock
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.message import DUE_HEADER
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_cluster import STEADY_MS, redis_cluster
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import (
    SLOTS,
    SOON,
    held,
    move,
    opened,
    publish,
    source_over,
    store_url,
    timer,
    worker_over,
)
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

HOUR_MS = 3_600_000
SOON_MS = timedelta(milliseconds=300)


def ids(messages: list[Message]) -> list[str]:
    return sorted(one.id for one in messages)


def stored(count: int) -> Callable[[Any], bool]:
    return lambda broker: len(broker.stored) >= count


def test_what_is_due_is_sent_once_and_never_early_without_a_single_poll(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    early: list[str] = []

    def note(batch: Any) -> None:
        now_ms = time.time_ns() // 1_000_000
        early.extend(one.id for one in batch if int(one.headers[DUE_HEADER]) > now_ms)

    prompt.rule = note
    with worker_over(shop, prompt, store_url(server)):
        messages = publish(shop, prompt, store_url(server), count=50, delay=SOON_MS)
        later = publish(shop, prompt, store_url(server), count=5)
        prompt.wait_for(stored(50))
        assert wait_until(lambda: sorted(row["id"] for row in shop.rows()) == ids(later))
        assert wait_until(lambda: held(store) == (5, 0))

    assert sorted(prompt.ids) == ids(messages)
    assert prompt.duplicates == []
    assert early == []
    assert shop.archived() == 50


def test_a_row_that_was_withdrawn_is_not_sent_and_its_timer_goes(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    [message] = publish(shop, prompt, store_url(server))
    box = shop.box(prompt, timing=store_url(server))
    with box.begin():
        box.cancel(message.id)
    store.add([timer(shop, message.id)])

    with worker_over(shop, prompt, store_url(server)):
        assert wait_until(lambda: held(store) == (0, 0))
    assert prompt.batches == []


def test_a_row_that_is_brought_forward_fires_at_its_new_time_and_its_old_timer_does_nothing(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    [message] = publish(shop, prompt, store_url(server))
    with worker_over(shop, prompt, store_url(server)):
        move(shop, in_ms=0)
        store.add([timer(shop, message.id)])
        prompt.wait_for(stored(1))
        store.add([timer(shop, message.id)])
        assert wait_until(lambda: held(store) == (0, 0))

    assert [len(batch) for batch in prompt.batches] == [1]


def test_a_timer_that_comes_too_soon_waits_for_its_row(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    [message] = publish(shop, prompt, store_url(server))
    store.add([timer(shop, message.id)])
    assert held(store) == (1, 1)

    with worker_over(shop, prompt, store_url(server)):
        assert wait_until(lambda: min(one.next_ms for one in store.figures() if one.next_ms is not None) > HOUR_MS / 2)
        assert held(store) == (1, 0)
        assert len(shop.rows()) == 1
    assert prompt.batches == []


@pytest.mark.slow
def test_after_a_flush_all_timers_come_back_from_the_table(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    messages = publish(shop, prompt, store_url(server), count=30)
    with worker_over(shop, prompt, store_url(server)):
        assert wait_until(lambda: all(one.complete for one in store.figures()))
        server.ask("FLUSHALL")
        assert wait_until(lambda: all(one.complete for one in store.figures()) and held(store) == (30, 0))
        move(shop, in_ms=0)
        server.ask("FLUSHALL")
        prompt.wait_for(stored(30))

    assert sorted(prompt.ids) == ids(messages)
    assert prompt.duplicates == []


@pytest.mark.slow
def test_a_shard_that_lost_its_timers_gets_them_back_and_no_other_shard_is_touched(
    sqlite_shop: Shop, prompt: PromptBroker
) -> None:
    with redis_cluster(node_timeout_ms=STEADY_MS) as cluster, opened(f"{cluster.url}?name=shop&slots=16") as store:
        url = f"{cluster.url}?name=shop&slots=16"
        messages = publish(sqlite_shop, prompt, url, count=64)
        with worker_over(sqlite_shop, prompt, url):
            assert wait_until(lambda: all(one.complete for one in store.figures()))
            lost = cluster.masters[0]
            kept = [cluster.master_of(f"outbox:timing:{{shop:{slot}}}:due") is not lost for slot in range(16)]
            assert 0 < sum(kept) < 16
            lost.ask("FLUSHALL")
            assert [one.complete for one, is_kept in zip(store.figures(), kept, strict=True) if is_kept].count(
                False
            ) == 0
            assert wait_until(lambda: all(one.complete for one in store.figures()) and held(store) == (64, 0))

            move(sqlite_shop, in_ms=0)
            store.add([timer(sqlite_shop, one.id) for one in messages])
            prompt.wait_for(stored(64))

        assert sorted(prompt.ids) == ids(messages)
        assert prompt.duplicates == []


@pytest.mark.slow
def test_a_killed_server_is_used_again_once_it_is_back(
    shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    messages = publish(shop, prompt, store_url(server), count=3)
    with worker_over(shop, prompt, store_url(server)) as worker:
        assert wait_until(lambda: all(one.complete for one in store.figures()))
        server.kill()
        assert wait_until(lambda: worker.problem is not None)
        move(shop, in_ms=0)
        server.start()
        server.ask("FLUSHALL")
        prompt.wait_for(stored(3))
        assert wait_until(lambda: worker.problem is None)

    assert sorted(prompt.ids) == ids(messages)


def test_without_redis_all_the_time_the_polls_send_every_row_once(
    shop: Shop, prompt: PromptBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    url = "redis://127.0.0.1:1/?name=shop&timeout_ms=500"  # where nobody listens
    messages = publish(shop, prompt, url, count=20, delay=SOON_MS)
    with source_over(shop, prompt) as source:
        worker = TimerWorker(source, connect_timing(url), options=SOON, metrics=metrics, clock=SystemClock())

        def failed_once() -> bool:
            return (metrics.value("outbox_compensator_timer_failures_total", source=worker.source) or 0) >= 1

        worker.check()
        service = serve(shop, prompt, timers=[worker])
        service.start()
        prompt.wait_for(stored(20))
        assert wait_until(lambda: not shop.rows())
        assert wait_until(failed_once)
        [check] = [one for one in service.health().checks if one.name == "timers"]
        assert service.stop()

    assert check.status == "warn"
    assert sorted(prompt.ids) == ids(messages)
    assert prompt.duplicates == []


@pytest.mark.slow
def test_workers_and_polls_beside_each_other_send_each_row_once(
    shop: Shop,
    prompt: PromptBroker,
    server: RedisServer,
    serve: Serve,
    metrics: WatchedMetrics,
) -> None:
    with ExitStack() as closing:
        for _ in range(2):
            source = closing.enter_context(source_over(shop, prompt))
            store = connect_timing(store_url(server))
            worker = TimerWorker(source, store, options=SOON, metrics=metrics, clock=SystemClock())
            serve(shop, prompt, timers=[worker]).start()
        messages = [one for _ in range(10) for one in publish(shop, prompt, store_url(server), count=20, delay=SOON_MS)]
        prompt.wait_for(stored(200))
        assert wait_until(lambda: not shop.rows())

        assert sorted(prompt.ids) == ids(messages)
        assert prompt.duplicates == []


def test_an_outage_of_the_broker_loses_nothing_and_burns_no_attempt(
    shop: Shop,
    prompt: PromptBroker,
    server: RedisServer,
    serve: Serve,
    metrics: WatchedMetrics,
) -> None:
    def refuse(_: Any) -> None:
        raise BrokerUnavailable("out")

    prompt.rule = refuse
    messages = publish(shop, prompt, store_url(server), count=20, delay=SOON_MS)
    with worker_over(shop, prompt, store_url(server)):
        prompt.wait_for(lambda broker: len(broker.batches) >= 1)
        assert wait_until(lambda: any(row["last_error"] for row in shop.rows()))
        assert {row["state"] for row in shop.rows()} == {"pending"}
        prompt.rule = None
        shop.end_delays()
        serve(shop, prompt).start()
        prompt.wait_for(stored(20))

    assert sorted(prompt.ids) == ids(messages)


def test_two_instances_share_the_slots_by_leases(sqlite_shop: Shop, prompt: PromptBroker, server: RedisServer) -> None:
    shop, metrics = sqlite_shop, WatchedMetrics()
    options = LeaseOptions(beat_ms=2_000, lease_ms=60_000)
    with ExitStack() as closing:
        leases = [open_assignment(shop.database.url, options=options) for _ in range(2)]
        for one in leases:
            closing.callback(one.leave)
        source = closing.enter_context(source_over(shop, prompt))
        store = closing.enter_context(opened(store_url(server)))
        worker = TimerWorker(source, store, options=SOON, metrics=metrics, clock=SystemClock())
        resources = [source.source_name, *worker.resources]
        for _ in range(4):
            shares = [one.beat(resources) for one in leases]

    assert shares[0] | shares[1] == {one.name for one in resources}
    assert not shares[0] & shares[1]
    assert {len(share) for share in shares} == {2, 3}


def test_a_worker_takes_the_timers_of_its_slots_alone_until_it_gets_the_others(
    sqlite_shop: Shop, prompt: PromptBroker, server: RedisServer, store: TimingStore
) -> None:
    messages = publish(sqlite_shop, prompt, store_url(server), count=40)
    move(sqlite_shop, in_ms=0)
    store.add([timer(sqlite_shop, one.id) for one in messages])
    others = store.figures()[-1].timers
    with worker_over(sqlite_shop, prompt, store_url(server), slots=SLOTS - 1) as worker:
        prompt.wait_for(stored(40 - others))
        assert wait_until(lambda: held(store) == (others, others))
        worker.assign({one.name for one in worker.resources})
        prompt.wait_for(stored(40))

    assert 0 < others < 40
    assert sorted(prompt.ids) == ids(messages)


def test_a_worker_that_lost_all_slots_shows_nothing_of_the_store_any_more(
    sqlite_shop: Shop, prompt: PromptBroker, server: RedisServer
) -> None:
    metrics = WatchedMetrics()
    gauges = ("complete", "rebuilt_rows", "rows_to_rebuild", "slot_answers")

    def shown() -> list[str]:
        series = {one.name: one.samples for one in metrics.registry.collect()}
        return [name for name in gauges if series[f"outbox_timing_store_{name}"]]

    with source_over(sqlite_shop, prompt) as source:
        worker = TimerWorker(
            source, connect_timing(store_url(server)), options=SOON, metrics=metrics, clock=SystemClock()
        )
        worker.check()
        worker.assign({one.name for one in worker.resources})
        metrics.record_timers(source.name, late_ms=[], complete=False)
        metrics.record_rebuild(source.name, rows=1, total=2)
        worker.report("ours")
        before = shown()
        worker.assign(set())
        worker.report("ours")
        after = shown()
        assert worker.stop(timeout_ms=60_000)

    assert (before, after) == (list(gauges), [])


def test_a_store_that_may_evict_ends_a_start_and_one_that_is_out_does_not(
    sqlite_shop: Shop, prompt: PromptBroker, server: RedisServer
) -> None:
    with source_over(sqlite_shop, prompt) as source:

        def worker(url: str) -> TimerWorker:
            metrics = WatchedMetrics()
            return TimerWorker(source, connect_timing(url), options=SOON, metrics=metrics, clock=SystemClock())

        server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        with pytest.raises(ConfigurationError, match="maxmemory-policy volatile-ttl"):
            worker(store_url(server)).check()
        server.kill()
        out = worker(store_url(server))
        out.check()
        assert out.problem is not None
