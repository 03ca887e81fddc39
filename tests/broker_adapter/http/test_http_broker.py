"""HttpBroker beyond the port's conformance suite: refusals, connections that break, forks, and the environment."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_adapter.http import HttpBroker
from broker_adapter.http.request_codec import Options, RequestCodec
from outbox_broker.http.access_control import Access, load_tokens
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, NotAuthorized, StorageFailed
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import PublishResult
from outbox_core.messages.publish_guard import publish_guarded
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.broker_adapter.publishing.forking_program import PUBLISHED, publish_across_fork
from tests.broker_adapter.servers import served
from tests.fixtures.forks import FORK_IDS


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HttpServer]]:
    """Start a server with a test's own settings or access."""
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(served(tmp_path / "data", *given, **more))


@pytest.fixture
def connected() -> Iterator[Callable[..., HttpBroker]]:
    """Make brokers that are closed in the end."""
    with ExitStack() as stack:

        def make(url: str, **options: Any) -> HttpBroker:
            broker = HttpBroker(url, **options)
            stack.callback(broker.close)
            return broker

        yield make


def message(topic: str, body: bytes = b"b", **more: Any) -> Message:
    return Message(**{"id": new_message_id(), "topic": topic, "body": body, **more})


@contextmanager
def scripted(*answers: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, one a request and None for closing the connection; and what it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []
    left = list(answers)
    opened = [listener]

    def serve() -> None:
        while left:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            opened.append(connection)
            with connection, connection.makefile("rb") as reader:
                while left and (request := read_request(reader)):
                    asked.append(request)
                    answer = left.pop(0)
                    if answer is None:
                        break
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        left.clear()
        for one in opened:
            with suppress(OSError):  # closed already
                one.shutdown(socket.SHUT_RDWR)
        thread.join(120)
        listener.close()


def read_request(reader: Any) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()
        if not line:
            return b""
        head += line
    length = next((int(one[15:]) for one in head.lower().split(b"\r\n") if one.startswith(b"content-length:")), 0)
    return head + reader.read(length)


def ok(answer: object) -> bytes:
    body = msgspec.msgpack.encode(answer)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: %d\r\n\r\n" % len(body) + body


STORED = ok({"results": [{"id": "m", "status": "stored", "a-field-of-tomorrow": 1}]})


class Lease:
    """A guard that allows a number of requests."""

    def __init__(self, requests: int) -> None:
        self.requests = requests

    def __call__(self) -> None:
        if not self.requests:
            raise BrokerUnavailable("the lease has ended")
        self.requests -= 1


BROKEN = None


@pytest.mark.parametrize(
    ("answers", "messages", "allowed", "stored"),
    [
        pytest.param([STORED], 1, 0, [], id="the first"),
        pytest.param([BROKEN, STORED], 1, 1, [], id="a repetition after the connection broke"),
        pytest.param([STORED, STORED], 2, 1, ["m"], id="the second of a batch that is too large for one"),
    ],
)
def test_each_request_of_a_publish_is_sent_only_while_its_guard_allows_it(
    answers: list[bytes | None],
    messages: int,
    allowed: int,
    stored: list[str],
    connected: Callable[..., HttpBroker],
) -> None:
    with scripted(*answers) as (url, asked):
        broker = connected(url)
        batch = [message("t", bytes(5 << 20), id="m") for _ in range(messages)]

        with pytest.raises(BrokerUnavailable, match="the lease has ended") as caught:
            publish_guarded(broker, batch, guard=Lease(allowed))

    assert len(asked) == allowed
    assert [result.id for result in caught.value.answered.values()] == stored


def test_a_target_that_knows_no_guard_gets_nothing_after_it_raised() -> None:
    class Target:
        published = 0

        def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
            self.published += len(batch)
            return []

    target, lease = Target(), Lease(1)

    publish_guarded(target, [message("t")], guard=lease)
    with pytest.raises(BrokerUnavailable, match="the lease has ended"):
        publish_guarded(target, [message("t")], guard=lease)

    assert target.published == 1


def test_connect_finds_it_by_the_scheme_of_the_url() -> None:
    broker = connect("http://127.0.0.1:1")

    assert isinstance(broker, HttpBroker)
    assert isinstance(broker, Broker)
    broker.close()


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://a", "127.0.0.1:1", "http://a?b", "http://a#b", "http://user:secret@a"]
)
def test_a_url_that_cannot_work_is_refused_at_once_and_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        HttpBroker(url)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("tokenfile=x", "'tokenfile'; did you mean token_file"),
        ("prefix=x", "'prefix'; known: token_file, ca_file"),
        ("token_file=/nowhere/at/all", "cannot read the token file"),
    ],
)
def test_an_option_of_the_url_that_cannot_work_is_refused_with_the_cure(query: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        HttpBroker(f"http://127.0.0.1:1?{query}")


@pytest.mark.parametrize(
    "options", [{"timeout_ms": 0}, {"pool_size": 0}, {"codec": "xml"}, {"token": ""}, {"token": "a\nb"}]
)
def test_an_option_that_cannot_work_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        HttpBroker("http://127.0.0.1:1", **options)


def test_what_requests_before_a_refused_one_stored_is_said_with_the_refusal(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    broker = connected(start(HttpSettings(body_bytes_max=100)).url)
    batch = [message("t", b"x" * (101 if number == BATCH_MESSAGES_MAX else 1)) for number in range(1_100)]

    with pytest.raises(BrokerRefused, match="101 bytes") as caught:
        broker.publish(batch)

    answered = caught.value.answered
    assert {place: result.id for place, result in answered.items()} == {
        place: one.id for place, one in enumerate(batch[:BATCH_MESSAGES_MAX])
    }
    assert {result.status for result in answered.values()} == {"stored"}


def test_threads_that_share_a_request_do_not_share_its_refusal(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    broker = connected(start(HttpSettings(body_bytes_max=100)).url)

    def publish(number: int) -> str:
        try:
            return broker.publish([message("t", b"x" * (1 if number % 8 else 101))])[0].status
        except BrokerRefused:
            return "refused"

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(publish, range(160)))

    assert found == ["stored" if number % 8 else "refused" for number in range(160)]


def test_a_message_that_the_broker_refuses_is_rejected_alone(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    broker = connected(start(HttpSettings(body_bytes_max=100)).url)
    batch = [message("t", b"x" * (101 if number in {3, 17} else 100)) for number in range(20)]

    results = publish_isolated(broker.publish, batch).results

    assert [place for place, one in results.items() if one.status == "rejected"] == [3, 17]
    assert all("101 bytes" in (results[place].error or "") for place in (3, 17))
    assert [one.id for one in broker.pull("t", "g")] == [
        one.id for number, one in enumerate(batch) if number not in {3, 17}
    ]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("place", [0, 4, 8], ids=["first", "middle", "last"])
def test_topics_that_the_token_does_not_cover_hold_up_no_others(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], tmp_path: Path, place: int, codec: str
) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nroles = ["publish", "consume"]\ntopics = ["mine.*"]\n'
    )
    url = start(access=Access(tokens=load_tokens(tokens))).url
    broker = connected(url, token="secret", codec=codec)
    batch = [message("mine.b" if number % 2 else "mine.a") for number in range(9)]
    batch[place] = message("yours.a")

    published = publish_isolated(broker.publish, batch)

    assert [published.results[at].status for at in range(9)] == [
        "deferred" if at == place else "stored" for at in range(9)
    ]
    assert "yours.a" in str(published.results[place].error)
    for topic in ("mine.a", "mine.b"):
        pulled = [delivery.id for delivery in broker.pull(topic, "g")]
        assert pulled == [one.id for one in batch if one.topic == topic], "once, in order"
    with pytest.raises(NotAuthorized) as caught:
        connected(url, token="wrong").pull("mine.a", "g")
    assert "wrong" not in str(caught.value)
    assert caught.value.retryable


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_a_publish_of_many_topics_is_one_request_and_each_topic_gets_its_own_in_order(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], codec: str
) -> None:
    server = start()
    broker = connected(server.url, codec=codec)
    batch = [message(f"t{number % 3}", b"b%d" % number, key="k", headers={"h": "v"}) for number in range(9)]

    results = broker.publish([*batch, batch[0]])

    assert [one.id for one in results] == [one.id for one in [*batch, batch[0]]]
    assert [one.status for one in results] == ["stored"] * 9 + ["duplicate"]
    for place in range(3):
        pulled = broker.pull(f"t{place}", "g")
        assert [(one.body, one.key, one.headers) for one in pulled] == [
            (one.body, "k", {"h": "v"}) for one in batch[place::3]
        ]
    assert requests_of(server, "/v1/publish") == 1


