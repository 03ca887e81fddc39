"""Everything that can go wrong on the wire is an error of the one tree, and says whether trying again can help."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from broker_adapter.http.errors import of_answer
from outbox_core.common import errors
from outbox_core.protocol.problem import ProblemAnswer, ProblemKind


@dataclass(frozen=True)
class Answer:
    """What a broker, or somebody in between, answered."""

    status: int
    content: bytes
    headers: dict[str, str]

    def error(self, *, what: str = "x") -> errors.BrokerError:
        """What is made of it."""
        return of_answer(self.status, self.headers, self.content, what=what)


def answered(status: int, content: bytes = b"", **headers: str) -> Answer:
    return Answer(status, content, headers)


def problem(kind: str, status: int, **more: object) -> bytes:
    import msgspec

    return msgspec.json.encode(
        {"type": f"urn:outbox-mq:problem:{kind}", "title": "t", "status": status, "detail": "d", **more}
    )


@pytest.mark.parametrize("kind", list(ProblemKind))
def test_every_kind_of_problem_is_an_error(kind: ProblemKind) -> None:
    error = answered(400, problem(kind, 400)).error(what="POST /v1/x")

    assert isinstance(error, errors.BrokerError)
    assert str(error) == "POST /v1/x: d"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("unauthenticated", errors.NotAuthenticated),
        ("forbidden", errors.NotAuthorized),
        ("not-supported", errors.NotSupported),
        ("invalid-message", errors.InvalidRequest),
        ("message-too-large", errors.InvalidRequest),
        ("throttled", errors.BrokerThrottled),
        ("cordoned", errors.BrokerCordoned),
        ("storage-failed", errors.StorageFailed),
        ("internal", errors.BrokerUnavailable),
        ("unknown-route", errors.BrokerUnavailable),
    ],
)
def test_a_problem_is_the_error_of_its_kind(kind: str, expected: type[errors.BrokerError]) -> None:
    assert type(answered(400, problem(kind, 400)).error()) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (answered(502, b"<html>"), errors.BrokerUnavailable),
        (answered(503), errors.BrokerUnavailable),
        (answered(404, b"<html>"), errors.BrokerUnavailable),
        (answered(301, b"", location="http://elsewhere"), errors.BrokerUnavailable),
        (answered(401), errors.NotAuthenticated),
        (answered(403), errors.NotAuthorized),
        (answered(429), errors.BrokerThrottled),
        (answered(422, b'{"type": "urn:outbox-mq:problem:of-tomorrow", "title": "", "status": 422, "detail": ""}'),
         errors.BrokerUnavailable),
        (answered(422, b"\xff"), errors.BrokerUnavailable),
    ],
)  # fmt: skip
def test_what_somebody_in_between_answers_is_never_taken_for_a_refusal(
    answer: Answer, expected: type[errors.BrokerError]
) -> None:
    assert type(answer.error()) is expected


@pytest.mark.parametrize(
    ("answer", "pause_ms"),
    [
        (answered(429, problem("throttled", 429, retry_after_ms=250)), 250),
        (answered(429, problem("throttled", 429)), 1_000),
        (answered(429, problem("throttled", 429, retry_after_ms=10**15)), 3_600_000),
        (answered(429, b"", **{"retry-after": "7"}), 7_000),
        (answered(429, b"", **{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), 1_000),
    ],
)
def test_a_pause_is_taken_from_the_answer_and_bounded(answer: Answer, pause_ms: int) -> None:
    error = answer.error()

    assert isinstance(error, errors.BrokerThrottled)
    assert error.retry_after_ms == pause_ms


def test_where_a_request_was_wrong_is_in_the_text() -> None:
    shown = ProblemAnswer(type=ProblemKind.WRONG_SHAPE.uri, title="t", status=422, detail="d", where="$.a")
    content = problem("wrong-shape", 422, where=shown.where)

    assert "$.a" in str(answered(422, content).error())
