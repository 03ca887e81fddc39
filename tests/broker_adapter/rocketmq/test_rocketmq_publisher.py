"""How a batch goes to a proxy: what goes together, what goes alone, what is sent again, and what is not sent at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.proxy_connection import ProxyServers
from broker_adapter.rocketmq.proxy_connection import connect as connect_to_proxy
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerError, BrokerRefused, BrokerUnavailable, NotAuthenticated, StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.rocketmq.scripted_proxy import OK, Answer, ScriptedProxy, scripted_proxy, status

HOST = "127.0.0.1"
TIMEOUT_MS = 60_000
STORED, REJECTED, DEFERRED = PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.DEFERRED


@pytest.fixture
def normal() -> Iterator[ScriptedProxy]:
    """A proxy of topics without order."""
    with scripted_proxy(definition.NORMAL) as proxy:
        yield proxy


@pytest.fixture
def fifo() -> Iterator[ScriptedProxy]:
    """A proxy of topics that keep order."""
    with scripted_proxy(definition.FIFO) as proxy:
        yield proxy


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The adapter on the proxy that the test asked for."""
    name = "normal" if "normal" in request.fixturenames else "fifo"
    opened = connect(request.getfixturevalue(name).url)
    yield opened
    opened.close()


def batch(*numbers: int, keys: str = "", topic: str = "t") -> list[Message]:
    """Messages with a body that is their number, and the keys that the letters say."""
    return [
        Message(id=f"m{n}", topic=topic, body=b"%d" % n, key=keys[place] if keys else None)
        for place, n in enumerate(numbers)
    ]


def test_messages_without_order_go_in_one_request_a_topic(normal: ScriptedProxy, broker: Broker) -> None:
    results = broker.publish([*batch(0, 1), *batch(2, topic="u"), *batch(3)])

    assert {one.status for one in results} == {STORED}
    assert sorted(normal.sent) == [["m0", "m1", "m3"], ["m2"]]


def test_a_request_that_is_refused_for_one_message_is_refused_with_what_others_were_answered(
    normal: ScriptedProxy, broker: Broker
) -> None:
    too_large = status(definition.MESSAGE_BODY_TOO_LARGE, "too large")
    normal.answer = lambda messages: too_large if any(one.body == b"1" for one in messages) else OK
    messages = [*batch(0, 1, 2), *batch(3, topic="u")]

    with pytest.raises(BrokerRefused, match="too large") as raised:
        broker.publish(messages)
    published = publish_isolated(broker.publish, messages)

    assert {place: one.status for place, one in raised.value.answered.items()} == {3: STORED}
    assert [published.results[place].status for place in range(4)] == [STORED, REJECTED, STORED, STORED]
    assert sorted(normal.sent[:2]) == [["m0", "m1", "m2"], ["m3"]]


def test_a_request_that_an_operator_has_to_help_is_not_sent_again(normal: ScriptedProxy, broker: Broker) -> None:
    normal.answer = lambda _: status(definition.FORBIDDEN, "no writable queue")

    results = broker.publish(batch(0, 1))

    assert [one.status for one in results] == [DEFERRED, DEFERRED]
    assert normal.sent == [["m0", "m1"]]
    assert "updateTopicPerm" in str(results[1].error)


def test_messages_of_a_group_go_one_after_the_other_and_groups_beside_each_other(
    fifo: ScriptedProxy, broker: Broker
) -> None:
    results = broker.publish(batch(0, 1, 2, 3, 4, keys="aabab"))

    assert {one.status for one in results} == {STORED}
    assert all(len(request) == 1 for request in fifo.sent)
    assert [sorted(map(tuple, fifo.sent[begin : begin + 2])) for begin in (0, 2)] == [
        [("m0",), ("m2",)],
        [("m1",), ("m4",)],
    ]
    assert fifo.sent[4] == ["m3"]


def test_behind_a_message_that_was_put_off_none_of_its_group_is_sent(fifo: ScriptedProxy, broker: Broker) -> None:
    forbidden = status(definition.FORBIDDEN, "no writable queue")
    fifo.answer = lambda messages: forbidden if messages[0].body == b"0" else OK

    results = broker.publish(batch(0, 1, 2, 3, keys="aaab"))

    assert [one.status for one in results] == [DEFERRED, DEFERRED, DEFERRED, STORED]
    assert sorted(fifo.sent) == [["m0"], ["m3"]]
    assert "an earlier message of its key" in str(results[2].error)


def test_a_message_that_can_never_be_stored_holds_up_none_of_its_group(fifo: ScriptedProxy, broker: Broker) -> None:
    fifo.answer = lambda messages: status(definition.ILLEGAL_MESSAGE_KEY) if messages[0].body == b"0" else OK

    results = broker.publish(batch(0, 1, keys="aa"))

    assert [one.status for one in results] == [REJECTED, STORED]