@pytest.mark.parametrize(
    "body",
    [b"\x01" * 1_024, b'"' * 4_096, b'{"a":"b"}' * 333, b"\xff" * 3_000, b"plain" * 1_000],
    ids=["control bytes", "quotes", "JSON", "no text", "text"],
)
def test_a_batch_that_is_long_in_json_goes_in_requests_that_the_broker_takes(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], body: bytes
) -> None:
    broker = connected(start().url, codec="json")

    results = broker.publish([message("t", body, id=f"m{number}") for number in range(BATCH_MESSAGES_MAX)])

    assert {result.status for result in results} == {"stored"}


def test_what_shares_a_request_in_json_is_within_what_the_broker_takes(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    server = start()
    broker = connected(server.url, codec="json")

    submitted = [broker.submit(message("t", b"\xff" * 200_000, id=f"m{number}")) for number in range(40)]

    assert {future.result(timeout=120).status for future in submitted} == {"stored"}
    text, _ = server.services.metrics.exposition("")
    assert 'route="/v1/publish",status="413"' not in text.decode()


def requests_of(server: HttpServer, path: str) -> float:
    """How many requests of a route a server has answered."""
    text, _ = server.services.metrics.exposition("")
    start = f'broker_http_requests_total{{method="POST",route="{path}",status="200"}} '
    return next((float(one.removeprefix(start)) for one in text.decode().splitlines() if one.startswith(start)), 0)


def test_a_message_that_is_refused_among_many_topics_is_rejected_alone(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    broker = connected(start(HttpSettings(body_bytes_max=100)).url)

    batch = [message(f"t{number}", b"x" * (101 if number == 3 else 100)) for number in range(8)]

    results = publish_isolated(broker.publish, batch).results

    assert [place for place, one in results.items() if one.status == "rejected"] == [3]


def test_threads_that_share_a_request_do_not_share_a_topic_that_is_not_theirs(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nroles = ["publish"]\ntopics = ["mine.*"]\n')
    broker = connected(start(access=Access(tokens=load_tokens(tokens))).url, token="secret")

    def publish(number: int) -> str:
        try:
            return broker.publish([message("yours" if number % 8 == 0 else f"mine.{number}")])[0].status
        except NotAuthorized:
            return "not authorized"

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(publish, range(160)))

    assert found == ["stored" if number % 8 else "not authorized" for number in range(160)]


def test_a_broker_that_is_not_there_is_unavailable(connected: Callable[..., HttpBroker]) -> None:
    broker = connected("http://127.0.0.1:1", token="secret")

    with pytest.raises(BrokerUnavailable, match="refused") as caught:
        broker.publish([message("t")])

    assert caught.value.retryable
    assert "POST /v1/publish at 127.0.0.1:1: " in str(caught.value), "what was tried, and where"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://h", "h:80"), ("https://h/below", "h:443"), ("https://h:1", "h:1"), ("http://[::1]", "[::1]:80"),
    ],
)  # fmt: skip
def test_a_broker_is_named_by_its_host_and_its_port(url: str, place: str) -> None:
    assert RequestCodec(Options(url=url, token="secret")).address == place


