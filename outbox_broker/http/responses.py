"""What a request is answered with: a response as a value, and problems (RFC 9457), which map errors to responses with a
stable `type`. The only table of kinds and statuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from outbox_core.common import errors
from outbox_core.protocol.problem import PROBLEM_TYPE, ProblemAnswer, ProblemKind


@dataclass(slots=True)
class Response:
    """The response to a request: one body of known length."""

    body: bytes | bytearray
    media_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def closes(self) -> bool:
        """Whether the connection ends after it."""
        return self.headers.get("connection") == "close"


TITLES: Final[dict[ProblemKind, tuple[int, str]]] = {
    ProblemKind.MALFORMED_BODY: (400, "The body cannot be read"),
    ProblemKind.WRONG_SHAPE: (422, "The request does not have the shape that this route asks for"),
    ProblemKind.INVALID_MESSAGE: (422, "A value is out of its bounds"),
    ProblemKind.INVALID_NAME: (422, "A topic or consumer group has a name that is not allowed"),
    ProblemKind.INVALID_FILTER: (422, "The group's filter cannot be read"),
    ProblemKind.BODY_TOO_LARGE: (413, "The request is larger than allowed"),
    ProblemKind.MESSAGE_TOO_LARGE: (413, "A message is larger than allowed"),
    ProblemKind.BATCH_TOO_LARGE: (422, "The batch has more entries than allowed"),
    ProblemKind.HEADERS_TOO_LARGE: (431, "The request's head is larger than allowed"),
    ProblemKind.MALFORMED_REQUEST: (400, "The request is not well formed, or not clearly so"),
    ProblemKind.UNSUPPORTED_TRANSFER_CODING: (501, "The body has a transfer coding that is not supported"),
    ProblemKind.EXPECTATION_FAILED: (417, "The request expects what cannot be met"),
    ProblemKind.HEAD_TOO_SLOW: (408, "The request's head did not arrive in time"),
    ProblemKind.BODY_TOO_SLOW: (408, "The request's body did not arrive in time"),
    ProblemKind.UNKNOWN_ROUTE: (404, "There is no such route"),
    ProblemKind.NOT_FOUND: (404, "There is no such thing here"),
    ProblemKind.METHOD_NOT_ALLOWED: (405, "The route does not take this method"),
    ProblemKind.NOT_ACCEPTABLE: (406, "No media type that the client accepts can be answered"),
    ProblemKind.UNSUPPORTED_MEDIA_TYPE: (415, "The body has a media type that is not supported"),
    ProblemKind.UNAUTHENTICATED: (401, "A bearer token is needed"),
    ProblemKind.FORBIDDEN: (403, "The token does not allow this"),
    ProblemKind.FOREIGN_ORIGIN: (403, "The request comes from a foreign web page or names a foreign host"),
    ProblemKind.NOT_SUPPORTED: (422, "This broker cannot do that"),
    ProblemKind.REFUSED: (422, "The request was refused"),
    ProblemKind.IN_USE: (409, "A topic or consumer group is in use"),
    ProblemKind.GROUP_DELETED: (410, "The consumer group was deleted while the pull waited"),
    ProblemKind.THROTTLED: (429, "The broker has too much to do at once"),
    ProblemKind.OVERLOADED: (503, "The broker has no room for more requests or connections now"),
    ProblemKind.STORAGE_FAILED: (503, "The broker cannot make anything durable now"),
    ProblemKind.CORDONED: (503, "The broker takes no new messages for now"),
    ProblemKind.STOPPING: (503, "The broker is about to stop"),
    ProblemKind.INTERNAL: (500, "The broker failed"),
}
"""Each kind's status and title; a test keeps the table complete."""

