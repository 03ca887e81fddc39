"""What reconciliation adds to the error tree. Not a verdict: a verdict is given, an error means that none was."""

from __future__ import annotations

from messaging.errors import OutboxError


class NotComparable(OutboxError):
    """A source is missing, damaged or unreachable: any verdict would be a guess, so none is given."""

    retryable = True
