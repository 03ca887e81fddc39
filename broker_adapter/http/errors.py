"""Maps what a broker answers to the port's errors: the adapter's only table of them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from outbox_core.common.errors import (
    DECODE_ERRORS,
    BrokerCordoned,
    BrokerError,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    GroupDeleted,
    InUse,
    InvalidRequest,
    NotAuthenticated,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from outbox_core.protocol.decoder_cache import json_decoder
from outbox_core.protocol.problem import PROBLEM_PREFIX, ProblemAnswer, ProblemKind

_RETRY_AFTER_MS_DEFAULT: Final = 1_000
_RETRY_AFTER_MS_MAX: Final = 60 * 60 * 1000
_DETAIL_CHARS_MAX: Final = 500


_CLASSES: Final[dict[ProblemKind, type[BrokerError]]] = {
    ProblemKind.UNAUTHENTICATED: NotAuthenticated,
    ProblemKind.FORBIDDEN: NotAuthorized,
    ProblemKind.FOREIGN_ORIGIN: NotAuthorized,
    ProblemKind.NOT_SUPPORTED: NotSupported,
    ProblemKind.IN_USE: InUse,
    ProblemKind.GROUP_DELETED: GroupDeleted,
    ProblemKind.STORAGE_FAILED: StorageFailed,
    # Another time may do.
    ProblemKind.THROTTLED: BrokerUnavailable,
    ProblemKind.OVERLOADED: BrokerUnavailable,
    ProblemKind.CORDONED: BrokerCordoned,
    ProblemKind.STOPPING: BrokerUnavailable,
    ProblemKind.INTERNAL: BrokerUnavailable,
    ProblemKind.HEAD_TOO_SLOW: BrokerUnavailable,
    ProblemKind.BODY_TOO_SLOW: BrokerUnavailable,
    # A wrong URL, or a failure of something between, not of the message: an operator can correct it.
    ProblemKind.UNKNOWN_ROUTE: BrokerUnavailable,
    ProblemKind.METHOD_NOT_ALLOWED: BrokerUnavailable,
    ProblemKind.NOT_ACCEPTABLE: BrokerUnavailable,
    ProblemKind.UNSUPPORTED_MEDIA_TYPE: BrokerUnavailable,
    ProblemKind.HEADERS_TOO_LARGE: BrokerUnavailable,
    ProblemKind.MALFORMED_REQUEST: BrokerUnavailable,
    ProblemKind.UNSUPPORTED_TRANSFER_CODING: BrokerUnavailable,
    ProblemKind.EXPECTATION_FAILED: BrokerUnavailable,
    # The same will be refused again: what the caller wrote is wrong, or anything else.
    ProblemKind.WRONG_SHAPE: InvalidRequest,
    ProblemKind.INVALID_MESSAGE: InvalidRequest,
    ProblemKind.INVALID_NAME: InvalidRequest,
    ProblemKind.INVALID_FILTER: InvalidRequest,
    ProblemKind.MESSAGE_TOO_LARGE: InvalidRequest,
    ProblemKind.MALFORMED_BODY: BrokerRefused,
    ProblemKind.BODY_TOO_LARGE: BrokerRefused,
    ProblemKind.BATCH_TOO_LARGE: BrokerRefused,
    ProblemKind.NOT_FOUND: BrokerRefused,
    ProblemKind.REFUSED: BrokerRefused,
}
"""Every kind's class of error; a test keeps the table complete."""


def of_answer(status_code: int, headers: Mapping[str, str], content: bytes, *, what: str) -> BrokerError:
    """The error that an answer other than 200 stands for: by its problem type, and without one by its status. `what`
    was tried, without a secret.
    """
    problem = _problem(content)
    if problem is None:
        return _of_status(status_code, headers, f"{what}: the broker answered {status_code}")
    return _of_problem(problem, f"{what}: {_detail(problem)}")


def of_problem(status_code: int, content: bytes, *, address: str) -> BrokerError:
    """The same of an operator's request, who knows what was asked: in the broker's own words, if it is one."""
    problem = _problem(content)
    if problem is None:
        return _of_status(status_code, {}, f"{address} answered {status_code}, and nothing of a broker's")
    return _of_problem(problem, _detail(problem))


def problem_kind(content: bytes) -> ProblemKind | None:
    """The kind of the problem that an answer's body tells; None if it is none."""
    problem = _problem(content)
    return None if problem is None else ProblemKind(problem.type.removeprefix(PROBLEM_PREFIX))


def _problem(content: bytes) -> ProblemAnswer | None:
    try:
        problem = json_decoder(ProblemAnswer).decode(content)
        ProblemKind(problem.type.removeprefix(PROBLEM_PREFIX))
    except (ValueError, *DECODE_ERRORS):
        return None
    return problem


def _of_problem(problem: ProblemAnswer, text: str) -> BrokerError:
    kind = ProblemKind(problem.type.removeprefix(PROBLEM_PREFIX))
    if kind is ProblemKind.CORDONED:
        return BrokerCordoned(text, retry_after_ms=_bounded(problem.retry_after_ms))
    if kind in {ProblemKind.THROTTLED, ProblemKind.OVERLOADED}:
        return BrokerThrottled(text, retry_after_ms=_bounded(problem.retry_after_ms))
    return _CLASSES[kind](text)


def _of_status(status_code: int, headers: Mapping[str, str], text: str) -> BrokerError:
    """Something in between answered, not the broker: only what cannot be meant otherwise is final."""
    if status_code == HTTPStatus.UNAUTHORIZED:
        return NotAuthenticated(text)
    if status_code == HTTPStatus.FORBIDDEN:
        return NotAuthorized(text)
    if status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return BrokerThrottled(text, retry_after_ms=_retry_after_ms(headers))
    return BrokerUnavailable(text)


def _retry_after_ms(headers: Mapping[str, str]) -> int:
    value = headers.get("retry-after", "")
    return _bounded(int(value) * 1000 if value.isdigit() and len(value) < 10 else None)


def _bounded(retry_after_ms: int | None) -> int:
    wait_ms = _RETRY_AFTER_MS_DEFAULT if retry_after_ms is None else retry_after_ms
    return min(max(wait_ms, 1), _RETRY_AFTER_MS_MAX)


def _detail(problem: ProblemAnswer) -> str:
    location = f" (at {problem.where})" if problem.where else ""
    return (problem.detail or problem.title)[:_DETAIL_CHARS_MAX] + location
