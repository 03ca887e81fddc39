"""Two tenants of one broker, each with a token for its own topics: neither can hold up, cancel or find out about the
messages of the other, whatever ids it uses.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests

from outbox_broker.engine.engine import Engine
from outbox_broker.http.access_control import Access, Principal, Role
from outbox_broker.http.server import HttpServer
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.messages.message import Message
from tests.broker_adapter.servers import served
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.http.publish_bodies import of_topic
from tests.outbox_broker.powered_storage import PoweredStorage

HOUR_MS = 3_600_000
LIM, VIC = ("lim.*",), ("vic.*",)
type_of_open = Callable[..., Engine]
Tenant = Callable[..., Any]


def message(topic: str, message_id: str = "same", *, due_ms: int | None = None) -> Message:
    return Message(id=message_id, topic=topic, body=topic.encode(), deliver_at_ms=due_ms)


def publish(engine: Engine, *batch: Message) -> list[str]:
    return [str(one.status) for one in engine.publisher.publish(batch)]


def pulled(engine: Engine, topic: str, *, group: str = "g") -> list[tuple[str, bytes]]:
    found = engine.puller.pull(topic, group, max_messages=1_000)
    engine.settler.ack([one.receipt for one in found])
    return [(one.id, one.body) for one in found]


# -- the engine ------------------------------------------------------------------------------------------------------


def test_the_same_id_on_two_topics_is_two_messages_over_restarts_and_sealed_segments(open_engine: type_of_open) -> None:
    engine = open_engine(segment_bytes=8_192)
    assert publish(engine, message("lim.a"), message("vic.a"), message("lim.a")) == ["stored", "stored", "duplicate"]
    for number in range(200):
        publish(engine, message("filler", f"m-{number}"))

    for _ in range(2):
        assert publish(engine, message("lim.a"), message("vic.a")) == ["duplicate", "duplicate"]
        engine = open_engine(segment_bytes=8_192)

    assert publish(engine, message("vic.b")) == ["stored"]
    assert [pulled(engine, topic) for topic in ("lim.a", "vic.a", "vic.b")] == [
        [("same", b"lim.a")], [("same", b"vic.a")], [("same", b"vic.b")],
    ]  # fmt: skip


def test_the_oldest_messages_are_forgotten_by_topic_and_id(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=2)
    for topic in ("lim.a", "lim.b", "lim.c"):
        assert publish(engine, message(topic)) == ["stored"]

    assert publish(engine, message("lim.b")) == publish(engine, message("lim.c")) == ["duplicate"]
    assert publish(engine, message("lim.a")) == ["stored"]


def test_a_plain_publish_of_an_id_that_another_topic_has_scheduled_is_delivered(
    engine: Engine, clock: ManualClock
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    assert publish(engine, message("lim.a", due_ms=due_ms), message("lim.b")) == ["stored", "stored"]
    assert publish(engine, message("vic.a")) == ["stored"]
    assert publish(engine, message("vic.b", due_ms=due_ms)) == ["stored"]

    assert pulled(engine, "vic.a") == [("same", b"vic.a")]
    clock.advance(HOUR_MS)
    assert [pulled(engine, topic) for topic in ("lim.a", "vic.b")] == [[("same", b"lim.a")], [("same", b"vic.b")]]


def test_what_fell_due_with_one_id_on_two_topics_is_placed_once_on_each_after_a_kill_before_it_is_settled(
    open_engine: type_of_open, folder: Path, clock: ManualClock, tmp_path: Path
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    engine = open_engine(dedup_messages_max=1)
    publish(engine, message("lim.a", due_ms=due_ms), message("vic.a", due_ms=due_ms))
    engine.context.schedule.fired = lambda number, **_: None  # type: ignore[method-assign]
    clock.advance(HOUR_MS)
    assert pulled(engine, "lim.a") == [("same", b"lim.a")]
    image = tmp_path / "image"
    shutil.copytree(folder, image)

    again = Engine.open(image, clock=clock)
    try:
        assert [pulled(again, topic) for topic in ("lim.a", "vic.a")] == [[], [("same", b"vic.a")]]
        figures = [again.admin.topic_figures(topic) for topic in ("lim.a", "vic.a")]
        assert [(one["stored"], one["scheduled"]) for one in figures] == [(1, 0), (1, 0)]
    finally:
        again.close()


def test_what_was_answered_before_a_power_cut_holds_for_each_topic_after_it(
    open_engine: type_of_open, folder: Path, clock: ManualClock, tmp_path: Path
) -> None:
    storage, image = PoweredStorage(), tmp_path / "image"
    engine = open_engine(storage=storage)
    due_ms = clock.now_ms() + HOUR_MS
    batch = [message(topic, due_ms=due_ms) for topic in ("lim.a", "vic.a")]
    assert publish(engine, *batch, message("lim.now"), message("vic.now")) == ["stored"] * 4
    assert engine.publisher.cancel(["same", "early"], topics=LIM) == ["canceled", "unknown"]
    storage.copy_after_power_cut(folder, image, random=Random(1), whole_in="")

    again = Engine.open(image, clock=clock)
    try:
        assert publish(again, *batch, message("lim.now"), message("vic.now")) == ["duplicate"] * 4
        assert publish(again, message("lim.a", "early"), message("vic.a", "early")) == ["stored", "stored"]
        clock.advance(HOUR_MS)
        assert pulled(again, "lim.a") == []
        assert sorted(pulled(again, "vic.a")) == [("early", b"vic.a"), ("same", b"vic.a")]
    finally:
        again.close()


def test_a_cancel_acts_within_its_scope_and_says_nothing_of_what_is_outside(engine: Engine, clock: ManualClock) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    publish(engine, message("vic.a", "waits", due_ms=due_ms), message("vic.a", "came"))
    publish(engine, message("vic.a", "both", due_ms=due_ms), message("lim.a", "both", due_ms=due_ms))

    assert engine.publisher.cancel(["waits", "came", "both"], topics=LIM) == ["unknown", "unknown", "canceled"]
    assert [engine.publisher.scheduled_message(one, topics=LIM) for one in ("waits", "both")] == [None, None]
    assert engine.publisher.cancel(["came"], topics=VIC) == ["too_late"]

    assert publish(engine, message("vic.a", "new"), message("vic.a", "came")) == ["stored", "duplicate"]
    clock.advance(HOUR_MS)
    assert pulled(engine, "lim.a") == []
    assert sorted(pulled(engine, "vic.a")) == [(one, b"vic.a") for one in ("both", "came", "new", "waits")]


def test_a_message_that_waits_is_canceled_although_another_of_its_id_was_delivered(
    engine: Engine, clock: ManualClock
) -> None:
    publish(engine, message("lim.a"), message("lim.b", due_ms=clock.now_ms() + HOUR_MS))

    assert engine.publisher.cancel(["same"]) == ["canceled"]

    clock.advance(HOUR_MS)
    assert [pulled(engine, topic) for topic in ("lim.a", "lim.b")] == [[("same", b"lim.a")], []]


@pytest.mark.parametrize("reopened", [False, True], ids=["before", "after a restart"])
def test_a_cancel_that_came_first_is_good_for_its_scope(
    open_engine: type_of_open, clock: ManualClock, reopened: bool
) -> None:
    engine = open_engine()
    assert engine.publisher.cancel(["same"], topics=LIM) == ["unknown"]
    if reopened:
        engine = open_engine()
    due_ms = clock.now_ms() + HOUR_MS

    batch = [message("lim.a"), message("lim.b", due_ms=due_ms), message("vic.a"), message("vic.b", due_ms=due_ms)]
    assert publish(engine, *batch) == ["stored"] * 4
    assert publish(engine, *batch) == ["duplicate"] * 4
    assert engine.publisher.cancel(["same"], topics=LIM) == ["canceled"]

    clock.advance(HOUR_MS)
    assert [pulled(engine, topic) for topic in ("lim.a", "lim.b", "vic.a", "vic.b")] == [
        [], [], [("same", b"vic.a")], [("same", b"vic.b")],
    ]  # fmt: skip


def test_the_action_log_says_of_cancels_on_which_topics_they_were(
    engine: Engine, folder: Path, clock: ManualClock
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    publish(engine, message("lim.a", due_ms=due_ms), message("lim.b", due_ms=due_ms), message("lim.a", "came"))

    engine.publisher.cancel(["same", "early", "came"], topics=["lim.*", "lim.*"])
    engine.publisher.cancel(["early"])

    canceled = [(one.ids, one.topics, one.scope) for one in actions_of(folder) if isinstance(one, journal.Canceled)]
    assert canceled == [
        (["same", "same", "early"], ["lim.a", "lim.b", ""], ("lim.*",)),
        (["early"], [""], None),
    ]  # fmt: skip


def test_one_tenants_flood_of_cancels_leaves_the_others_theirs(open_engine: type_of_open) -> None:
    engine = open_engine(cancel_tombstones_max=10)
    engine.publisher.cancel(["precious"], topics=VIC)
    for number in range(30):
        engine.publisher.cancel([f"flood-{number}"], topics=LIM)

    publish(engine, message("vic.a", "precious"), message("lim.a", "flood-0"), message("lim.a", "flood-29"))

    assert pulled(engine, "vic.a") == []
    assert pulled(engine, "lim.a") == [("flood-0", b"lim.a")]


# -- by HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    """A server with the tokens `lim` for lim.* and `vic` for vic.*."""
    tokens = {
        hashlib.sha256(name.encode()).digest(): Principal(name=name, roles=frozenset(Role), topics=(f"{name}.*",))
        for name in ("lim", "vic")
    }
    with served(tmp_path / "data", access=Access(tokens=tokens)) as one:
        yield one


@pytest.fixture
def ask(server: HttpServer) -> Iterator[Tenant]:
    """A tenant's request: ask("lim", "POST", path, json=...)."""
    with requests.Session() as session:
        session.trust_env = False

        def send(who: str, method: str, path: str, **more: Any) -> Any:
            headers = {"authorization": f"Bearer {who}"}
            return session.request(method, f"{server.url}{path}", headers=headers, timeout=120, **more)

        yield send