def test_an_empty_body_is_rejected_and_never_asked_for(normal: ScriptedProxy, broker: Broker) -> None:
    empty = Message(id="empty", topic="t", body=b"")

    results = broker.publish([*batch(0), empty, *batch(1)])

    assert [one.status for one in results] == [STORED, REJECTED, STORED]
    assert "empty body" in str(results[1].error)
    assert normal.sent == [["m0", "m1"]]


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (definition.MASTER_PERSISTENCE_TIMEOUT, "sendStatus=FLUSH_DISK_TIMEOUT", StorageFailed),
        (definition.HA_NOT_AVAILABLE, "sendStatus=SLAVE_NOT_AVAILABLE", StorageFailed),
        (definition.INTERNAL_SERVER_ERROR, "the broker's disk is full", StorageFailed),
        (definition.INTERNAL_SERVER_ERROR, "connect to h:10911 failed", BrokerUnavailable),
        (definition.TOO_MANY_REQUESTS, "flow limit", BrokerUnavailable),
        (definition.UNAUTHORIZED, "check signature failed.", NotAuthenticated),
    ],
)
def test_what_concerns_all_is_raised_and_younger_messages_of_a_group_are_not_sent(
    fifo: ScriptedProxy, broker: Broker, code: int, text: str, kind: type[BrokerError]
) -> None:
    fifo.answer = lambda _: status(code, text)

    with pytest.raises(BrokerError) as raised:
        broker.publish(batch(0, 1, keys="aa"))

    assert type(raised.value) is kind
    assert text in str(raised.value)
    assert fifo.sent == [["m0"]]


def test_after_an_error_the_next_publish_has_a_connection_of_its_own(normal: ScriptedProxy, broker: Broker) -> None:
    normal.answer = lambda _: status(definition.PROXY_TIMEOUT)
    with pytest.raises(BrokerUnavailable):
        broker.publish(batch(0))
    normal.answer = lambda _: OK

    assert [one.status for one in broker.publish(batch(0))] == [STORED]


def test_a_topic_that_never_was_is_put_off_alone(normal: ScriptedProxy, broker: Broker) -> None:
    missing = broker.publish(batch(0, topic="missing"))
    broker.publish(batch(1))
    again = broker.publish(batch(2, topic="missing"))

    assert [one.status for one in (*missing, *again)] == [DEFERRED, DEFERRED]
    assert "create it" in str(missing[0].error)


@pytest.mark.parametrize("asked", ["t", "missing"])
def test_where_all_topics_are_gone_that_were_there_it_is_an_outage_of_the_brokers(
    normal: ScriptedProxy, broker: Broker, asked: str
) -> None:
    broker.publish([*batch(0), *batch(1, topic="u")])
    normal.topics = set()
    normal.answer = lambda _: status(definition.TOPIC_NOT_FOUND, "no route")

    with pytest.raises(BrokerUnavailable, match="no broker serves"):
        broker.publish(batch(2, topic=asked))


def test_a_topic_that_was_removed_is_put_off_alone_while_others_are_there(
    normal: ScriptedProxy, broker: Broker
) -> None:
    broker.publish([*batch(0), *batch(1, topic="u")])
    normal.topics = {"u"}
    normal.answer = _only("u")

    results = broker.publish([*batch(2), *batch(3, topic="u")])
    alone = broker.publish(batch(4))

    assert [one.status for one in (*results, *alone)] == [DEFERRED, STORED, DEFERRED]


def test_a_broker_that_nobody_can_ask_is_a_weakness(normal: ScriptedProxy, broker: Broker) -> None:
    assert isinstance(broker, Inspectable)

    [weakness] = broker.inspect(["t"]).weaknesses

    assert "is unknown" in weakness.problem
    assert "?nameserver=" in weakness.cure


def test_the_first_proxy_that_answers_is_used(normal: ScriptedProxy) -> None:
    broker = connect(f"rocketmq://127.0.0.1:1,127.0.0.1:{normal.port}")

    results = broker.publish(batch(0))
    broker.close()

    assert [one.status for one in results] == [STORED]


@pytest.mark.slow
def test_no_proxy_is_unavailable_at_the_time_out_and_says_why() -> None:
    broker = connect("rocketmq://127.0.0.1:1?timeout_ms=3000")

    with pytest.raises(BrokerUnavailable, match="onnect"):
        broker.publish(batch(0))
    broker.close()


def test_why_a_proxy_is_not_used_is_said_though_the_last_try_had_no_time_to_find_it_out(tmp_path: Path) -> None:
    tls = certificate(tmp_path, address=HOST)
    with scripted_proxy(definition.NORMAL, tls=tls) as proxy:
        servers = ProxyServers(
            hosts=[(HOST, proxy.port)], addresses="p", login=None, credentials=grpc.ssl_channel_credentials()
        )
        with pytest.raises(BrokerUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*ca_file="):
            connect_to_proxy(servers, clock=JumpingClock(), deadline_ms=TIMEOUT_MS)


@pytest.mark.slow
def test_a_client_shows_its_certificate_where_a_proxy_wants_one(tmp_path: Path) -> None:
    tls = certificate(tmp_path, address=HOST)
    with scripted_proxy(definition.NORMAL, tls=tls) as proxy:
        url = f"rocketmqs://{HOST}:{proxy.port}?ca_file={tls.certificate}"
        shown = connect(f"{url}&cert_file={tls.certificate}&key_file={tls.key}")
        results = shown.publish(batch(0))
        shown.close()
        hidden = connect(f"{url}&timeout_ms=1000")
        with pytest.raises(BrokerUnavailable):
            hidden.publish(batch(1))
        hidden.close()

    assert [one.status for one in results] == [STORED]
    assert proxy.sent == [["m0"]]


class JumpingClock(SystemClock):
    """Has a millisecond left of TIMEOUT_MS from the third time on that it is read."""

    def __init__(self) -> None:
        self._readings = 0

    def monotonic_ms(self) -> int:
        """Its own time."""
        self._readings += 1
        return 0 if self._readings < 3 else TIMEOUT_MS - 1


def _only(topic: str) -> Answer:
    def answer(messages: Sequence[definition.Message]) -> definition.Status:
        return OK if messages[0].topic.name == topic else status(definition.TOPIC_NOT_FOUND, "no route")

    return answer
