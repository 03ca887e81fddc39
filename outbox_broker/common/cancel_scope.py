"""Which topics a cancel acts on: all of them, or those that a limited token covers. Not who may cancel."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

Scope = tuple[str, ...] | None
"""Patterns of topics, sorted; None: all topics."""
ANY_TOPIC: Final = ""
"""In place of a topic that an earlier version did not write down: it may be any. No topic has this name."""


def scope_of(patterns: Sequence[str] | None) -> Scope:
    """The scope that these patterns make; those of one token always make the same."""
    return None if patterns is None or "*" in patterns else tuple(sorted(set(patterns)))


def covers(scope: Scope, topic: str) -> bool:
    """Whether a topic is in a scope; a message of an unknown topic is in that of all topics alone."""
    return scope is None or (topic != ANY_TOPIC and _matches(scope, topic))


@lru_cache(maxsize=65_536)
def _matches(scope: tuple[str, ...], topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in scope)