def publish_as(ask: Tenant, who: str, *ids: str, **more: Any) -> list[str]:
    messages = [{"id": one, "body": who, **more} for one in ids]
    answer = ask(who, "POST", "/v1/publish", json=of_topic(f"{who}.a", *messages)).json()
    return [one["status"] for one in answer["results"]]


def cancel_as(ask: Tenant, who: str, *ids: str) -> list[str]:
    answer = ask(who, "POST", "/v1/scheduled/cancel", json={"ids": list(ids)}).json()
    assert [one["id"] for one in answer["results"]] == list(ids)
    return [one["status"] for one in answer["results"]]


def pull_as(ask: Tenant, who: str) -> list[tuple[str, str]]:
    answer = ask(who, "POST", f"/v1/topics/{who}.a/groups/g/pull", json={"max_messages": 100}).json()
    return [(one["id"], one["body"]) for one in answer["deliveries"]]


def test_a_tenant_that_publishes_anothers_ids_first_holds_none_of_its_messages_up(ask: Tenant) -> None:
    assert publish_as(ask, "lim", "1", "2") == publish_as(ask, "lim", "3", delay_ms=HOUR_MS) * 2 == ["stored", "stored"]

    assert publish_as(ask, "vic", "1", "2", "3") == ["stored"] * 3
    assert publish_as(ask, "vic", "1", "2", "3") == ["duplicate"] * 3

    assert pull_as(ask, "vic") == [("1", "vic"), ("2", "vic"), ("3", "vic")]


