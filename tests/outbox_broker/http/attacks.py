"""Attacks on the bytes that a broker has in work, over plain sockets: what each prepares, sends, and gets back.

Tests hold a server's memory against them; `python -m benchmarks.broker.attacks` measures them. No more is read of an
answer than an attack says.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

MIB: Final = 1024 * 1024
BATCH_BYTES: Final = 63 * MIB
TEXT_BYTES: Final = 4 * MIB - 64 * 1024
PULL_BYTES: Final = 31 * MIB
REASON: Final = "\N{COLLISION SYMBOL}" * 1_000
"""Four bytes a character, in memory and on the disk; a number before it makes it another one."""
TOPIC: Final = "attacked"
ANY_TOPIC: Final = f"{TOPIC}.?"
"""Stands for the topic of the client that sends it."""
JSON, PACKED = "application/json", "application/msgpack"
CLOSED: Final = 0
"""In place of a status, where the connection ended without an answer."""

_DEADLINE_S: Final = 240.0
_CHUNK_BYTES: Final = 256 * 1024
_pack: Final = msgspec.msgpack.Encoder().encode
_TINY: Final = ["m", "t", None, {}, b""]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as far as it was read."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Connection:
    """One connection that sends what it is given, and reads an answer as far as it is asked to."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host = place.netloc
        self._socket = socket.create_connection((place.hostname, place.port), timeout=_DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def ask(self, method: str, path: str, body: bytes = b"", *, kind: str = JSON) -> Answer:
        """Send a request, and read its answer."""
        self.send(method, path, body, kind=kind)
        return self.answer()

    def send(
        self, method: str, path: str, body: bytes | memoryview = b"", *, kind: str = JSON, length: int | None = None
    ) -> None:
        """Send a request, up to where an answer comes or the server closes. `length`: what the head says it has."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: {kind}\r\naccept: {kind}\r\n"
            f"content-length: {len(body) if length is None else length}\r\n\r\n"
        ).encode()
        if len(body) < _CHUNK_BYTES:
            self._socket.sendall(head + bytes(body))
            return
        try:
            self._socket.sendall(head)
            for start in range(0, len(body), _CHUNK_BYTES):
                if start % MIB == 0 and self.is_readable():
                    return
                self._socket.sendall(memoryview(body)[start : start + _CHUNK_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            return

    def head(self) -> Answer:
        """The answer's head; of its body no more than came with it."""
        try:
            while b"\r\n\r\n" not in self._received:
                data = self._socket.recv(4096)
                if not data:
                    return Answer(CLOSED)
                self._received += data
        except ConnectionResetError:
            return Answer(CLOSED)
        head, _, rest = bytes(self._received).partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        self._received = bytearray(rest)
        return Answer(int(lines[0].split()[1]), headers)

    def refusal_or_head(self) -> Answer:
        """The whole answer where it is a refusal, else its head."""
        found = self.head()
        return found if found.status == 200 else self._whole(found)

    def answer(self) -> Answer:
        """The whole answer."""
        return self._whole(self.head())

    def _whole(self, found: Answer) -> Answer:
        size = int(found.headers.get("content-length", 0))
        pieces, left = [bytes(self._received[:size])], size - len(self._received)
        del self._received[:size]
        while left > 0:
            data = self._socket.recv(min(left, MIB))
            if not data:
                return Answer(CLOSED)
            pieces.append(data)
            left -= len(data)
        return Answer(found.status, found.headers, b"".join(pieces))

    def is_readable(self) -> bool:
        """Whether an answer, or the connection's end, is there to be read."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """End it, whatever is on its way."""
        self._socket.close()


@dataclass(slots=True)
class Outcome:
    """What came of an attack: its answers, and how many messages these say are stored, by topic."""

    answers: list[Answer] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)

    @property
    def statuses(self) -> dict[int, int]:
        """How many answers of each status; CLOSED: none."""
        return dict(sorted(Counter(one.status for one in self.answers).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """`prepare` is done before anything is measured. `play` yields while what it sent is in work, and then ends it."""

    name: str
    what: str
    prepare: Callable[[str], Any]
    play: Callable[[str, Any], Any]

    @contextmanager
    def played(self, url: str, prepared: Any) -> Iterator[Outcome]:
        """Play it; the server has answered, or has all that it was sent, as the context is entered."""
        with contextmanager(self.play)(url, prepared) as outcome:
            yield outcome


# -- what is sent ------------------------------------------------------------------------------------------------------


def packed_batch(*, size_bytes: int, body_bytes: int, topic: str = ANY_TOPIC, due_ms: int | None = None) -> bytes:
    """A publish in MessagePack, of so many bytes about."""
    body = b"x" * body_bytes
    count = size_bytes // (body_bytes + 64)
    return _pack([[f"m-{number}", topic, None, {}, body, 0, due_ms] for number in range(count)])


def text_batch(*, size_bytes: int, body_bytes: int) -> bytes:
    """The same in JSON, with something to unescape in each body."""
    body = ("x" * 62 + "\\n") * (body_bytes // 64)
    count = size_bytes // (body_bytes + 64)
    entries = ",".join(f'{{"id":"m-{number}","topic":"{ANY_TOPIC}","body":"{body}"}}' for number in range(count))
    return f'{{"messages":[{entries}]}}'.encode()


def packed_list(entry: bytes, *, size_bytes: int) -> bytes:
    """A list of as many tiny entries as fit, in MessagePack."""
    count = size_bytes // len(entry)
    return b"\xdd" + count.to_bytes(4, "big") + entry * count


def nested_body(*, size_bytes: int) -> bytes:
    """A message with as many empty maps in its body's place as fit."""
    return b"\x91" + _pack(_TINY)[:-2] + packed_list(b"\x80", size_bytes=size_bytes - 64)


def many_headers(kind: str, *, size_bytes: int) -> bytes:
    """A message with as many headers as fit, each of another name and without a value."""
    entry, between = (b'"%b":""', b",") if kind == JSON else (b"\xa4%b\xa0", b"")
    letters = [one.encode() for one in ascii_letters]
    block = between.join(entry % (b"??" + one + other) for one in letters for other in letters)
    blocks = size_bytes // (len(block) + 1)
    names = [one + other for one in letters for other in letters][:blocks]
    headers = between.join(block.replace(b"??", name) for name in names)
    if kind == JSON:
        return b'{"messages":[{"topic":"t","body":"","headers":{%b}}]}' % headers
    count = len(names) * len(letters) ** 2
    return b"\x91" + _pack(_TINY)[:-3] + b"\xdf" + count.to_bytes(4, "big") + headers + _pack(b"")


def headers_in_many(*, size_bytes: int) -> bytes:
    """As many records as fit, each with as many headers as half a MiB holds."""
    headers = b"".join(b"\xa5%05d\xa0" % number for number in range(70_000))
    record = _pack(_TINY)[:-3] + b"\xdf" + (70_000).to_bytes(4, "big") + headers + _pack(b"")
    return packed_list(record, size_bytes=size_bytes)


def tiny_text(name: str, entry: bytes, *, size_bytes: int) -> bytes:
    """The same in JSON."""
    count = size_bytes // (len(entry) + 1)
    return b'{"%b":[%b]}' % (name.encode(), b",".join([entry] * count))


# -- the attacks -------------------------------------------------------------------------------------------------------


def _publishes(body: Callable[[], bytes], kind: str, *, clients: int = 1) -> dict[str, Any]:
    """A publish of this body by each client, all at once, to topics of their own."""

    def play(url: str, prepared: bytes) -> Iterator[Outcome]:
        topics = [f"{TOPIC}.{number}" for number in range(clients)]
        answers = _at_once(
            url, [("POST", _PUBLISH, prepared.replace(ANY_TOPIC.encode(), topic.encode()), kind) for topic in topics]
        )
        yield Outcome(answers, stored={topic: _results(one) for topic, one in zip(topics, answers, strict=True)})

    return {"prepare": lambda _url: body(), "play": play}


def _tiny(path: str, kind: str, body: Callable[[], bytes]) -> dict[str, Any]:
    def play(url: str, prepared: bytes) -> Iterator[Outcome]:
        yield Outcome(_at_once(url, [("POST", path, prepared, kind)]))

    return {"prepare": lambda _url: body(), "play": play}


def _unfinished(clients: int, path: str) -> dict[str, Any]:
    """Requests of the largest size whose last byte never comes."""

    def play(url: str, prepared: bytes) -> Iterator[Outcome]:
        connections = [Connection(url) for _ in range(clients)]
        try:
            with ThreadPoolExecutor(clients) as pool:
                sent = [pool.submit(one.send, "POST", path, prepared, kind=PACKED, length=64 * MIB)
                        for one in connections]  # fmt: skip
            for each in sent:
                each.result()
            yield Outcome([one.refusal_or_head() for one in connections if one.is_readable()])
        finally:
            for one in connections:
                one.close()

    return {"prepare": lambda _url: b"\0" * BATCH_BYTES, "play": play}


def _unread(clients: int) -> dict[str, Any]:
    """Pulls of as much as an answer carries, each by a group of its own, of which only the heads are read."""

    def prepare(url: str) -> None:
        batch = packed_batch(size_bytes=PULL_BYTES, body_bytes=512 * 1024, topic=TOPIC)
        _ask(url, "POST", _PUBLISH, batch, kind=PACKED)
        for number in range(clients):
            _ask(url, "PUT", f"/v1/topics/{TOPIC}/groups/g{number}", b"{}")

    def play(url: str, _prepared: None) -> Iterator[Outcome]:
        connections = [Connection(url) for _ in range(clients)]
        try:
            for number, one in enumerate(connections):
                request = _pack({"max_messages": 1000, "invisible_ms": 1_000})
                one.send("POST", f"/v1/topics/{TOPIC}/groups/g{number}/pull", request, kind=PACKED)
            yield Outcome([one.refusal_or_head() for one in connections])
        finally:
            for one in connections:
                one.close()

    return {"prepare": prepare, "play": play}


def _nacks(messages: int) -> dict[str, Any]:
    """Nacks of one receipt each, every one with a reason of its own, of the largest size."""

    def prepare(url: str) -> None:
        for part in range(messages // 1_000):
            batch = [[f"n-{part}-{number}", TOPIC, None, {}, b""] for number in range(1_000)]
            _ask(url, "POST", _PUBLISH, _pack(batch), kind=PACKED)
        _ask(url, "PUT", f"/v1/topics/{TOPIC}/groups/nacks", b'{"max_attempts": 1000}')

    def play(url: str, _prepared: None) -> Iterator[Outcome]:
        with ThreadPoolExecutor(_NACKERS) as pool:
            parts = [pool.submit(_nack_all, url, str(number)) for number in range(_NACKERS)]
            yield Outcome([answer for one in parts for answer in one.result()])

    return {"prepare": prepare, "play": play}


def _dead_pages(pages: int) -> dict[str, Any]:
    """Pages of dead letters at once, as large as they come; the bodies are of bytes that JSON escapes."""

    def prepare(url: str) -> None:
        body = b"\x01" * (64 * 1024)
        settings = b'{"max_attempts": 1}'
        _ask(url, "PUT", f"/v1/topics/{TOPIC}/groups/dead", settings)
        batch = _pack([[f"d-{number}", TOPIC, None, {}, body] for number in range(PULL_BYTES // len(body))])
        _ask(url, "POST", _PUBLISH, batch, kind=PACKED)
        while True:
            request = _pack({"max_messages": 100, "invisible_ms": 60_000})
            pulled = _ask(url, "POST", f"/v1/topics/{TOPIC}/groups/dead/pull", request, kind=PACKED)
            receipts = [receipt for receipt, *_ in msgspec.msgpack.decode(pulled.body)]
            if not receipts:
                return
            _ask(url, "POST", f"/v1/topics/{TOPIC}/groups/dead/nack", _pack({"receipts": receipts}), kind=PACKED)

    def play(url: str, _prepared: None) -> Iterator[Outcome]:
        yield Outcome(_at_once(url, [("GET", f"/v1/topics/{TOPIC}/groups/dead/dead?limit=1000", b"", JSON)] * pages))

    return {"prepare": prepare, "play": play}


_NACKERS: Final = 16
_ACK: Final = f"/v1/topics/{TOPIC}/groups/g/ack"
_PUBLISH: Final = "/v1/publish"

ATTACKS: Final = {
    one.name: one
    for one in (
        Attack(name="batch_packed", what="one batch of 63 MiB, MessagePack", **_publishes(
            lambda: packed_batch(size_bytes=BATCH_BYTES, body_bytes=MIB), PACKED)),
        Attack(name="batch_text", what="one batch of 4 MiB, JSON", **_publishes(
            lambda: text_batch(size_bytes=TEXT_BYTES, body_bytes=64 * 1024), JSON)),
        Attack(name="batch_text_long", what="one batch of 63 MiB, JSON", **_publishes(
            lambda: text_batch(size_bytes=BATCH_BYTES, body_bytes=MIB), JSON)),
        Attack(name="message_text", what="one message of 15 MiB, JSON", **_publishes(
            lambda: text_batch(size_bytes=15 * MIB + 64, body_bytes=15 * MIB), JSON)),
        Attack(name="batch_small", what="one batch of 1,000 messages of 63 KiB", **_publishes(
            lambda: packed_batch(size_bytes=BATCH_BYTES, body_bytes=66_000), PACKED)),
        Attack(name="batch_text_small", what="one batch of 950 messages of 4 KiB, JSON", **_publishes(
            lambda: text_batch(size_bytes=TEXT_BYTES, body_bytes=4_096), JSON)),
        Attack(name="batch_later", what="one batch of 63 MiB for later, MessagePack", **_publishes(
            lambda: packed_batch(size_bytes=BATCH_BYTES, body_bytes=MIB, due_ms=_in_an_hour_ms()), PACKED)),
        Attack(name="batches", what="eight batches of 63 MiB at once", **_publishes(
            lambda: packed_batch(size_bytes=BATCH_BYTES, body_bytes=MIB), PACKED, clients=8)),
        Attack(name="messages_text", what="eight messages of 15 MiB at once, JSON", **_publishes(
            lambda: text_batch(size_bytes=15 * MIB + 64, body_bytes=15 * MIB), JSON, clients=8)),
        Attack(name="tiny_messages", what="63 MiB of tiny messages, MessagePack", **_tiny(
            _PUBLISH, PACKED, lambda: packed_list(_pack(_TINY), size_bytes=BATCH_BYTES))),
        Attack(name="tiny_messages_text", what="the same in JSON", **_tiny(
            _PUBLISH, JSON, lambda: tiny_text("messages", b'{"topic":"t","body":""}', size_bytes=BATCH_BYTES))),
        Attack(name="nested_body", what="63 MiB of empty maps for a body, MessagePack", **_tiny(
            _PUBLISH, PACKED, lambda: nested_body(size_bytes=BATCH_BYTES))),
        Attack(name="many_headers", what="one message of millions of headers, MessagePack", **_tiny(
            _PUBLISH, PACKED, lambda: many_headers(PACKED, size_bytes=BATCH_BYTES))),
        Attack(name="many_headers_text", what="the same in JSON", **_tiny(
            _PUBLISH, JSON, lambda: many_headers(JSON, size_bytes=BATCH_BYTES))),
        Attack(name="headers_in_many", what="63 MiB of records of 80,000 headers each, MessagePack", **_tiny(
            _PUBLISH, PACKED, lambda: headers_in_many(size_bytes=BATCH_BYTES))),
        Attack(name="tiny_receipts", what="63 MiB of tiny receipts, MessagePack", **_tiny(
            _ACK, PACKED, lambda: b"\x81" + _pack("receipts") + packed_list(b"\xa1x", size_bytes=BATCH_BYTES))),
        Attack(name="tiny_receipts_text", what="the same in JSON", **_tiny(
            _ACK, JSON, lambda: tiny_text("receipts", b'"x"', size_bytes=BATCH_BYTES))),
        Attack(name="unfinished_acks", what="20 acks of 64 MiB that never end", **_unfinished(20, _ACK)),
        Attack(name="unfinished_batches", what="20 batches of 64 MiB that never end", **_unfinished(20, _PUBLISH)),
        Attack(name="unread_pulls", what="30 pulls of 31 MiB that nobody reads", **_unread(30)),
        Attack(name="nack_reasons", what="40,000 nacks with reasons of 4 KB", **_nacks(40_000)),
        Attack(name="dead_pages", what="16 pages of dead letters at once", **_dead_pages(16)),
    )
}  # fmt: skip
"""By name, in the order in which they are measured."""


def _in_an_hour_ms() -> int:
    return time.time_ns() // 1_000_000 + 3_600_000


def _nack_all(url: str, mark: str) -> list[Answer]:
    """Pull and nack until nothing is ready; what is given back stays away."""
    connection = Connection(url)
    answers: list[Answer] = []
    request = _pack({"max_messages": 100, "invisible_ms": 600_000})
    try:
        while True:
            pulled = connection.ask("POST", f"/v1/topics/{TOPIC}/groups/nacks/pull", request, kind=PACKED)
            receipts = [receipt for receipt, *_ in msgspec.msgpack.decode(pulled.body)]
            if not receipts:
                return answers
            for one in receipts:
                reason = f"{mark}-{len(answers)} {REASON}"
                body = _pack({"receipts": [one], "reason": reason, "delay_ms": 3_600_000})
                answers.append(connection.ask("POST", f"/v1/topics/{TOPIC}/groups/nacks/nack", body, kind=PACKED))
    finally:
        connection.close()


def _at_once(url: str, requests: Sequence[tuple[str, str, bytes, str]]) -> list[Answer]:
    """Send each request on a connection of its own, all at the same moment, and read the answers."""
    barrier = threading.Barrier(len(requests))

    def send(method: str, path: str, body: bytes, kind: str) -> Answer:
        connection = Connection(url)
        try:
            barrier.wait(_DEADLINE_S)
            return connection.ask(method, path, body, kind=kind)
        finally:
            connection.close()

    with ThreadPoolExecutor(len(requests)) as pool:
        return [one.result() for one in [pool.submit(send, *request) for request in requests]]


def _ask(url: str, method: str, path: str, body: bytes = b"", *, kind: str = JSON) -> Answer:
    connection = Connection(url)
    try:
        answer = connection.ask(method, path, body, kind=kind)
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {answer.body[:300]!r}")
    return answer


def _results(answer: Answer) -> int:
    """How many messages an answer to a publish says are stored."""
    if answer.status != 200:
        return 0
    decode = msgspec.json.decode if answer.headers.get("content-type") == JSON else msgspec.msgpack.decode
    return sum(one["status"] == "stored" for one in decode(answer.body)["results"])
