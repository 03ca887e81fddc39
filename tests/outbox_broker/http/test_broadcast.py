"""Readers without a group over HTTP: many who wait for the same, and who may read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import requests

from outbox_broker.http.server import HttpServer
from tests.outbox_broker.http.test_long_poll import answer, post, publish, until_waiting

Client = Callable[..., requests.Response]
READERS = 200


async def read(url: str, topic: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a read on a connection of its own; the answer is read later."""
    return await post(url, f"/v1/topics/{topic}/read", **body)


def test_one_message_is_the_answer_to_all_who_wait(serve: Callable[..., HttpServer], topic: str) -> None:
    server = serve()

    async def run() -> list[tuple[int, dict[str, Any]]]:
        streams = [await read(server.url, topic, offset=0, wait_ms=60_000) for _ in range(READERS)]
        await until_waiting(server, READERS)
        await asyncio.to_thread(publish, server.url, topic, "a")
        found = [await answer(reader) for reader, _ in streams]
        for _, writer in streams:
            writer.close()
        return found

    answers = asyncio.run(run())

    assert [status for status, _ in answers] == [200] * READERS
    assert {(body["messages"][0]["body"], body["offset"], body["next_offset"]) for _, body in answers} == {("a", 0, 1)}


def test_who_joins_the_others_and_is_behind_them_waits_for_nothing(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    server = serve()
    publish(server.url, topic, "a")

    async def run() -> dict[str, Any]:
        waiting = await read(server.url, topic, offset=1, wait_ms=60_000)
        await until_waiting(server, 1)
        behind = await read(server.url, topic, offset=0, wait_ms=60_000)
        _, found = await asyncio.wait_for(answer(behind[0]), 120)
        await until_waiting(server, 1)
        for _, writer in (waiting, behind):
            writer.close()
        return found

    assert [one["body"] for one in asyncio.run(run())["messages"]] == ["a"]


def test_a_reader_that_goes_while_it_waits_leaves_the_line(serve: Callable[..., HttpServer], topic: str) -> None:
    server = serve()

    async def run() -> None:
        _, writer = await read(server.url, topic, offset=0, wait_ms=60_000)
        await until_waiting(server, 1)
        writer.close()
        await until_waiting(server, 0)

    asyncio.run(run())


def test_time_that_runs_out_is_answered_with_the_same_place(shared_url: str, client: Client, topic: str) -> None:
    found = client("POST", f"{shared_url}/v1/topics/{topic}/read", json={"wait_ms": 1})

    assert (found.status_code, found.json()) == (200, {"messages": [], "offset": 0, "next_offset": 0})


def test_what_readers_got_is_counted(shared_url: str, client: Client, topic: str) -> None:
    publish(shared_url, topic, "a", "b")
    for _ in range(2):
        client("POST", f"{shared_url}/v1/topics/{topic}/read", json={"offset": 0})

    metrics = client("GET", f"{shared_url}/metrics").text

    assert f'broker_messages_broadcast_total{{topic="{topic}"}} 4.0' in metrics
