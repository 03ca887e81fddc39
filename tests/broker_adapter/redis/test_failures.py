"""A server that is cut off, paused, killed under load, or loses its replica: nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker_adapter.redis import open_broker as open_redis
from outbox_core.common.errors import BrokerError, BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.redis.redis_engine import RedisEngine, read_stream
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, replica_of
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy

Open = Callable[[str], Broker]
WAIT_SECONDS = 300
ATTEMPTS_MAX = 5_000
BATCH = 50


def publish_in_batches(broker: Broker, topic: str, *, thread: int, batches: int, acknowledged: list[str]) -> None:
    """As the relay does: each batch again until the broker has it, and only then the next one."""
    for number in range(batches):
        first = (thread * batches + number) * BATCH
        batch = [message(topic, n, key=str(thread)) for n in range(first, first + BATCH)]
        acknowledged += publish_at_last(broker, batch)


def publish_at_last(broker: Broker, batch: Sequence[Message]) -> list[str]:
    """Publish until the broker has all of it: the ids."""
    for _ in range(ATTEMPTS_MAX):
        with contextlib.suppress(BrokerUnavailable, StorageFailed):
            results = broker.publish(batch)
            assert all(one.status.is_success for one in results)
            return [one.id for one in results]
    raise TimeoutError("the server never took the batch")


def bodies_of(server: RedisServer, topic: str, *, count: int) -> list[int]:
    with contextlib.closing(server.client) as client:
        return [int(one.body) for one in read_stream(client, f"outbox:{{{topic}}}", count=count)]


@pytest.mark.parametrize("cut_bytes", [1, 3_000, 20_000])
def test_a_connection_cut_in_a_request_stores_nothing_and_the_repeat_all_in_order(
    server: RedisServer, open_broker: Open, cut_bytes: int
) -> None:
    batch = [message("t", n, body=b"%d" % n) for n in range(1, 400)]
    with cutting_tcp_proxy(server.port) as proxy:
        broker = open_broker(f"redis://{HOST}:{proxy.port}/?wait=0")
        broker.publish([message("t", 0)])
        proxy.cut_after(request_bytes=cut_bytes)

        with pytest.raises(BrokerUnavailable):
            broker.publish(batch)
        results = broker.publish(batch)
        broker.close()

    assert proxy.cuts == 1
    assert {one.status for one in results} == {PublishStatus.STORED}
    assert bodies_of(server, "t", count=400) == list(range(400))


@pytest.mark.parametrize("cut_bytes", [0, 1, 40])
def test_a_connection_cut_in_an_answer_leaves_no_message_twice(
    server: RedisServer, open_broker: Open, cut_bytes: int
) -> None:
    batch = [message("t", n) for n in range(1, 400)]
    with cutting_tcp_proxy(server.port) as proxy:
        broker = open_broker(f"redis://{HOST}:{proxy.port}/?wait=0")
        broker.publish([message("t", 0)])
        proxy.cut_after(answer_bytes=cut_bytes)

        with pytest.raises(BrokerUnavailable):
            broker.publish(batch)
        results = broker.publish(batch)
        broker.close()

    assert proxy.cuts == 1
    assert {one.status for one in results} == {PublishStatus.DUPLICATE}
    assert bodies_of(server, "t", count=400) == list(range(400))


@pytest.mark.slow
def test_a_paused_server_is_unavailable_within_the_time_out(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(f"redis://{HOST}:{server.port}/?wait=0&timeout_ms=500")
    publish_at_last(broker, [message("t", 0)])

    with server.paused():
        begun = time.monotonic()
        for topic in ("t", "new"):  # a connection that is there, and one to be made for the inspection
            with pytest.raises(BrokerUnavailable):
                broker.publish([message(topic, 1)])
        took_s = time.monotonic() - begun

    assert 0.9 < took_s < 60
    publish_at_last(broker, [message("t", 1)])
    assert bodies_of(server, "t", count=2) == [0, 1]


@pytest.mark.slow
def test_killed_and_restarted_under_load_nothing_acknowledged_is_lost_or_out_of_order(
    own_engine: RedisEngine, open_broker: Open
) -> None:
    broker = open_broker(f"{own_engine.url}&timeout_ms=2000")
    acknowledged: list[str] = []
    threads, batches, kills = 3, 40, 3

    with ThreadPoolExecutor(threads) as pool:
        publishing = [
            pool.submit(publish_in_batches, broker, "t", thread=n, batches=batches, acknowledged=acknowledged)
            for n in range(threads)
        ]
        for killed in range(1, kills + 1):
            wait_for(lambda least=killed * 1_000: len(acknowledged) >= least)  # type: ignore[misc]
            own_engine.kill()
            own_engine.start()
        for one in publishing:
            one.result(WAIT_SECONDS)
    total = threads * batches * BATCH
    read = own_engine.read("t", count=total)

    assert len(acknowledged) == len(set(acknowledged)) == total
    assert [one.id for one in read if one.id not in set(acknowledged)] == []
    assert len(read) - len({one.id for one in read}) == 0, "duplicates within the window"
    assert len(read) == total
    for key in range(threads):
        of_key = [int(one.body) for one in read if one.key == str(key)]
        assert of_key == sorted(of_key)


@pytest.mark.parametrize("commands_kept", [1, 2, 3, 7])
def test_a_script_that_a_crash_tore_in_the_file_is_undone_whole_and_its_repeat_stored_once(
    server: RedisServer, open_broker: Open, commands_kept: int
) -> None:
    broker = open_broker(f"redis://{HOST}:{server.port}/?wait=0&timeout_ms=60000")
    batch = [message("t", n) for n in range(1, 10)]
    broker.publish([message("t", 0)])
    whole_bytes = server.append_only_file.stat().st_size
    broker.publish(batch)

    server.kill()
    written = server.append_only_file.read_bytes()
    commands = written[whole_bytes:].split(b"\r\n*")
    torn = b"\r\n*".join(commands[: commands_kept + 1])[:-3]
    server.append_only_file.write_bytes(written[:whole_bytes] + torn)
    server.start()
    assert bodies_of(server, "t", count=1) == [0]
    for _ in range(ATTEMPTS_MAX):
        with contextlib.suppress(BrokerUnavailable):  # the connection from before
            results = broker.publish(batch)
            break

    assert {one.status for one in results} == {PublishStatus.STORED}
    for _ in range(2):  # a file with half a transaction shows it at the second load
        server.kill()
        server.start()
        assert bodies_of(server, "t", count=10) == list(range(10))


def test_a_full_disk_ends_the_server_and_loses_nothing_that_was_acknowledged(
    own_engine: RedisEngine, open_broker: Open
) -> None:
    # With appendfsync always Redis ends rather than answer what it could not write.
    broker = open_broker(f"{own_engine.url}&timeout_ms=5000")
    acknowledged: list[str] = []
    own_engine.server.limit_files(200_000)

    def publish_until_full() -> None:
        for number in range(1_000):
            [result] = broker.publish([message("t", number, body=b"%d" % number * 300)])
            acknowledged.append(result.id)

    with pytest.raises((BrokerUnavailable, StorageFailed)):
        publish_until_full()
    own_engine.kill()
    own_engine.start()

    read = [one.id for one in own_engine.read("t", count=len(acknowledged))]
    assert len(acknowledged) > 10
    assert [one for one in acknowledged if one not in read] == []
    publish_in_batches(broker, "after", thread=0, batches=1, acknowledged=acknowledged)


@pytest.mark.slow
def test_what_a_replica_has_not_confirmed_is_not_acknowledged_nor_is_its_repeat(
    server: RedisServer, open_broker: Open
) -> None:
    with replica_of(server) as replica:
        url = f"redis://{HOST}:{server.port}/?wait=1"
        broker, fresh = [open_broker(f"{url}&timeout_ms=3000") for _ in range(2)]
        publish_at_last(broker, [message("t", 0)])

        with replica.paused():
            for one in (broker, fresh):  # the repeat is on a connection that wrote nothing itself
                with pytest.raises(StorageFailed, match="0 of 1 replicas"):
                    one.publish([message("t", 1)])
        results = open_broker(f"{url}&timeout_ms=60000").publish([message("t", 1), message("t", 2)])

    assert [one.status for one in results] == [PublishStatus.DUPLICATE, PublishStatus.STORED]
    assert bodies_of(server, "t", count=3) == [0, 1, 2]


@pytest.mark.slow
def test_a_server_with_a_replica_is_waited_for_without_being_told_and_never_less_later(
    server: RedisServer, open_broker: Open
) -> None:
    broker = open_broker(f"redis://{HOST}:{server.port}/?timeout_ms=4000")
    with replica_of(server) as replica:
        assert broker.publish([message("t", 0)])[0].status is PublishStatus.STORED
        assert replica.ask("XLEN", "outbox:{t}") == 1
    with pytest.raises(StorageFailed, match="0 of 1 replicas"):
        broker.publish([message("other", 0)])


def test_a_name_that_leads_to_a_new_master_is_followed_though_the_former_one_keeps_its_connections(
    server: RedisServer, open_broker: Open
) -> None:
    with replica_of(server) as replica, cutting_tcp_proxy(server.port) as name:
        broker = open_broker(f"redis://{HOST}:{name.port}/?wait=0")
        broker.publish([message("t", 0)])
        wait_for(lambda: replica.ask("XLEN", "outbox:{t}") == 1)
        replica.ask("REPLICAOF", "NO", "ONE")
        server.ask("REPLICAOF", HOST, replica.port)
        name.lead_to(replica.port)

        with pytest.raises(BrokerUnavailable, match="READONLY"):
            broker.publish([message("t", 1)])
        results = broker.publish([message("t", 1)])
        broker.close()

        assert [one.status for one in results] == [PublishStatus.STORED]
        assert bodies_of(replica, "t", count=2) == [0, 1]


@pytest.mark.slow
def test_a_former_master_does_not_teach_that_there_are_no_replicas_to_wait_for(
    server: RedisServer, open_broker: Open
) -> None:
    with replica_of(server) as heir, cutting_tcp_proxy(server.port) as name:
        heir.ask("REPLICAOF", "NO", "ONE")
        server.ask("REPLICAOF", HOST, heir.port)
        wait_for(lambda: b"role:slave" in server.ask("INFO", "replication"))
        broker = open_broker(f"redis://{HOST}:{name.port}/?timeout_ms=3000")

        with pytest.raises(BrokerUnavailable, match="READONLY"):
            broker.publish([message("t", 0)])
        name.lead_to(heir.port)
        wait_for(lambda: b"state=online" in heir.ask("INFO", "replication"))
        with server.paused(), pytest.raises(StorageFailed, match="0 of 1 replicas"):
            broker.publish([message("t", 1)])
        broker.close()


@pytest.mark.slow
def test_why_a_server_refuses_is_said_though_the_connection_ends_before_its_replicas_have_confirmed(
    server: RedisServer, open_broker: Open
) -> None:
    with cutting_tcp_proxy(server.port) as proxy:
        broker = open_broker(f"redis://{HOST}:{proxy.port}/?wait=1&timeout_ms=10000")
        with replica_of(server):
            broker.publish([message("t", 0)])
        server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
        proxy.cut_after(answer_bytes=len("-NOREPLICAS Not enough good replicas to write.\r\n"))  # so in that to WAIT

        with pytest.raises(BrokerUnavailable, match=r"NOREPLICAS .* start them"):
            broker.publish([message("t", 1)])
        broker.close()

    assert bodies_of(server, "t", count=1) == [0]


def test_a_closed_broker_says_so(server: RedisServer) -> None:
    broker = open_redis(f"redis://{HOST}:{server.port}/?wait=0")
    broker.close()

    with pytest.raises(ConfigurationError, match="was closed"):
        broker.publish([message("t", 0)])


def test_a_server_that_is_not_there_is_an_outage_with_its_address() -> None:
    broker = open_redis(f"redis://{HOST}:1/?wait=0", timeout_ms=60_000)

    with pytest.raises(BrokerError, match=f"{HOST}:1") as raised:
        broker.publish([message("t", 0)])
    broker.close()
    assert isinstance(raised.value, BrokerUnavailable)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline, nothing = time.monotonic() + WAIT_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        nothing.wait(0.005)
