"""Redis behind Sentinels: who the master is, and a failover of streams, timers and the timing store under load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from broker_adapter.redis import open_broker, open_timing_store
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.broker_port import Inspectable
from outbox_core.messages.connect import connect, connect_timing
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import Message
from outbox_core.messages.timing_port import TimedRow, Timer
from tests.broker_adapter.redis.redis_sentinels import STEADY_MS, SentinelSet, redis_sentinels
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until

Answer = TypeVar("Answer")
BATCH = 20
BATCHES = 60
THREAD_SECONDS_MAX = 300
HOUR_MS = 3_600_000


@pytest.fixture
def sentinels() -> Iterator[SentinelSet]:
    """A set of the test's own."""
    with redis_sentinels() as found:
        yield found


@pytest.fixture
def steady() -> Iterator[SentinelSet]:
    """The same for a test in which no server fails."""
    with redis_sentinels(down_after_ms=STEADY_MS) as found:
        yield found


def messages(count: int, *, deliver_at_ms: int | None = None) -> list[Message]:
    return [Message(id=new_message_id(), topic="t", body=b"x", deliver_at_ms=deliver_at_ms) for _ in range(count)]


def until_answered(act: Callable[[], Answer]) -> Answer:
    """Repeat while the broker says that it cannot now; what is repeated is idempotent, or comes back by itself."""
    while True:
        with contextlib.suppress(BrokerUnavailable, StorageFailed):
            return act()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "rediss"])
@pytest.mark.parametrize("option", ["master=m", "sentinel_user=u"])
def test_an_option_of_sentinels_is_refused_elsewhere(scheme: str, option: str) -> None:
    for opening in (open_broker, open_timing_store):
        with pytest.raises(ConfigurationError, match="about Sentinels"):
            opening(f"{scheme}://h/?{option}")


def test_the_url_of_sentinels_names_the_master_that_they_watch(tmp_path: Path) -> None:
    for opening in (open_broker, open_timing_store):
        with pytest.raises(ConfigurationError, match=r"master=mymaster"):
            opening("redis+sentinel://a,b,c/")
        with pytest.raises(ConfigurationError, match="sentinel_password_file cannot be read"):
            opening(f"redis+sentinel://a/?master=m&sentinel_password_file={tmp_path / 'none'}")


@pytest.mark.slow
def test_a_master_that_no_sentinel_knows_is_an_outage_that_names_it(steady: SentinelSet) -> None:
    url = f"{steady.url.replace('master=shop', 'master=other')}&timeout_ms=5000"
    with (
        contextlib.closing(connect(url)) as broker,
        pytest.raises(BrokerUnavailable, match="No master found for 'other'"),
    ):
        broker.publish(messages(1))


@pytest.mark.slow
def test_a_sentinel_that_is_out_is_passed_over_and_the_masters_weakness_named(steady: SentinelSet) -> None:
    steady.sentinels[0].kill()

    with contextlib.closing(connect(steady.url)) as broker:
        assert isinstance(broker, Inspectable)
        [weakness] = broker.inspect().weaknesses
        assert broker.publish(messages(1))[0].status.is_success

    assert weakness.subject == f"node 127.0.0.1:{steady.servers[0].port}"
    assert "min-replicas-to-write" in weakness.cure


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "pause"])
def test_a_failover_under_load_with_wait_1_loses_nothing_that_was_acknowledged(
    sentinels: SentinelSet, way: str
) -> None:
    victim = sentinels.servers[0]
    acknowledged: set[str] = set()
    delivered: set[str] = set()
    failing, published = threading.Event(), threading.Event()

    def publish() -> None:
        with contextlib.closing(connect(f"{sentinels.url}&store=timers&wait=1&timeout_ms=8000")) as broker:
            for _ in range(BATCHES):
                batch = messages(BATCH, deliver_at_ms=time.time_ns() // 1_000_000 + 500)
                until_answered(lambda batch=batch: broker.publish(batch))
                acknowledged.update(one.id for one in batch)
                if len(acknowledged) == 5 * BATCH:
                    failing.set()
        published.set()

    def consume() -> None:
        with contextlib.closing(connect(f"{sentinels.url}&store=timers&wait=1&timeout_ms=8000")) as broker:
            while not (published.is_set() and acknowledged <= delivered):
                found = until_answered(lambda: broker.pull("t", "g", wait_ms=200, invisible_ms=5_000))
                delivered.update(one.id for one in found)
                until_answered(lambda found=found: broker.ack([one.receipt for one in found]))

    threads = [threading.Thread(target=act, daemon=True) for act in (publish, consume)]
    for thread in threads:
        thread.start()
    assert failing.wait(THREAD_SECONDS_MAX)
    victim.kill() if way == "kill" else victim.pause()
    assert wait_until(lambda: sentinels.master is not victim)
    victim.start() if way == "kill" else victim.resume()
    for thread in threads:
        thread.join(THREAD_SECONDS_MAX)

    assert len(acknowledged) == BATCHES * BATCH
    assert acknowledged - delivered == set(), "acknowledged and lost"


@pytest.mark.slow
def test_a_timing_store_goes_on_at_the_new_master(sentinels: SentinelSet) -> None:
    victim = sentinels.servers[0]
    rows = [TimedRow("message", f"m{number}") for number in range(10)]
    with contextlib.closing(connect_timing(f"{sentinels.url}&name=shop&slots=2")) as store:
        store.prepare()
        store.add([Timer(row, time.time_ns() // 1_000_000 + HOUR_MS) for row in rows[:5]])
        for replica in sentinels.servers[1:]:
            assert wait_until(lambda replica=replica: _timers(replica) == 5)
        victim.kill()
        assert wait_until(lambda: sentinels.master is not victim)
        until_answered(lambda: store.add([Timer(row, time.time_ns() // 1_000_000 + HOUR_MS) for row in rows[5:]]))

        assert sum(one.timers for one in until_answered(store.figures)) == len(rows)


def _timers(server: RedisServer) -> int:

    return sum(int(server.ask("ZCARD", f"outbox:timing:{{shop:{slot}}}:due")) for slot in range(2))
