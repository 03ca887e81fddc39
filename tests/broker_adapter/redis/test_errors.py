"""The table of errors: complete over the server's codes and the client's exceptions, and what a real server answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis.exceptions as client

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.redis import errors
from broker_adapter.redis.errors import CLIENT_ERRORS, CODES, EXCEPTIONS, exception_for, treatment_of
from broker_adapter.redis.script_sender import Script, ScriptCall
from outbox_core.common.errors import BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, server_program

Open = Callable[[str], Broker]


def url_of(server: RedisServer, options: str = "wait=0", login: str = "") -> str:
    return f"redis://{login}{HOST}:{server.port}/?{options}"


def codes_in(program: Path) -> set[str]:
    """The codes of errors in a server's program, but MOVED and ASK, which it puts into an answer by %s."""
    return {code.decode() for code in re.findall(rb"\0-([A-Z]{2,20}) ", program.read_bytes())}


def test_every_code_in_the_servers_program_has_a_treatment() -> None:
    found = codes_in(Path(server_program()))

    assert {"WRONGTYPE", "OOM", "MISCONF", "NOPERM", "CLUSTERDOWN", "UNBLOCKED"} <= found
    assert found - set(CODES) == set()


def test_every_exception_of_the_client_has_a_treatment() -> None:
    raised = [
        kind
        for _, kind in inspect.getmembers(client, inspect.isclass)
        if issubclass(kind, Exception) and kind is not client.IncorrectPolicyType
    ]

    assert [kind for kind in raised if not issubclass(kind, CLIENT_ERRORS)] == []
    known = tuple(kind for kind, _ in EXCEPTIONS)
    assert [kind for kind in raised if not issubclass(kind, (*known, client.ResponseError))] == []


@pytest.mark.parametrize(
    ("error", "treatment"),
    [
        (client.ResponseError("SOMETHINGNEW of a later version"), Treatment.DEFERRED),
        (client.ConnectionError("refused"), Treatment.OUTAGE),
        (client.BusyLoadingError("loading", status_code="LOADING"), Treatment.OUTAGE),
        (client.AuthenticationError("no", status_code="WRONGPASS"), Treatment.NOT_AUTHENTICATED),
        (client.ClusterDownError("down", status_code="CLUSTERDOWN"), Treatment.OUTAGE),
        (client.NoScriptError("none", status_code="NOSCRIPT"), Treatment.OUTAGE),
        (client.SlotNotCoveredError("slot"), Treatment.OUTAGE),
    ],
)
def test_an_error_means_what_its_code_says_and_else_what_its_class_says(error: Exception, treatment: Treatment) -> None:
    assert treatment_of(error) is treatment


def test_a_key_of_a_stranger_defers_its_topic_with_the_cure_and_no_other(
    server: RedisServer, open_broker: Open
) -> None:
    broker = open_broker(url_of(server))
    server.ask("SET", "outbox:{taken}", "a string")
    server.ask("SET", "outbox:{ids.taken}:ids", "a string")

    results = broker.publish([message(topic, 0) for topic in ("free", "taken", "ids.taken")])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.DEFERRED]
    assert all("?prefix=" in str(one.error) and "WRONGTYPE" in str(one.error) for one in results[1:])
    server.ask("DEL", "outbox:{taken}")
    assert broker.publish([message("taken", 0)])[0].status is PublishStatus.STORED


def test_a_stream_that_can_take_no_more_ids_defers_what_is_left_and_says_what_was_stored(
    server: RedisServer, open_broker: Open
) -> None:
    broker = open_broker(url_of(server))
    server.ask("XADD", "outbox:{full}", "18446744073709551615-18446744073709551614", "f", "v")

    results = broker.publish([message("full", n) for n in range(3)])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.DEFERRED]
    assert server.ask("ZCARD", "outbox:{full}:ids") == 1


def test_a_full_server_stores_nothing_and_says_so(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(url_of(server))
    server.ask("CONFIG", "SET", "maxmemory", 1)

    with pytest.raises(StorageFailed, match="raise maxmemory"):
        broker.publish([message("t", 0)])
    assert server.ask("EXISTS", "outbox:{t}", "outbox:{t}:ids") == 0

    server.ask("CONFIG", "SET", "maxmemory", 0)
    assert broker.publish([message("t", 0)])[0].status is PublishStatus.STORED


def test_a_read_only_server_is_an_outage(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(url_of(server))
    server.ask("REPLICAOF", HOST, 1)

    with pytest.raises(BrokerUnavailable, match="name the master"):
        broker.publish([message("t", 0)])


def test_too_few_replicas_for_the_server_are_an_outage(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(url_of(server))
    server.ask("CONFIG", "SET", "min-replicas-to-write", 1)

    with pytest.raises(BrokerUnavailable, match="min-replicas-to-write"):
        broker.publish([message("t", 0)])


def test_scripts_that_were_forgotten_are_sent_again(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(url_of(server))
    for number in range(3):
        server.ask("SCRIPT", "FLUSH")
        assert broker.publish([message("t", number)])[0].status is PublishStatus.STORED

    assert server.ask("XLEN", "outbox:{t}") == 3


def test_a_script_that_there_was_no_time_to_send_is_reported_as_not_answered_in_time() -> None:
    call = ScriptCall(script=Script("return 1"), keys=["key"], arguments=[])
    call.settle(client.NoScriptError("none", status_code="NOSCRIPT"))

    call.end()

    assert "no answer in time" in str(exception_for(call.outcome, addresses="a server"))


def test_a_user_without_rights_on_a_topic_stores_the_others_and_is_not_authorized(
    server: RedisServer, open_broker: Open
) -> None:
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:{open}*", "+@all")
    broker = open_broker(url_of(server, login="app:word@"))

    with pytest.raises(NotAuthorized, match="ACL SETUSER") as raised:
        broker.publish([message("open", 0), message("shut", 0)])

    assert not isinstance(raised.value, NotAuthenticated)
    assert server.ask("XLEN", "outbox:{open}") == 1


def test_a_login_that_is_missing_is_not_authenticated(server: RedisServer, open_broker: Open) -> None:
    server.ask("ACL", "SETUSER", "default", "off")

    with pytest.raises(NotAuthenticated, match="password"):
        open_broker(url_of(server)).publish([message("t", 0)])


def test_no_error_of_ours_is_without_a_class() -> None:
    assert {errors.exception_for(client.ResponseError(code), addresses="here").retryable for code in CODES} == {True}
