"""What a raw request of the corpus is: its bytes, and the answers that they may get. Builders for the usual parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.outbox_broker.http.raw_exchange import End

TOPIC: Final = "corpus"
MARKER_TOPIC: Final = "smuggled"
"""Only requests that must never be read as requests publish to it."""
HOST: Final = "Host: localhost"
JSON: Final = "Content-Type: application/json"
CHUNKED: Final = "Transfer-Encoding: chunked"
LIVEZ: Final = "GET /livez HTTP/1.1"
PUBLISH: Final = "POST /v1/publish HTTP/1.1"
BODY: Final = b'{"messages":[{"topic":"corpus","body":"b"}]}'
SIZE: Final = len(BODY)
LENGTH: Final = f"Content-Length: {SIZE}"
CHUNK: Final = b"%x\r\n%b\r\n" % (SIZE, BODY)
LAST_CHUNK: Final = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which the server may answer: the statuses of the final answers in order, then the connection's end."""

    statuses: tuple[int, ...]
    end: End
    half_closes: bool = False
    """The client has to half-close to see the end, since the server rightly waits for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """One case: bytes as a client sends them, and what may come back.

    `behind` is sent right behind them; it is not torn, and never read as a request. `heads` are the numbers of the
    answers that are to HEAD.
    """

    name: str
    raw: bytes
    outcomes: tuple[Outcome, ...]
    behind: bytes = b""
    heads: frozenset[int] = frozenset()

    @property
    def answers_min(self) -> int:
        """How many answers there are in any case."""
        return min(len(outcome.statuses) for outcome in self.outcomes)

    @property
    def half_closes(self) -> bool:
        """Whether the client ends by a half-close and not by a probe."""
        return self.outcomes[0].half_closes


def answered(*statuses: int) -> Outcome:
    """These answers, and the connection goes on."""
    return Outcome(statuses, End.OPEN)


def ended(*statuses: int) -> Outcome:
    """These answers, and the server closes."""
    return Outcome(statuses, End.CLOSED)


def maybe_ended(*statuses: int) -> tuple[Outcome, ...]:
    """These answers; whether the connection goes on is the server's choice."""
    return answered(*statuses), ended(*statuses)


def any_of(*statuses: int) -> tuple[Outcome, ...]:
    """One answer with one of these statuses, and either end."""
    return tuple(outcome for status in statuses for outcome in maybe_ended(status))


def unfinished(*statuses: int) -> tuple[Outcome, ...]:
    """These answers, then a request that never becomes whole: no answer, or that it is malformed or late."""
    return tuple(Outcome((*statuses, *last), End.CLOSED, half_closes=True) for last in ((), (400,), (408,)))


def case(name: str, raw: bytes, *outcomes: Outcome, heads: tuple[int, ...] = ()) -> RawRequest:
    """A request with the answers that it may get."""
    return RawRequest(name=name, raw=raw, outcomes=outcomes, heads=frozenset(heads))


def refused(name: str, raw: bytes, *statuses: int, before: tuple[int, ...] = ()) -> RawRequest:
    """One answer, 400 unless said otherwise, and the connection is closed: a publish right behind is never read."""
    outcomes = tuple(ended(*before, status) for status in statuses or (400,))
    return RawRequest(name=name, raw=raw, outcomes=outcomes, behind=SMUGGLED)


def request(start: str, *lines: str | bytes, body: bytes = b"") -> bytes:
    """A head of these lines, each ended by CRLF, and a body; text stands for its Latin-1 bytes."""
    encoded = [line.encode("latin-1") if isinstance(line, str) else line for line in (start, *lines)]
    return b"\r\n".join([*encoded, b"", body])


def livez(*lines: str | bytes, body: bytes = b"") -> bytes:
    """GET /livez with further lines."""
    return request(LIVEZ, HOST, *lines, body=body)


def publish(*lines: str | bytes, body: bytes = BODY) -> bytes:
    """A publish whose framing is the caller's."""
    return request(PUBLISH, HOST, JSON, *lines, body=body)


def chunked(body: bytes, *lines: str | bytes) -> bytes:
    """A publish in the chunked transfer coding, whose chunks are the caller's."""
    return publish(CHUNKED, *lines, body=body)


GOOD: Final = publish(LENGTH)
_MARKED: Final = BODY.replace(TOPIC.encode(), MARKER_TOPIC.encode())
SMUGGLED: Final = request(PUBLISH, HOST, JSON, f"Content-Length: {len(_MARKED)}", body=_MARKED)
"""A whole publish to the marker topic, for where it must not be read as a request."""
SMUGGLED_LENGTH: Final = f"Content-Length: {len(SMUGGLED)}"
