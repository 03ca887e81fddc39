"""Maps failures of HTTP requests to the port's errors: the adapter's only table of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec
from requests import exceptions as http

from broker_adapter.http.response_reader import HttpResponse
from outbox_core.common.errors import (
    BrokerError,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    GroupDeleted,
    InUse,
    NotAuthenticated,
    NotAuthorized,
    NotSupported,
    OutboxError,
    StorageFailed,
)
from outbox_core.protocol.decoder_cache import json_decoder
from outbox_core.protocol.problem import PROBLEM_PREFIX, ProblemAnswer, ProblemKind

_RETRY_AFTER_MS_DEFAULT: Final = 1_000
_RETRY_AFTER_MS_MAX: Final = 60 * 60 * 1000
_DETAIL_CHARS_MAX: Final = 500


def of_exception(error: http.RequestException, *, what: str) -> BrokerUnavailable:
    """The error of a request that ended with an exception: the broker may answer another time, and the URL was checked
    when the client was made. The text says what was tried, and no secret.
    """
    return BrokerUnavailable(f"{what}: {_cause(error)}")


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
    # The same will be refused again.
    ProblemKind.MALFORMED_BODY: BrokerRefused,
    ProblemKind.WRONG_SHAPE: BrokerRefused,
    ProblemKind.INVALID_MESSAGE: BrokerRefused,
    ProblemKind.INVALID_NAME: BrokerRefused,
    ProblemKind.INVALID_FILTER: BrokerRefused,
    ProblemKind.BODY_TOO_LARGE: BrokerRefused,
    ProblemKind.MESSAGE_TOO_LARGE: BrokerRefused,
    ProblemKind.BATCH_TOO_LARGE: BrokerRefused,
    ProblemKind.NOT_FOUND: BrokerRefused,
    ProblemKind.REFUSED: BrokerRefused,
}
"""Every kind's class of error; a test keeps the table complete."""


def of_answer(response: HttpResponse, *, what: str) -> BrokerError:
    """The error that an answer other than 200 stands for: by its problem type, and without one by its status."""
    try:
        problem = json_decoder(ProblemAnswer).decode(response.content)
        kind = ProblemKind(problem.type.removeprefix(PROBLEM_PREFIX))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return _of_status(response, f"{what}: the broker answered {response.status_code}")
    text = f"{what}: {_detail(problem)}"
    if kind in {ProblemKind.THROTTLED, ProblemKind.OVERLOADED}:
        return BrokerThrottled(text, retry_after_ms=_bounded(problem.retry_after_ms))
    return of_kind(kind)(text)


def own(error: OutboxError) -> OutboxError:
    """An exception of one's own that says the same: those who shared a request raise it in several threads. It has no
    results: theirs have other places.
    """
    if isinstance(error, BrokerThrottled):
        return BrokerThrottled(str(error), retry_after_ms=error.retry_after_ms)
    return type(error)(str(error))


def of_kind(kind: ProblemKind) -> type[BrokerError]:
    """The class of error that a kind of problem stands for; of_answer() has that of `throttled` and `overloaded`."""
    return _CLASSES[kind]


def _of_status(response: HttpResponse, text: str) -> BrokerError:
    """Something in between answered, not the broker: only what cannot be meant otherwise is final."""
    status = response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return NotAuthenticated(text)
    if status == HTTPStatus.FORBIDDEN:
        return NotAuthorized(text)
    if status == 429:
        return BrokerThrottled(text, retry_after_ms=_retry_after_ms(response))
    return BrokerUnavailable(text)


def _retry_after_ms(response: HttpResponse) -> int:
    value = response.headers.get("retry-after", "")
    return _bounded(int(value) * 1000 if value.isdigit() and len(value) < 10 else None)


def _bounded(retry_after_ms: int | None) -> int:
    wait_ms = _RETRY_AFTER_MS_DEFAULT if retry_after_ms is None else retry_after_ms
    return min(max(wait_ms, 1), _RETRY_AFTER_MS_MAX)


def _detail(problem: ProblemAnswer) -> str:
    location = f" (at {problem.where})" if problem.where else ""
    return (problem.detail or problem.title)[:_DETAIL_CHARS_MAX] + location


def _cause(error: BaseException) -> str:
    """The innermost reason: requests and urllib3 wrap it three times, in texts with object addresses in them."""
    reason: BaseException = error
    for _ in range(8):
        inner = getattr(reason, "reason", None) or next(
            (argument for argument in reversed(reason.args) if isinstance(argument, BaseException)), None
        )
        if not isinstance(inner, BaseException):
            break
        reason = inner
    system = reason.__cause__ or reason.__context__
    if isinstance(system, OSError) and system.strerror:
        return system.strerror
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return f"{type(reason).__name__}: {text}"[:_DETAIL_CHARS_MAX]
