"""The topics that a cancel applies to: all of them, or those that a restricted token covers. No authorisation."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

Scope = tuple[str, ...] | None
"""Patterns of topics, sorted; None: all topics."""
ANY_TOPIC: Final = ""
"""The topic in the record of a cancel that came before its message: it may be any. No topic has this name."""


def scope_of(patterns: Sequence[str] | None) -> Scope:
    """Returns the scope of these patterns; equal sets of patterns give equal scopes."""
    return None if patterns is None or "*" in patterns else tuple(sorted(set(patterns)))


def covers(scope: Scope, topic: str) -> bool:
    """Returns whether a topic is in a scope."""
    return scope is None or _matches(scope, topic)


@lru_cache(maxsize=65_536)
def _matches(scope: tuple[str, ...], topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in scope)
