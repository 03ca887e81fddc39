"""A server that serves something else from one moment on: each request has the ports of its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from outbox_broker.engine.engine import Engine
from outbox_broker.http.server import HttpServer
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.message import GroupConfig, Message
from tests.broker_adapter.servers import serving
from tests.outbox_broker.http.test_long_poll import answer, pull, until_waiting

TOPIC, GROUP = "orders", "billing"


class Owner:
    """An engine of its own, and whether it may act."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.engine = Engine.open(folder)
        stack.callback(self.engine.close)
        self.is_deposed = False

    def ports(self) -> ServicePorts:
        return replace(ServicePorts.of(self.engine), check_owner=self._check)

    def _check(self) -> None:
        if self.is_deposed:
            raise BrokerUnavailable("deposed")


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[tuple[Owner, Owner]]:
    with ExitStack() as stack:
        yield Owner(tmp_path / "first", stack), Owner(tmp_path / "second", stack)


@pytest.mark.parametrize("way", ["take", "take_at_hand"])
def test_what_was_taken_of_an_owner_that_is_deposed_meanwhile_does_not_leave_although_another_one_is_served(
    owners: tuple[Owner, Owner], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    first, second = owners
    for owner, name in zip(owners, ("of-the-first", "of-the-second"), strict=True):
        owner.engine.publisher.publish([Message(id=name, topic=TOPIC, body=b"x")])
        owner.engine.admin.declare_group(TOPIC, GROUP, GroupConfig(start="earliest"))
    taken: list[object] = []
    if way == "take":
        monkeypatch.setattr(first.engine.puller, "take_at_hand", lambda *_, **__: None)
    take = getattr(first.engine.puller, way)

    with serving(first.ports()) as server:

        def then_deposed(*place: Any, **asked: Any) -> object:
            taken.append(take(*place, **asked))
            first.is_deposed = True
            server.serve(second.ports())
            return taken[-1]

        monkeypatch.setattr(first.engine.puller, way, then_deposed)
        url = f"{server.url}/v1/topics/{TOPIC}/groups/{GROUP}/pull"
        refused = requests.post(url, json={}, timeout=60)
        came = requests.post(url, json={}, timeout=60).json()["deliveries"]
        monkeypatch.undo()
        first.is_deposed = False
        server.serve(first.ports())
        again = requests.post(url, json={}, timeout=60).json()["deliveries"]

    assert taken[0]
    assert refused.status_code == 503
    assert [delivery["id"] for delivery in came] == ["of-the-second"]
    assert [(delivery["id"], delivery["attempt"]) for delivery in again] == [("of-the-first", 1)], "it was given back"


def test_a_deposed_owner_that_is_fenced_already_refuses_what_it_took_all_the_same(
    owners: tuple[Owner, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = owners
    owner.engine.publisher.publish([Message(id="a", topic=TOPIC, body=b"x")])
    take = owner.engine.puller.take

    def then_deposed(*place: Any, **asked: Any) -> object:
        taken = take(*place, **asked)
        owner.is_deposed = True
        return taken

    def fenced(*_: object, **__: object) -> None:
        raise WriterFenced("another process writes to the shard now")

    monkeypatch.setattr(owner.engine.puller, "take", then_deposed)
    monkeypatch.setattr(owner.engine.settler, "nack", fenced)
    with serving(owner.ports()) as server:
        refused = requests.post(f"{server.url}/v1/topics/{TOPIC}/groups/{GROUP}/pull", json={}, timeout=60)

    assert owner.is_deposed
    assert refused.status_code == 503
    assert "deposed" in refused.json()["detail"]


def test_those_who_wait_behind_the_change_are_woken_by_what_is_served_then(owners: tuple[Owner, Owner]) -> None:
    first, second = owners

    async def scenario(server: HttpServer) -> list[str]:
        before, writer_before = await pull(server.url, TOPIC, GROUP, wait_ms=60_000)
        await until_waiting(server, 1)
        server.serve(second.ports())
        status, body = await answer(before)
        assert (status, body["deliveries"]) == (200, []), "asked to ask once more"
        behind, writer_behind = await pull(server.url, TOPIC, GROUP, wait_ms=60_000)
        await until_waiting(server, 1)
        second.engine.publisher.publish([Message(id="later", topic=TOPIC, body=b"x")])
        status, body = await answer(behind)
        assert status == 200
        for writer in (writer_before, writer_behind):
            writer.close()
        return [delivery["id"] for delivery in body["deliveries"]]

    with serving(first.ports()) as server:
        assert asyncio.run(scenario(server)) == ["later"]