def test_a_tenant_that_cancels_anothers_ids_stops_none_before_or_after_they_come(ask: Tenant) -> None:
    assert publish_as(ask, "vic", "scheduled", delay_ms=HOUR_MS) == ["stored"]

    assert cancel_as(ask, "lim", "scheduled", "to-come", "scheduled") == ["unknown"] * 3
    assert publish_as(ask, "vic", "to-come") == ["stored"]
    assert publish_as(ask, "lim", "to-come", "scheduled") == ["stored", "stored"]

    assert pull_as(ask, "vic") == [("to-come", "vic")]
    assert pull_as(ask, "lim") == []
    assert cancel_as(ask, "lim", "to-come", "scheduled") == ["canceled", "canceled"]
    assert cancel_as(ask, "vic", "to-come", "scheduled") == ["too_late", "canceled"]


def test_a_tenant_finds_its_own_scheduled_message_and_not_that_of_another(ask: Tenant) -> None:
    publish_as(ask, "vic", "one", delay_ms=HOUR_MS)
    publish_as(ask, "vic", "both", delay_ms=HOUR_MS)
    publish_as(ask, "lim", "both", delay_ms=2 * HOUR_MS)

    found = {
        (who, one): ask(who, "GET", f"/v1/scheduled/{one}") for who in ("lim", "vic") for one in ("one", "both", "none")
    }

    assert {place: one.status_code for place, one in found.items()} == {
        ("lim", "one"): 404, ("lim", "both"): 200, ("lim", "none"): 404,
        ("vic", "one"): 200, ("vic", "both"): 200, ("vic", "none"): 404,
    }  # fmt: skip
    assert [found[who, "both"].json()["topic"] for who in ("lim", "vic")] == ["lim.a", "vic.a"]
