"""Each raw request gets one answer a request in it, or a closed connection, whatever pieces it comes in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.http.http_settings import HttpSettings
from outbox_core.protocol.problem import PROBLEM_PREFIX, PROBLEM_TYPE, ProblemKind
from tests.broker_adapter.servers import serving
from tests.outbox_broker.http.raw_exchange import Answer, Barrier, End, Exchange, RawConnection, Script, barrier, play
from tests.outbox_broker.http.raw_requests.corpus import CORPUS
from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    CHUNK,
    CHUNKED,
    LAST_CHUNK,
    LENGTH,
    MARKER_TOPIC,
    SMUGGLED,
    TOPIC,
    RawRequest,
    livez,
    publish,
)

CASES: Final = {f"{family}-{case.name}": case for family, cases in CORPUS.items() for case in cases}
SIDE_BY_SIDE_MAX: Final = 200
LONG_MS: Final = 600_000
TORN_BYTES_MAX: Final = 1_200
"""Longer requests are torn at each of their first and last bytes, and every so often between."""
ENDS_BYTES: Final = 100
STRIDE_BYTES: Final = 1_999
NEAR_BYTES: Final = 4
"""So far beyond a cut two requests have to be the same for their cuts to be the same."""


def positions(raw: bytes) -> list[int]:
    """Between which bytes a request can be torn."""
    if len(raw) <= TORN_BYTES_MAX:
        return list(range(1, len(raw)))
    last = len(raw) - ENDS_BYTES
    return [*range(1, ENDS_BYTES), *range(ENDS_BYTES, last, STRIDE_BYTES), *range(last, len(raw))]


@cache  # not as this file is imported: it takes a second, which each worker would spend
def distinct_cuts() -> dict[str, list[int]]:
    """Where each case is torn: everywhere, but not once more where another one begins with the same bytes."""
    cuts: dict[str, list[int]] = {}
    beginnings: set[bytes] = set()
    for name, case in CASES.items():
        hidden = case.raw.rfind(SMUGGLED)
        inner = range(hidden + NEAR_BYTES, hidden + len(SMUGGLED) - NEAR_BYTES) if hidden >= 0 else ()
        cuts[name] = [
            cut for cut in positions(case.raw) if case.raw[: cut + NEAR_BYTES] not in beginnings and cut not in inner
        ]
        if len(case.raw) <= TORN_BYTES_MAX:
            beginnings.update(case.raw[:end] for end in range(len(case.raw) + 1))
    return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to replay against, and the engine behind it."""

    url: str
    engine: Engine
    barrier: Barrier

    @property
    def stored(self) -> tuple[int, int]:
        """How many messages the requests of the corpus have stored so far, and how many those hidden in them."""
        topics = self.engine.admin.topics()
        corpus, hidden = (
            self.engine.admin.topic_figures(topic)["stored"] if topic in topics else 0
            for topic in (TOPIC, MARKER_TOPIC)
        )
        return corpus, hidden

    def play(self, scripts: Sequence[Script]) -> Iterator[Exchange]:
        """Play scripts side by side, not too many at a time; where nothing comes, that is the last."""
        for start in range(0, len(scripts), SIDE_BY_SIDE_MAX):
            for exchange in play(self.url, scripts[start : start + SIDE_BY_SIDE_MAX], barrier=self.barrier):
                yield exchange
                if exchange.end is End.SILENT:
                    return


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One server for all cases; nothing is killed, so nothing needs to be durable, and nobody is too slow."""
    options = EngineOptions(durability=Durability.OS)
    settings = HttpSettings(request_head_ms_max=LONG_MS, request_read_ms_max=LONG_MS, keep_alive_ms=LONG_MS)
    engine = Engine.open(tmp_path_factory.mktemp("raw") / "data", options=options)
    try:
        with serving(engine, settings) as server, barrier(server.url) as waits:
            yield Target(url=server.url, engine=engine, barrier=waits)
    finally:
        engine.close()


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) == sum(map(len, CORPUS.values()))
    assert len(CASES) >= 300


@pytest.mark.parametrize("name", CASES)
def test_a_raw_request_gets_its_answers_and_nothing_in_it_runs_as_another_one(target: Target, name: str) -> None:
    case, stored = CASES[name], target.stored

    [exchange] = target.play([script_of(case, [case.raw + case.behind])])

    check(case, exchange)
    assert_stored(target, [exchange], before=stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_raw_request_torn_in_two_anywhere_gets_the_same_answers(target: Target, name: str) -> None:
    case, stored = CASES[name], target.stored
    torn = [script_of(case, [case.raw[:cut], case.raw[cut:] + case.behind]) for cut in distinct_cuts()[name]]

    exchanges = list(target.play([script_of(case, [case.raw + case.behind])]))
    check(case, exchanges[0])
    exchanges += target.play(torn)

    for exchange in exchanges:
        check(case, exchange)
    assert {seen(exchange) for exchange in exchanges} == {seen(exchanges[0])}
    assert_stored(target, exchanges, before=stored)


@pytest.mark.parametrize("family", CORPUS)
def test_raw_requests_byte_by_byte_get_the_same_answers(target: Target, family: str) -> None:
    cases, stored = CORPUS[family], target.stored
    whole = list(target.play([script_of(case, [case.raw + case.behind]) for case in cases]))

    dripped = list(target.play([script_of(case, drops(case)) for case in cases]))

    same = {case.name: seen(exchange) for case, exchange in zip(cases, whole, strict=False)}
    assert {case.name: seen(exchange) for case, exchange in zip(cases, dripped, strict=False)} == same
    assert len(same) == len(cases), "one case got nothing"
    assert_stored(target, [*whole, *dripped], before=stored)


@pytest.mark.parametrize("raw", [publish(LENGTH), publish(CHUNKED, body=CHUNK + LAST_CHUNK)], ids=["length", "chunked"])
def test_a_publish_cut_off_anywhere_stores_nothing_and_gets_no_success(target: Target, raw: bytes) -> None:
    stored = target.stored

    exchanges = list(
        target.play([Script(pieces=[raw[:cut]], answers_min=0, half_closes=True) for cut in range(len(raw))])
    )

    assert {status for exchange in exchanges for status in exchange.statuses} <= {400, 408}
    assert all(len(exchange.final) <= 1 and exchange.end is End.CLOSED for exchange in exchanges)
    assert target.stored == stored


@pytest.mark.parametrize(
    "framing", [(LENGTH, BODY), (CHUNKED, CHUNK + LAST_CHUNK)], ids=["length", "chunked"]
)  # fmt: skip
def test_a_client_that_expects_100_gets_it_once_before_it_sends_its_body(
    target: Target, framing: tuple[str, bytes]
) -> None:
    line, body = framing
    with RawConnection(target.url) as connection:
        connection.send(publish(line, "Expect: 100-continue", body=b""))

        interim = connection.read_answer()
        connection.send(body)
        answer = connection.read_answer()

    assert interim == Answer(status=100, headers=(), body=b"")
    assert answer is not None
    assert answer.status == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((LENGTH, "Accept: text/html"), 406),
        ((LENGTH, "Content-Encoding: gzip"), 415),
        (("Content-Length: 68719476736",), 413),
        ((LENGTH, "Transfer-Encoding: chunked"), 400),
        ((LENGTH, "Sec-Fetch-Site: cross-site"), 403),
    ],
)
def test_a_client_that_expects_100_gets_none_where_its_body_is_not_wanted(
    target: Target, lines: tuple[str, ...], status: int
) -> None:
    with RawConnection(target.url) as connection:
        connection.send(publish(*lines, "Expect: 100-continue", body=b""))

        answer = connection.read_answer()

    assert answer is not None
    assert answer.status == status


@pytest.mark.parametrize(
    ("raw", "statuses"),
    [
        (livez(), (200,)),
        (livez() * 3, (200, 200, 200)),
        (publish(LENGTH), (200,)),
        (publish(LENGTH) * 2, (200, 200)),
        (publish(CHUNKED, body=CHUNK + LAST_CHUNK), (200,)),
        (publish("Content-Length: 1", body=b"{"), (400,)),
        (livez("Connection: close"), (200,)),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", (404,)),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost:1\r\n\r\n", (405,)),
        (b"garbage\r\n\r\n", (400,)),
    ],
)
def test_a_client_that_half_closes_behind_its_requests_gets_its_answers_and_the_end(
    target: Target, raw: bytes, statuses: tuple[int, ...]
) -> None:
    stored = target.stored

    [exchange] = target.play([Script(pieces=[raw], answers_min=0, half_closes=True)])

    assert (exchange.statuses, exchange.end) == (statuses, End.CLOSED)
    assert_stored(target, [exchange], before=stored)


def script_of(case: RawRequest, pieces: Sequence[bytes]) -> Script:
    """How a case is played in these pieces."""
    return Script(pieces=pieces, answers_min=case.answers_min, heads=case.heads, half_closes=case.half_closes)


def drops(case: RawRequest) -> list[bytes]:
    """A request byte by byte; in the middle of a long one, larger pieces."""
    edges = [0, *positions(case.raw), len(case.raw)]
    pieces = [case.raw[start:end] for start, end in pairwise(edges)]
    return [*pieces, case.behind] if case.behind else pieces


def check(case: RawRequest, exchange: Exchange) -> None:
    """Assert one of the outcomes that the case allows, in the protocol's words."""
    outcomes = {(outcome.statuses, outcome.end) for outcome in case.outcomes}
    assert (exchange.statuses, exchange.end) in outcomes, f"{case.raw[:2_000]!r}: {exchange}"
    for answer in exchange.final:
        check_answer(answer)
    if exchange.end is End.CLOSED and exchange.final and not case.half_closes:
        assert exchange.final[-1].header("connection") == "close", "an answer before the end names it"


def check_answer(answer: Answer) -> None:
    """Assert that it is one of the protocol's."""
    assert "x-injected" not in dict(answer.headers)
    if answer.status < 400 or answer.body == b"":
        return
    assert answer.header("content-type") == PROBLEM_TYPE, answer
    kinds = {PROBLEM_PREFIX + kind for kind in ProblemKind}
    assert any(kind.encode() in answer.body for kind in kinds), answer


def assert_stored(target: Target, exchanges: Sequence[Exchange], *, before: tuple[int, int]) -> None:
    """Assert that exactly what was acknowledged is stored, and nothing of requests hidden in others."""
    acknowledged = sum(answer.is_stored for exchange in exchanges for answer in exchange.final)
    corpus, hidden = target.stored
    assert hidden == before[1], "a hidden request ran"
    assert corpus - before[0] == acknowledged


def seen(exchange: Exchange) -> tuple[object, ...]:
    """What must not depend on the pieces: statuses, media types and problems in full, and the end."""
    return (
        *((answer.status, answer.header("content-type"), answer.body if answer.status >= 400 else b"")
          for answer in exchange.final),
        exchange.end,
    )  # fmt: skip
