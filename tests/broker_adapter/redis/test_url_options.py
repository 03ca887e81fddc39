"""The URL's options: what each does to a real stream, and what is refused with its cure."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis import open_broker as open_redis
from broker_adapter.redis.connections import opener
from broker_adapter.redis.durability_inspection import MasterSettings
from broker_adapter.redis.redis_options import URL_OPTIONS, RedisOptions
from broker_adapter.redis.redis_publisher import RedisPublisher, StreamStore
from broker_adapter.redis.script_sender import ScriptSender
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import PublishStatus
from outbox_core.runtime.logs import event_name
from tests.broker_adapter.publishing.publisher_conformance import message, with_option
from tests.broker_adapter.redis.redis_engine import RedisEngine
from tests.broker_adapter.redis.redis_server import wait_until

Open = Callable[[str], Broker]


def test_prefix_names_the_keys_and_the_topic_is_their_hash_tag(
    engine: RedisEngine, open_broker: Open, made_topic: str
) -> None:
    broker = open_broker(with_option(engine.url, "prefix=shop/eu:"))

    broker.publish([message(made_topic, 0)])

    assert engine.server.ask("XLEN", f"shop/eu:{{{made_topic}}}") == 1
    assert engine.server.ask("ZCARD", f"shop/eu:{{{made_topic}}}:ids") == 1


def test_maxlen_trims_the_stream_approximately(engine: RedisEngine, open_broker: Open, made_topic: str) -> None:
    broker = open_broker(with_option(engine.url, "maxlen=100"))

    broker.publish([message(made_topic, n) for n in range(1_000)])
    read = engine.read(made_topic, count=100)

    assert 100 <= len(read) < 300  # whole nodes of the stream go, of 100 entries each
    assert read[-1].body == b"999"


def trims_told(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """What lines on trimming say: how many entries went, and of each group how many it had not read or acknowledged."""
    names = ("levelname", "topic", "entries", "unread", "unacknowledged")
    return [
        {name: getattr(line, name) for name in names} for line in caplog.records if event_name(line) == "stream_trimmed"
    ]


def test_what_maxlen_deletes_unread_and_unacknowledged_is_told_by_group(
    engine: RedisEngine, open_broker: Open, made_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = open_broker(with_option(engine.url, "maxlen=100"))
    stream = f"outbox:{{{made_topic}}}"
    broker.publish([message(made_topic, n) for n in range(100)])
    assert trims_told(caplog) == []
    for group, count in (("unread", 0), ("some", 30), ("done", 100)):
        engine.server.ask("XGROUP", "CREATE", stream, group, "0")
        if count:
            entries = engine.server.ask(
                "XREADGROUP", "GROUP", group, "c", "COUNT", count, "STREAMS", stream, ">"
            )[0][1]  # fmt: skip
            if group == "done":
                engine.server.ask("XACK", stream, group, *[entry for entry, _ in entries])

    broker.publish([message(made_topic, n) for n in range(100, 250)])

    [told] = trims_told(caplog)
    trimmed = 250 - engine.server.ask("XLEN", stream)
    assert trimmed == 100, "whole nodes of the stream"
    assert told == {
        "levelname": "WARNING", "topic": made_topic, "entries": trimmed,
        "unread": {"unread": trimmed, "some": trimmed - 30}, "unacknowledged": {"some": 30},
    }  # fmt: skip


def test_a_trimming_that_no_group_misses_is_no_warning_and_lines_of_a_topic_are_a_minute_apart(
    engine: RedisEngine, open_broker: Open, made_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    broker = open_broker(with_option(engine.url, "maxlen=100"))

    for first in range(0, 1_000, 250):
        broker.publish([message(made_topic, n) for n in range(first, first + 250)])

    [told] = trims_told(caplog)
    assert (told["levelname"], told["unread"], told["unacknowledged"]) == ("INFO", {}, {})


def test_maxlen_is_a_weakness_that_status_and_a_start_tell(engine: RedisEngine, open_broker: Open) -> None:
    [weakness] = open_broker(with_option(engine.url, "maxlen=100")).inspect([]).weaknesses

    assert "maxlen=100" in weakness.subject
    assert "not read" in weakness.problem
    assert open_broker(engine.url).inspect([]).weaknesses == ()


def test_without_maxlen_nothing_is_trimmed(engine: RedisEngine, foreign: Broker, made_topic: str) -> None:
    results = foreign.publish([message(made_topic, n) for n in range(2_500)])

    assert {one.status for one in results} == {PublishStatus.STORED}
    assert [one.body for one in engine.read(made_topic, count=2_500)] == [str(n).encode() for n in range(2_500)]


def test_a_repeat_within_the_window_is_a_duplicate_and_in_the_stream_once(
    engine: RedisEngine, foreign: Broker, made_topic: str
) -> None:
    foreign.publish([message(made_topic, n) for n in range(3)])

    results = foreign.publish([message(made_topic, n) for n in (1, 3, 2, 3)])

    expected = [PublishStatus.DUPLICATE, PublishStatus.STORED, PublishStatus.DUPLICATE, PublishStatus.DUPLICATE]
    assert [one.status for one in results] == expected
    assert [one.body for one in engine.read(made_topic, count=4)] == [b"0", b"1", b"2", b"3"]


def test_one_id_on_two_topics_is_two_messages(engine: RedisEngine, foreign: Broker, made_topic: str) -> None:
    both = [message(made_topic, 0, id="same"), message(f"{made_topic}.b", 0, id="same")]

    assert [one.status for one in foreign.publish(both)] == [PublishStatus.STORED] * 2


@pytest.mark.slow
def test_window_ms_bounds_the_ids_that_are_kept_and_the_time_for_which_repeats_are_known(
    engine: RedisEngine, open_broker: Open, made_topic: str
) -> None:
    broker = open_broker(with_option(engine.url, "window_ms=1000"))
    ids = f"outbox:{{{made_topic}}}:ids"
    broker.publish([message(made_topic, n) for n in range(500)])

    # The key expires as a whole, a window after the newest id.
    assert wait_until(lambda: engine.server.ask("EXISTS", ids) == 0)
    again = open_broker(with_option(engine.url, "window_ms=60000")).publish([message(made_topic, 0)])

    assert again[0].status is PublishStatus.STORED
    assert engine.server.ask("ZCARD", ids) == 1
    assert 0 < engine.server.ask("PTTL", ids) <= 60_000


def test_one_call_trims_a_bounded_number_of_old_ids(engine: RedisEngine, foreign: Broker, made_topic: str) -> None:
    ids = f"outbox:{{{made_topic}}}:ids"
    for first in range(0, 3_000, 1_000):
        engine.server.ask("ZADD", ids, *[part for n in range(first, first + 1_000) for part in (n, f"old-{n}")])

    foreign.publish([message(made_topic, n) for n in range(10)])

    assert engine.server.ask("ZCARD", ids) == 3_000 + 10 - (2 * 10 + 100)


def test_an_old_id_that_is_not_trimmed_yet_is_no_duplicate(
    engine: RedisEngine, foreign: Broker, made_topic: str
) -> None:
    engine.server.ask("ZADD", f"outbox:{{{made_topic}}}:ids", 1, message(made_topic, 0).id)

    assert [one.status for one in foreign.publish([message(made_topic, 0)] * 2)] == [
        PublishStatus.STORED,
        PublishStatus.DUPLICATE,
    ]


def test_create_false_defers_a_message_whose_stream_is_not_there(
    engine: RedisEngine, open_broker: Open, made_topic: str
) -> None:
    broker = open_broker(with_option(engine.url, "create=false"))
    engine.server.ask("XGROUP", "CREATE", f"outbox:{{{made_topic}}}", "g", "$", "MKSTREAM")

    results = broker.publish([message(made_topic, 0), message(f"{made_topic}.x", 0), message(made_topic, 1)])
    engine.server.ask("XGROUP", "CREATE", f"outbox:{{{made_topic}.x}}", "g", "$", "MKSTREAM")
    later = broker.publish([message(f"{made_topic}.x", 0)])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.STORED]
    assert "MKSTREAM" in str(results[1].error)
    assert later[0].status is PublishStatus.STORED


def test_a_batch_goes_in_parts_and_keeps_its_order(engine: RedisEngine, made_topic: str) -> None:
    url = BrokerUrl.parse(engine.url, port=1, options=URL_OPTIONS)
    options = RedisOptions(replicas=0, part_messages_max=7, part_bytes_max=100)
    open_servers = opener(url, timeout_ms=10_000, ca_file=None)
    sender = ScriptSender(open_servers, addresses=url.addresses)
    publisher = RedisPublisher(
        sender, StreamStore(options), MasterSettings(sender, options, clock=SystemClock()), options
    )

    batch = [message(made_topic, n, body=b"%d" % n * (n % 40 + 1)) for n in range(100)]
    results = publisher.publish(batch, timeout_ms=10_000)
    publisher.close()

    assert {one.status for one in results} == {PublishStatus.STORED}
    read = engine.read(made_topic, count=100)
    assert [one.id for one in read] == [message(made_topic, n).id for n in range(100)]


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("redis://h/?maxlen=0", "at least 1"),
        ("redis://h/?window_ms=10", "at least 1000"),
        ("redis://h/?wait=yes", "at least 0"),
        ("redis://h/?create=perhaps", "true or false"),
        ("redis://h/?windowms=1", "did you mean window_ms?"),
        ("redis://h/first", "number of a database"),
        ("redis+cluster://h/1", "a cluster has number 0 only"),
        ("redis://a:1,b:2/", "redis+cluster://"),
        ("redis://h/?cert_file=x", "rediss://"),
        ("rediss://h/?ca_file=/nowhere/at/all", "names no file"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        connect(url)


def test_a_token_and_certificates_without_tls_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="password_file"):
        open_redis("redis://h/", token="t")
    with pytest.raises(ConfigurationError, match="rediss://"):
        open_redis("redis://h/", ca_file="ca.pem")


def test_a_database_by_its_number_and_a_time_out_by_its_argument(engine: RedisEngine, made_topic: str) -> None:
    broker = open_redis(engine.url.replace("/?", "/3?"), timeout_ms=60_000)
    broker.publish([message(made_topic, 0)])
    broker.close()

    with engine.server.client as client:
        client.select(3)
        assert client.xlen(f"outbox:{{{made_topic}}}") == 1
