"""Everything that can go wrong on the wire is an error of the one tree, and says whether trying again can help."""

from __future__ import annotations

import inspect
import warnings

import pytest
from requests import exceptions as http

from broker_adapter.http import errors as http_errors
from broker_adapter.http.response_reader import HttpResponse
from outbox_core.common import errors
from outbox_core.protocol.problem import ProblemAnswer, ProblemKind


def answered(status: int, content: bytes = b"", **headers: str) -> HttpResponse:
    return HttpResponse(status_code=status, content=content, headers=headers)


def problem(kind: str, status: int, **more: object) -> bytes:
    import msgspec

    return msgspec.json.encode(
        {"type": f"urn:outbox-mq:problem:{kind}", "title": "t", "status": status, "detail": "d", **more}
    )


def every_exception() -> list[type[http.RequestException]]:
    found = [one for _, one in inspect.getmembers(http, inspect.isclass)]
    return [one for one in found if issubclass(one, http.RequestException) and one is not http.RequestException]


@pytest.mark.parametrize("kind", every_exception())
def test_an_exception_becomes_an_error_that_says_what_was_tried(kind: type[http.RequestException]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exception = kind("why", "x", 0) if issubclass(kind, http.JSONDecodeError) else kind("why")

    error = http_errors.of_exception(exception, what="POST /v1/x")

    assert type(error) is errors.BrokerUnavailable
    assert "POST /v1/x" in str(error)


@pytest.mark.parametrize("kind", list(ProblemKind))
def test_every_kind_of_problem_is_an_error(kind: ProblemKind) -> None:
    error = http_errors.of_answer(answered(400, problem(kind, 400)), what="POST /v1/x")

    assert isinstance(error, errors.BrokerError)
    assert str(error) == "POST /v1/x: d"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("unauthenticated", errors.NotAuthenticated),
        ("forbidden", errors.NotAuthorized),
        ("not-supported", errors.NotSupported),
        ("invalid-message", errors.BrokerRefused),
        ("message-too-large", errors.BrokerRefused),
        ("throttled", errors.BrokerThrottled),
        ("storage-failed", errors.StorageFailed),
        ("internal", errors.BrokerUnavailable),
        ("unknown-route", errors.BrokerUnavailable),
    ],
)
def test_a_problem_is_the_error_of_its_kind(kind: str, expected: type[errors.BrokerError]) -> None:
    assert type(http_errors.of_answer(answered(400, problem(kind, 400)), what="x")) is expected


@pytest.mark.parametrize(
    ("response", "expected"),
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
    response: HttpResponse, expected: type[errors.BrokerError]
) -> None:
    assert type(http_errors.of_answer(response, what="x")) is expected


@pytest.mark.parametrize(
    ("response", "pause_ms"),
    [
        (answered(429, problem("throttled", 429, retry_after_ms=250)), 250),
        (answered(429, problem("throttled", 429)), 1_000),
        (answered(429, problem("throttled", 429, retry_after_ms=10**15)), 3_600_000),
        (answered(429, b"", **{"retry-after": "7"}), 7_000),
        (answered(429, b"", **{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), 1_000),
    ],
)
def test_a_pause_is_taken_from_the_answer_and_bounded(response: HttpResponse, pause_ms: int) -> None:
    error = http_errors.of_answer(response, what="x")

    assert isinstance(error, errors.BrokerThrottled)
    assert error.retry_after_ms == pause_ms


def test_where_a_request_was_wrong_is_in_the_text() -> None:
    shown = ProblemAnswer(type=ProblemKind.WRONG_SHAPE.uri, title="t", status=422, detail="d", where="$.a")
    content = problem("wrong-shape", 422, where=shown.where)

    assert "$.a" in str(http_errors.of_answer(answered(422, content), what="x"))
