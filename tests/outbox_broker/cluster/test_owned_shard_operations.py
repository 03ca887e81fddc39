"""A node's operations on many of its shards: all are under way before one is waited for; answers keep their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests

from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.owned_shard_operations import OwnedShardOperations
from outbox_broker.cluster.peer_protocol import PUBLISH, peer_routes
from outbox_broker.engine.engine import Engine
from outbox_core import Message
from outbox_core.messages.message import CancelStatus, PublishResult, PublishStatus
from tests.broker_adapter.servers import serving


@dataclass
class RecordedShard:
    """A shard that notes what it was told and when it was waited for."""

    name: str
    events: list[str] = field(default_factory=list)

    @property
    def service(self) -> RecordedShard:
        return self

    def begin_publish(self, batch: Sequence[Message]) -> Callable[[], list[PublishResult]]:
        return self._begun([PublishResult(message.id, PublishStatus.STORED) for message in batch])

    def begin_cancel(
        self, message_ids: Sequence[str], *, topics: Sequence[str] | None
    ) -> Callable[[], list[CancelStatus]]:
        return self._begun([CancelStatus.CANCELED if self.name == "a" else CancelStatus.UNKNOWN for _ in message_ids])

    def _begun(self, answers: list[Any]) -> Callable[[], list[Any]]:
        self.events.append(f"{self.name} sent {len(answers)}")

        def finish() -> list[Any]:
            self.events.append(f"{self.name} waited for")
            return answers

        return finish


EVENTS = ["a sent 2", "b sent 1", "a waited for", "b waited for"]


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def local(events: list[str]) -> OwnedShardOperations:
    shards = {name: RecordedShard(name, events) for name in ("a", "b")}

    def get(name: str) -> Any:
        if name not in shards:
            raise NotOwner(f"shard {name} is not served")
        return shards[name]

    return OwnedShardOperations(get)


def test_a_batch_is_on_its_way_in_all_shards_before_the_first_is_waited_for(
    local: OwnedShardOperations, events: list[str]
) -> None:
    batch = [(shard, Message(id=f"m{number}", topic="t", body=b"")) for number, shard in enumerate("aba")]

    results = local.publish(batch)

    assert [result.id for result in results] == ["m0", "m1", "m2"]
    assert events == EVENTS


def test_cancels_are_on_their_way_in_all_shards_before_the_first_is_waited_for(
    local: OwnedShardOperations, events: list[str]
) -> None:
    statuses = local.cancel([("a", "m0"), ("b", "m1"), ("a", "m2")], topics=None)

    assert statuses == [CancelStatus.CANCELED, CancelStatus.UNKNOWN, CancelStatus.CANCELED]
    assert events == EVENTS


def test_nothing_is_sent_if_one_of_the_shards_is_not_served(local: OwnedShardOperations, events: list[str]) -> None:
    with pytest.raises(NotOwner):
        local.cancel([("a", "m0"), ("c", "m1")], topics=None)

    assert events == []


@pytest.mark.parametrize(
    ("record", "where"),
    [
        (["m", "t", None, {}, b"", 0, None, "of a later version"], "$.messages[1][1]"),
        (["m", "..", None, {}, b"", 0, None], "$.messages[1][1].topic"),
        (["../m", "t", None, {}, b"", 0, None], "$.messages[1][1]"),
        (["m", "t", None, {f"h{number}": "" for number in range(65)}, b"", 0, None], "$.messages[1][1]"),
        (["m", "t", None, {}, b"", -1, None], "$.messages[1][1]"),
    ],
)
def test_a_node_takes_from_another_one_what_it_would_take_from_a_client(
    local: OwnedShardOperations, events: list[str], tmp_path: Path, record: list[Any], where: str
) -> None:
    sound = ["n", "t", None, {}, b"", 0, None]
    with closing(Engine.open(tmp_path / "data")) as engine, serving(engine, routes=peer_routes(local)) as server:

        def publish(*messages: tuple[str, list[Any]]) -> requests.Response:
            return requests.post(
                f"{server.url}{PUBLISH}", data=msgspec.msgpack.encode({"messages": messages}), timeout=120,
                headers={"content-type": "application/msgpack", "accept": "application/json"},
            )  # fmt: skip

        refused, taken = publish(("a", sound), ("a", record)), publish(("a", sound))

    assert (refused.status_code, refused.json()["where"]) == (422, where)
    assert taken.json()["results"] == [["n", "stored", None]]
    assert events == ["a sent 1", "a waited for"]
