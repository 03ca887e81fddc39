"""Long polls: a thousand at once, wakes, and clients that go away while they wait."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from tests.outbox_broker.http.publish_bodies import of_topic
from tests.outbox_broker.polling import until

Client = Callable[..., requests.Response]
WAIT_MS = 5_000
TRIES_MAX = 100
LESS_THAN_A_WAIT_S = 50.0
"""Of a pull that waits 60 s, and is answered before its time is over."""


async def pull(url: str, topic: str, group: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a pull on a connection of its own; the answer is read later."""
    return await post(url, f"/v1/topics/{topic}/groups/{group}/pull", **body)


async def post(url: str, path: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send any request on a connection of its own."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    text = json.dumps(body)
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
    )
    await writer.drain()
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def until_waiting(server: HttpServer, count: int) -> None:
    """Until so many wait, as the server itself counts them."""
    async with asyncio.timeout(120):
        while server.services.polls.waiting != count:
            await asyncio.sleep(0.01)


def publish(url: str, topic: str, *bodies: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        messages = [{"body": body} for body in bodies]
        session.post(f"{url}/v1/publish", json=of_topic(topic, *messages), timeout=120).raise_for_status()


def test_a_thousand_wait_without_a_thread_each_and_each_gets_one_message(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    before = set(threading.enumerate())
    server = serve()

    async def scenario() -> tuple[list[str], int]:
        waiting = [
            await pull(server.url, topic, "g", max_messages=1, wait_ms=60_000, invisible_ms=60_000)
            for _ in range(1_000)
        ]
        await until_waiting(server, 1_000)
        threads = len(set(threading.enumerate()) - before)
        await asyncio.to_thread(publish, server.url, topic, *(str(number) for number in range(1_000)))
        async with asyncio.timeout(LESS_THAN_A_WAIT_S):
            answers = [await answer(reader) for reader, _ in waiting]
        for _, writer in waiting:
            writer.close()
        assert {status for status, _ in answers} == {200}
        return [one["body"] for _, body in answers for one in body["deliveries"]], threads

    bodies, threads = asyncio.run(scenario())

    assert sorted(bodies, key=int) == [str(number) for number in range(1_000)]
    assert threads < 60, "of this test's engine and server"


def test_a_line_stays_for_a_while_and_tries_only_where_something_may_have_come(
    serve: Callable[..., HttpServer], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    broker = server.services.served.broker
    assert broker is not None
    tries: list[int] = []

    def counting(take: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            found = take(*given, **more)
            if found is not None:
                tries.append(sum(len(one.records) for one in found))
            return found

        return counted

    monkeypatch.setattr(broker.puller, "take", counting(broker.puller.take))
    monkeypatch.setattr(broker.puller, "take_at_hand", counting(broker.puller.take_at_hand))

    async def pulled(*bodies: str) -> list[str]:
        reader, writer = await pull(server.url, topic, "g", wait_ms=20_000)
        if bodies:
            await until_waiting(server, 1)
            await asyncio.to_thread(publish, server.url, topic, *bodies)
        _, body = await answer(reader)
        writer.close()
        return [one["body"] for one in body["deliveries"]]

    async def scenario() -> list[list[str]]:
        found = [await pulled("a"), await pulled("b")]
        await until_waiting(server, 0)
        await asyncio.to_thread(publish, server.url, topic, "c")
        return [*found, await pulled()]

    assert asyncio.run(scenario()) == [["a"], ["b"], ["c"]]
    assert sum(tries) == 3
    assert len(tries) <= 6, "before the line, in it, a; behind a, b; c, which came while nobody waited"


@pytest.mark.parametrize(("idle_queue_ms", "idle_queues_max"), [(10, 1_000), (600_000, 1)])
def test_a_line_in_which_nobody_waits_ends(
    serve: Callable[..., HttpServer], client: Client, topic: str, idle_queue_ms: int, idle_queues_max: int
) -> None:
    server = serve(settings=HttpSettings(idle_queue_ms=idle_queue_ms, idle_queues_max=idle_queues_max))
    services = server.services

    client("POST", f"{server.url}/v1/topics/{topic}/groups/g/pull", json={"wait_ms": 1})

    until(lambda: not services.polls.has_line(topic, "g"))
    assert services.served.broker is not None
    waiters = services.served.broker.wakeups.waiters
    until(lambda: not waiters)


def test_who_waits_longest_is_served_first(serve: Callable[..., HttpServer], topic: str) -> None:
    server = serve()

    async def scenario() -> list[list[str]]:
        waiting = []
        for number in range(3):
            waiting.append(await pull(server.url, topic, "g", max_messages=1, wait_ms=60_000))
            await until_waiting(server, number + 1)
        await asyncio.to_thread(publish, server.url, topic, "a", "b")
        async with asyncio.timeout(LESS_THAN_A_WAIT_S):
            answers = [await answer(reader) for reader, _ in waiting[:2]]
            await until_waiting(server, 1)
            await asyncio.to_thread(publish, server.url, topic, "c")
            answers.append(await answer(waiting[2][0]))
        for _, writer in waiting:
            writer.close()
        return [[one["body"] for one in body["deliveries"]] for _, body in answers]

    assert asyncio.run(scenario()) == [["a"], ["b"], ["c"]]


def test_a_client_that_went_away_is_handed_nothing(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    server = serve()

    async def scenario() -> None:
        gone = [await pull(server.url, topic, "g", wait_ms=60_000) for _ in range(5)]
        await until_waiting(server, 5)
        for _, writer in gone:
            writer.close()
        await until_waiting(server, 0)

    asyncio.run(scenario())
    publish(server.url, topic, "a")

    [delivery] = client("POST", f"{server.url}/v1/topics/{topic}/groups/g/pull", json={}).json()["deliveries"]
    assert (delivery["body"], delivery["attempt"]) == ("a", 1)


def test_what_was_taken_for_a_client_that_went_away_goes_to_the_next_at_once(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    server = serve()

    async def scenario() -> None:
        _, writer = await pull(server.url, topic, "g", wait_ms=60_000)
        await until_waiting(server, 1)
        publisher = threading.Thread(target=publish, args=(server.url, topic, "a"))
        publisher.start()
        writer.transport.abort()  # about when the message arrives: before, during or after the hand-out
        await asyncio.to_thread(publisher.join)
        await until_waiting(server, 0)

    asyncio.run(scenario())

    group = f"{server.url}/v1/topics/{topic}/groups/g"
    pulled: list[dict[str, Any]] = []
    sent = 0
    for _ in range(TRIES_MAX):
        if pulled or sent:
            break
        pulled = client("POST", f"{group}/pull", json={"wait_ms": 1_000}).json()["deliveries"]
        sent = client("GET", group).json()["figures"]["in_flight"]
    assert len(pulled) == 1 or sent == 1, "it is with the next, or was sent before the break was seen"
    assert all(one["attempt"] == 1 for one in pulled)


@pytest.mark.slow
def test_a_group_that_waits_is_not_woken_by_other_topics_nor_kept_beyond_its_time(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    server = serve()

    async def scenario() -> tuple[int, dict[str, Any], float]:
        start = time.monotonic()
        reader, writer = await pull(server.url, topic, "g", wait_ms=WAIT_MS)
        await until_waiting(server, 1)
        await asyncio.to_thread(publish, server.url, topic + ".other", "a")
        status, body = await answer(reader)
        writer.close()
        return status, body, time.monotonic() - start

    status, body, seconds = asyncio.run(scenario())

    assert (status, body) == (200, {"deliveries": []})
    assert WAIT_MS / 1000 - 0.01 <= seconds < LESS_THAN_A_WAIT_S


def test_more_long_polls_than_allowed_are_told_to_come_back(serve: Callable[..., HttpServer], topic: str) -> None:
    server = serve(HttpSettings(waiting_pulls_max=2))

    async def scenario() -> tuple[int, dict[str, Any]]:
        waiting = [await pull(server.url, topic, "g", wait_ms=60_000) for _ in range(2)]
        await until_waiting(server, 2)
        reader, writer = await pull(server.url, topic, "g", wait_ms=60_000)
        refused = await answer(reader)
        for _, one in [*waiting, (reader, writer)]:
            one.close()
        return refused

    status, problem = asyncio.run(scenario())

    assert status == 429
    assert (problem["type"], problem["bound"]) == ("urn:outbox-mq:problem:throttled", "waiting_pulls_max")
    assert problem["retry_after_ms"] > 0


def test_a_server_that_stops_sends_those_who_wait_away_at_once(serve: Callable[..., HttpServer], topic: str) -> None:
    server = serve()

    async def scenario() -> tuple[int, dict[str, Any]]:
        reader, writer = await pull(server.url, topic, "g", wait_ms=60_000)
        await until_waiting(server, 1)
        server.stop()
        async with asyncio.timeout(LESS_THAN_A_WAIT_S):
            answered = await answer(reader)
        writer.close()
        return answered

    assert asyncio.run(scenario()) == (200, {"deliveries": []})


def test_an_answer_is_bounded_in_bytes_and_the_rest_stays_ready(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    server = serve(HttpSettings(pull_bytes_max=1_000))
    publish(server.url, topic, "a" * 600, "b" * 600, "c" * 3_000, "d" * 10)

    pulled = [
        [(one["body"][0], one["attempt"]) for one in answered["deliveries"]]
        for answered in (
            client("POST", f"{server.url}/v1/topics/{topic}/groups/g/pull", json={"wait_ms": 500}).json()
            for _ in range(4)
        )
    ]

    assert pulled == [[("a", 1)], [("b", 1)], [("c", 1)], [("d", 1)]]