def test_a_broker_that_does_not_answer_is_given_up_after_the_time_out(connected: Callable[..., HttpBroker]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broker = connected(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_ms=150)
        start_s = time.monotonic()

        with pytest.raises(BrokerUnavailable):
            broker.publish([message("t")])
        published_s = time.monotonic() - start_s
        with pytest.raises(BrokerUnavailable):
            broker.pull("t", "g", wait_ms=200)

    assert 0.14 <= published_s < 60
    assert 0.45 <= time.monotonic() - start_s < 120, "a pull is given its wait_ms on top"


def test_a_publish_goes_again_when_a_kept_connection_breaks(connected: Callable[..., HttpBroker]) -> None:
    with scripted(STORED, None, STORED) as (url, asked):
        broker = connected(url)
        sent = message("t", id="m")
        broker.publish([sent])

        [result] = broker.publish([sent])

    assert result.status == "stored"
    assert len(asked) == 3
    assert asked[1] == asked[2]


def test_a_publish_goes_again_once_and_not_for_ever(connected: Callable[..., HttpBroker]) -> None:
    with scripted(STORED, None, None, STORED) as (url, asked):
        broker = connected(url)
        broker.publish([message("t", id="m")])

        with pytest.raises(BrokerUnavailable):
            broker.publish([message("t", id="m")])

    assert len(asked) == 3


def test_a_pull_and_a_nack_do_not_go_again_since_the_first_may_have_counted(
    connected: Callable[..., HttpBroker],
) -> None:
    for ask in (
        lambda broker: broker.pull("t", "g"),
        lambda broker: broker.nack(["t/g/0.1.0"]),
    ):
        with scripted(STORED, None, STORED) as (url, asked):
            broker = connected(url)
            broker.publish([message("t", id="m")])

            with pytest.raises(BrokerUnavailable):
                ask(broker)

        assert len(asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: 1\r\n\r\n\xc1",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: 100\r\n\r\nshort",
    ],
)
def test_an_answer_that_is_none_of_the_protocol_is_unavailable_and_never_success_or_refusal(
    connected: Callable[..., HttpBroker], answer: bytes
) -> None:
    with scripted(answer, None, None) as (url, _):
        broker = connected(url, timeout_ms=500)

        with pytest.raises(BrokerUnavailable):
            broker.publish([message("t", id="m")])


