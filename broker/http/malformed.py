"""The problem with what is no request, or not clearly one."""

from __future__ import annotations

from typing import Final

from broker.http.problems import Problem
from messaging.problem import ProblemKind

CLOSE: Final = {"connection": "close"}


def malformed(detail: str) -> Problem:
    """Its connection ends with it, since what follows is unknown."""
    return Problem(ProblemKind.MALFORMED_REQUEST, detail, headers=CLOSE)
