"""The port of a group's filter: what is read for a hand-out is shown to it by the batch. No filter passes all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from messaging.errors import NotSupported


class Filter(Protocol):
    """Decides which messages a group wants. Pure: the same headers give the same answer. What it does not accept counts
    as consumed for the group.
    """

    def accepts(self, headers: Sequence[Mapping[str, str]]) -> Sequence[bool]:
        """One answer for each message's headers, in order."""


def filter_of(expression: str | None) -> Filter | None:
    """The filter that an expression stands for, None for none. Raises InvalidMessage, or NotSupported."""
    if expression is not None:
        raise NotSupported("this broker does not filter yet; declare the group without a filter")
    return None
