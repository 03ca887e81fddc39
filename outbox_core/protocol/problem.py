"""Problems (RFC 9457) of the HTTP protocol: their shape and kinds. Does not map errors to problems."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

PROBLEM_TYPE: Final = "application/problem+json"
PROBLEM_PREFIX: Final = "urn:outbox-mq:problem:"


class ProblemAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457: `type` is stable, `detail` is for people; `where` is a path in the request, `bound` a limit's name.

    `position` counts the characters of the text at `where` from 1.
    """

    type: str
    title: str
    status: int
    detail: str
    where: str | None = None
    bound: str | None = None
    limit: int | None = None
    retry_after_ms: int | None = None
    position: int | None = None


class ProblemKind(StrEnum):
    """Every kind of problem that the server may return; a `type` is `urn:outbox-mq:problem:` and one of these."""

    MALFORMED_BODY = "malformed-body"
    WRONG_SHAPE = "wrong-shape"
    INVALID_MESSAGE = "invalid-message"
    INVALID_NAME = "invalid-name"
    INVALID_FILTER = "invalid-filter"
    BODY_TOO_LARGE = "body-too-large"
    MESSAGE_TOO_LARGE = "message-too-large"
    BATCH_TOO_LARGE = "batch-too-large"
    HEADERS_TOO_LARGE = "headers-too-large"
    MALFORMED_REQUEST = "malformed-request"
    UNSUPPORTED_TRANSFER_CODING = "unsupported-transfer-coding"
    EXPECTATION_FAILED = "expectation-failed"
    HEAD_TOO_SLOW = "head-too-slow"
    BODY_TOO_SLOW = "body-too-slow"
    UNKNOWN_ROUTE = "unknown-route"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    NOT_ACCEPTABLE = "not-acceptable"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    FOREIGN_ORIGIN = "foreign-origin"
    NOT_SUPPORTED = "not-supported"
    REFUSED = "refused"
    IN_USE = "in-use"
    GROUP_DELETED = "group-deleted"
    THROTTLED = "throttled"
    OVERLOADED = "overloaded"
    STORAGE_FAILED = "storage-failed"
    CORDONED = "cordoned"
    STOPPING = "stopping"
    INTERNAL = "internal"

    @property
    def uri(self) -> str:
        """Returns the value of `type` on the wire."""
        return PROBLEM_PREFIX + self.value
