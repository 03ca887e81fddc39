"""What the inspection of Pulsar finds weak, by what the admin API tells, and what it says without one."""

from __future__ import annotations

import socket

import pytest

from broker_adapter.pulsar.durability_inspection import namespace_weaknesses, topic_weaknesses, unread_weaknesses
from outbox_core.messages.broker_port import Inspectable
from outbox_core.messages.connect import connect


def test_a_namespace_that_confirms_what_one_bookie_has_is_weak_and_one_without_a_policy_is_not() -> None:
    policy = {"bookkeeperEnsemble": 3, "bookkeeperWriteQuorum": 3, "bookkeeperAckQuorum": 1}

    [weakness] = namespace_weaknesses("shop/eu", policy)

    assert (weakness.subject, weakness.topic) == ("shop/eu", None)
    assert "set bookkeeperAckQuorum to 2" in weakness.cure
    assert list(namespace_weaknesses("shop/eu", {})) == []


def test_a_namespace_that_drops_what_nobody_has_read_is_weak() -> None:
    hold, evict = {"policy": "producer_request_hold"}, {"policy": "consumer_backlog_eviction"}

    [evicting] = unread_weaknesses("shop/eu", {"destination_storage": hold, "message_age": evict}, ttl_s=0)
    [expiring] = unread_weaknesses("shop/eu", {"destination_storage": hold}, ttl_s=3_600)

    assert ("dropped" in evicting.problem, "producer_exception" in evicting.cure) == (True, True)
    assert ("after 3,600 s" in expiring.problem, "remove-message-ttl" in expiring.cure) == (True, True)
    assert list(unread_weaknesses("shop/eu", {}, ttl_s=0)) == []


def test_a_topic_without_a_subscription_is_weak_and_so_is_one_that_is_missing() -> None:
    [empty] = topic_weaknesses("orders", [])
    [missing] = topic_weaknesses("orders", None)

    assert "it has no subscription" in empty.problem
    assert "it is missing" in missing.problem
    assert (empty.topic, missing.topic) == ("orders", "orders")
    assert list(topic_weaknesses("orders", ["billing"])) == []


def test_without_the_admin_api_the_inspection_says_that_subscriptions_are_not_checked() -> None:
    broker = connect("pulsar://127.0.0.1:1")
    assert isinstance(broker, Inspectable)

    [weakness] = broker.inspect(["orders"]).weaknesses
    broker.close()

    assert "admin=http://" in weakness.cure


@pytest.mark.parametrize(("hangs", "words"), [(False, "refused"), (True, "no answer in time")])
def test_an_admin_api_that_does_not_answer_is_named_and_fails_no_inspection(hangs: bool, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if hangs else 1
        broker = connect(f"pulsar://127.0.0.1:1?admin=http://127.0.0.1:{port}&timeout_ms=1000")
        assert isinstance(broker, Inspectable)

        [weakness] = broker.inspect(["orders"]).weaknesses
        broker.close()

    assert (weakness.topic, words in weakness.problem) == (None, True)
    assert "admin=" in weakness.cure
