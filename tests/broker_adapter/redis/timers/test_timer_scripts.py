"""The scripts on a real server do what the model does, move by move, and leave the same in every key."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker_adapter.redis.script_sender import Argument, Script
from broker_adapter.redis.timers import slot_scripts as scripts
from broker_adapter.redis.timers.group_admin import group_arguments
from broker_adapter.redis.timers.slot_scripts import SlotScripts
from outbox_core.messages.message import GroupConfig
from tests.broker_adapter.redis.redis_cluster import STEADY_MS, redis_cluster
from tests.broker_adapter.redis.redis_server import redis_server
from tests.broker_adapter.redis.timers.timer_model import ModelGroup, ModelSlot, check

IDS: Final = [f"m{number}" for number in range(3)]
GROUPS: Final = ("g", "h")
WINDOW_MS: Final = 3_600_000
LATER: Final = 10**9
"""In ms: not during a test."""
LATEST_MS: Final = 2**52
"""The caller's clock bounds nothing here."""
MAX_ATTEMPTS: Final = 3
one_id = st.sampled_from(IDS)
one_group = st.sampled_from(GROUPS)
soon_or_late = st.sampled_from([0, LATER])


class Moves(RuleBasedStateMachine):
    """The same moves on both. Durations are over at the next move, or not during the test."""

    def __init__(self, client_of: Callable[[str], redis.Redis]) -> None:
        super().__init__()
        self.topic = uuid.uuid4().hex
        self.client = client_of(self.key("store"))
        self.slot = SlotScripts("outbox:")
        self.model = ModelSlot({name: ModelGroup() for name in GROUPS}, max_attempts=MAX_ATTEMPTS)
        self.receipts: list[tuple[str, str, int, int]] = []
        """Group, id, the model's epoch, the server's."""

    @initialize()
    def declare(self) -> None:
        for group in GROUPS:
            config = GroupConfig(max_attempts=MAX_ATTEMPTS)
            assert self.run(scripts.DECLARE, group_arguments(group, config), group=group) == 1

    @rule(ids=st.lists(one_id, min_size=1, max_size=3), due=soon_or_late)
    def add(self, ids: list[str], due: int) -> None:
        arguments = [part for one in ids for part in (one, self.now_us() // 1_000 + due if due else 0, "body")]
        added = self.run(scripts.ADD, [WINDOW_MS, LATEST_MS, "wake", *arguments])
        assert added == self.model.add(ids, self.tick() + due if due else 0)

    @rule(one=one_id)
    def time_comes(self, one: str) -> None:
        """What is in the store becomes due, which is what waiting for it would do."""
        if one in self.model.store:
            self.client.zadd(self.key("store"), {one: 1}, xx=True)
            self.model.store[one] = (0, 0)

    @rule()
    def fire(self) -> None:
        self.run(scripts.FIRE, [100, LATEST_MS])
        self.tick()
        self.model.fire()

    @rule(group=one_group, limit=st.integers(1, 5), invisible=st.sampled_from([1, LATER]), begins=st.booleans())
    def take(self, group: str, limit: int, invisible: int, begins: bool) -> None:
        """As a pull does, behind an expiry."""
        self.expire_deliveries(group)
        _, epoch, _, *fields = self.run(scripts.TAKE, [limit, invisible, 10**6, int(begins), 0], group=group)
        self.tick()
        suspected = set(self.model.groups[group].suspects)
        expected = self.model.take(group, limit=limit, invisible=invisible, begins=begins)
        assert [
            (message_id.decode(), attempt, has_expired)
            for message_id, attempt, has_expired in zip(fields[::4], fields[1::4], fields[3::4], strict=True)
        ] == [(message_id, attempt, int(message_id in suspected)) for message_id, _, attempt in expected]
        self.receipts += [(group, one, model_epoch, epoch) for one, model_epoch, _ in expected]

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        group, one, model_epoch, epoch = data.draw(st.sampled_from(self.receipts))
        assert self.run(scripts.ACK, [epoch, one], group=group) == [self.model.ack(group, one, model_epoch) or 0]

    @rule(group=one_group, one=one_id)
    def ack_with_a_receipt_that_nobody_was_given(self, group: str, one: str) -> None:
        assert self.run(scripts.ACK, [1, one], group=group) == [self.model.ack(group, one, -1)]

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), delay=soon_or_late, counts=st.booleans())
    def nack(self, data: st.DataObject, delay: int, counts: bool) -> None:
        group, one, model_epoch, epoch = data.draw(st.sampled_from(self.receipts))
        found = self.run(scripts.NACK, [delay, "reason", int(counts), epoch, one], group=group)
        self.tick()
        assert found == [self.model.nack(group, one, model_epoch, delay=delay, counts=counts)]

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), invisible=st.sampled_from([1, LATER]), begun=st.booleans())
    def extend(self, data: st.DataObject, invisible: int, begun: bool) -> None:
        group, one, model_epoch, epoch = data.draw(st.sampled_from(self.receipts))
        found = self.run(scripts.EXTEND, [invisible, int(begun), epoch, one], group=group)
        self.tick()
        assert found == [self.model.extend(group, one, model_epoch, invisible=invisible, begun=begun)]

    @rule(group=one_group)
    def expire(self, group: str) -> None:
        self.expire_deliveries(group)

    def expire_deliveries(self, group: str) -> None:
        self.run(scripts.EXPIRE, [100, "reason"], group=group)
        self.tick()
        self.model.expire(group)

    @rule(one=one_id)
    def cancel(self, one: str) -> None:
        assert self.run(scripts.CANCEL, [WINDOW_MS, one]) == [self.model.cancel(one)]

    @rule(group=one_group, one=one_id)
    def redrive(self, group: str, one: str) -> None:
        found = self.run(scripts.REDRIVE, [1, 0, 0, one], group=group)
        self.tick()
        assert found == self.model.redrive(group, one)

    @invariant()
    def every_key_holds_what_the_model_says(self) -> None:
        model = self.model
        check(model)
        counts = {one: sum(one in of.acked for of in model.groups.values()) for one in model.log}
        expected: dict[str, object] = {
            "store": set(model.store),
            "log": set(model.log),
            "ids": model.added,
            "canceled": model.canceled,
            "body": model.body,
            "acks": {one for one, count in counts.items() if count},
        }
        for name, of in model.groups.items():
            places = {"retry": of.retry, "prepare": of.prepare, "dead": of.dead, "state": of.state}
            expected |= {f"group:{name}:{place}": set(ids) for place, ids in places.items()}
        assert self.ids_in(list(expected)) == expected

    def run(self, script: Script, arguments: Sequence[Argument], *, group: str | None = None) -> Any:
        """The answer, once the server's clock has moved on since the last call: by more than the shortest duration."""
        call = (
            self.slot.of_slot(script, self.topic, 0, arguments)
            if group is None
            else self.slot.of_group(script, self.topic, 0, group, arguments)
        )
        call.with_script = True
        begun_us = self.now_us()
        while self.now_us() <= begun_us + 1_000:
            time.sleep(0.001)
        [command] = call.commands()
        return self.client.execute_command(*command)

    def tick(self) -> int:
        """Let the model's clock move on by more than the shortest duration."""
        self.model.now += 2
        return self.model.now

    def now_us(self) -> int:
        seconds, microseconds = self.client.time()
        return seconds * 1_000_000 + microseconds

    def key(self, name: str) -> str:
        return f"outbox:timers:{{{self.topic}:0}}:{name}"

    def ids_in(self, names: Sequence[str]) -> dict[str, set[str]]:
        """Those of each key, in one round trip."""
        pipeline: Any = self.client.pipeline(transaction=False)
        for name in names:
            is_hash = name in {"body", "acks"} or name.endswith(":state")
            pipeline.hkeys(self.key(name)) if is_hash else pipeline.zrange(self.key(name), 0, -1)
        answers = zip(names, pipeline.execute(), strict=True)
        return {name: {one.decode() for one in found} for name, found in answers}


@pytest.fixture(scope="module", params=["server", "cluster"])
def client_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], redis.Redis]]:
    """The client of the server that has a key, of servers whose disks do not matter here."""
    with contextlib.ExitStack() as stack:
        if request.param == "server":
            opened = stack.enter_context(contextlib.closing(stack.enter_context(redis_server(appendonly="no")).client))
            yield lambda _: opened
        else:
            cluster = stack.enter_context(redis_cluster(node_timeout_ms=STEADY_MS, appendonly="no"))
            clients = {
                master.port: stack.enter_context(contextlib.closing(master.client)) for master in cluster.masters
            }
            yield lambda key: clients[cluster.master_of(key).port]


@pytest.mark.slow
def test_the_scripts_do_what_the_model_does(client_of: Callable[[str], redis.Redis]) -> None:
    machine: Callable[[], Moves] = lambda: Moves(client_of)  # noqa: E731
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=125, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