_OF_ERRORS: Final[tuple[tuple[type[errors.OutboxError], ProblemKind], ...]] = (
    (errors.InvalidMessage, ProblemKind.INVALID_MESSAGE),
    (errors.FilterError, ProblemKind.INVALID_FILTER),
    (errors.UsageError, ProblemKind.REFUSED),
    (errors.NotSupported, ProblemKind.NOT_SUPPORTED),
    (errors.NotAuthorized, ProblemKind.FORBIDDEN),
    (errors.InUse, ProblemKind.IN_USE),
    (errors.GroupDeleted, ProblemKind.GROUP_DELETED),
    (errors.BrokerRefused, ProblemKind.REFUSED),
    (errors.BrokerCordoned, ProblemKind.CORDONED),
    (errors.BrokerThrottled, ProblemKind.THROTTLED),
    (errors.StorageFailed, ProblemKind.STORAGE_FAILED),
    (errors.BrokerUnavailable, ProblemKind.STORAGE_FAILED),
)
"""Maps the engine's errors to kinds: the first class that matches, so subclasses come first."""

CLOSE: Final = {"connection": "close"}
"""The header of a response after which the connection ends."""
_WHERE = re.compile(r" - at `(?:key in )?(\$[^`]*)`$")
_encode = msgspec.json.Encoder().encode


class Problem(Exception):
    """A request that cannot be served; becomes the response."""

    def __init__(
        self,
        kind: ProblemKind,
        detail: str,
        *,
        where: str | None = None,
        bound: tuple[str, int] | None = None,
        retry_after_ms: int | None = None,
        position: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.headers = dict(headers or {})
        status, title = TITLES[kind]
        if retry_after_ms is not None:
            self.headers["retry-after"] = str(-(-retry_after_ms // 1000))
        self.answer = ProblemAnswer(
            type=kind.uri,
            title=title,
            status=status,
            detail=detail,
            where=where,
            bound=bound[0] if bound else None,
            limit=bound[1] if bound else None,
            retry_after_ms=retry_after_ms,
            position=position,
        )

    def response(self) -> Response:
        """Returns the response; always in JSON, whatever the request accepts."""
        return Response(_encode(self.answer), PROBLEM_TYPE, self.answer.status, self.headers)


def malformed(detail: str) -> Problem:
    """Returns the problem of an invalid or ambiguous request. It closes the connection: what follows is unknown."""
    return Problem(ProblemKind.MALFORMED_REQUEST, detail, headers=CLOSE)


def of_error(error: errors.OutboxError, *, storage_retry_after_ms: int) -> Problem:
    """Returns the problem for an error of the engine."""
    kind = next((kind for error_type, kind in _OF_ERRORS if isinstance(error, error_type)), ProblemKind.INTERNAL)
    retry_after_ms = storage_retry_after_ms if kind is ProblemKind.STORAGE_FAILED else None
    if isinstance(error, errors.BrokerThrottled):
        retry_after_ms = error.retry_after_ms
    if isinstance(error, errors.FilterError):
        return Problem(kind, str(error), where="$.filter", position=error.position)
    return Problem(kind, str(error), retry_after_ms=retry_after_ms)


def of_decoding(error: Exception, *, within: str = "$") -> Problem:
    """Returns the problem of a body: what is wrong and, if the body can be parsed, where. `within`: the part of the
    body that was decoded.
    """
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        location = _WHERE.search(text)
        return Problem(
            ProblemKind.WRONG_SHAPE, _WHERE.sub("", text), where=within + (location.group(1)[1:] if location else "")
        )
    if isinstance(error, RecursionError):
        return Problem(ProblemKind.MALFORMED_BODY, "the body is nested too deeply")
    return Problem(ProblemKind.MALFORMED_BODY, text)


def of_query(error: msgspec.ValidationError, *, unknown: Iterable[str]) -> Problem:
    """Returns the problem of a query: `where` is the invalid parameter; of unknown parameters, the first."""
    text = str(error)
    location = _WHERE.search(text)
    name = location.group(1).removeprefix("$.") if location else next(iter(unknown), "")
    return Problem(ProblemKind.WRONG_SHAPE, _WHERE.sub("", text), where=f"query.{name}")