def test_an_answer_about_other_messages_is_not_success(connected: Callable[..., HttpBroker]) -> None:
    with scripted(STORED) as (url, _), pytest.raises(BrokerUnavailable, match=r"at 127\.0\.0\.1:\d+"):
        connected(url).publish([message("t", id="m"), message("t")])
    with scripted(STORED) as (url, _), pytest.raises(BrokerUnavailable):
        connected(url).publish([message("t", id="another")])
    with scripted(ok({"results": []})) as (url, _), pytest.raises(BrokerUnavailable, match=r"at 127\.0\.0\.1:\d+"):
        connected(url).ack(["t/g/0.1.0"])


def test_problems_of_storage_and_load_keep_their_meaning(connected: Callable[..., HttpBroker]) -> None:
    body = msgspec.json.encode(
        {"type": "urn:outbox-mq:problem:storage-failed", "title": "t", "status": 503, "detail": "disk full"}
    )
    answer = (
        b"HTTP/1.1 503 X\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )

    with scripted(answer) as (url, _), pytest.raises(StorageFailed, match="disk full"):
        connected(url).publish([message("t")])


def test_proxies_of_the_environment_are_not_asked(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert connected(start().url).publish([message("t")])[0].status == "stored"


def test_a_closed_broker_says_so_and_closing_twice_is_fine(connected: Callable[..., HttpBroker]) -> None:
    broker = connected("http://127.0.0.1:1")
    broker.close()
    broker.close()

    with pytest.raises(ConfigurationError, match="closed"):
        broker.publish([message("t")])


def test_an_unknown_group_is_refused_and_not_unavailable(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]
) -> None:
    with pytest.raises(BrokerRefused, match="no topic t"):
        connected(start().url).admin.figures("t")


def test_many_threads_share_one_broker(start: Callable[..., HttpServer], connected: Callable[..., HttpBroker]) -> None:
    broker = connected(start().url, pool_size=2)
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            for _ in range(10):
                broker.publish([message("t")])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert not failures
    assert broker.admin.figures("t")["stored"] == 80


@pytest.mark.processes
@pytest.mark.parametrize("fork", FORK_IDS)
def test_parent_and_child_of_a_fork_do_not_share_connections(
    start: Callable[..., HttpServer], connected: Callable[..., HttpBroker], fork: str
) -> None:
    url = start().url

    publish_across_fork(url, "t", fork=fork)

    assert connected(url).admin.figures("t")["stored"] == len(PUBLISHED)


def test_the_administration_of_a_closed_broker_is_closed(start: Callable[..., HttpServer]) -> None:
    broker = HttpBroker(start().url)
    admin = broker.admin
    assert admin.topics() == []

    broker.close()

    with pytest.raises(ConfigurationError, match="was closed"):
        admin.topics()
