"""The result of inspecting a broker's server: settings that weaken the durability which its adapter promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class Weakness(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a confirmed message could still be lost."""

    subject: str
    """The subject: a topic, a node, or a setting of the server."""
    problem: str
    """The possible consequence, as a sentence without a full stop."""
    cure: str
    """The change that an operator should make, in the terms of the server's documentation."""
    topic: str | None = None
    """The only topic that it concerns; None if it concerns all."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}; {self.cure}"


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one inspection of a server."""

    product: str
    version: str
    weaknesses: tuple[Weakness, ...] = ()


@runtime_checkable
class Inspectable(Protocol):
    """A Broker whose server can be inspected for its durability."""

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:
        """Inspect the server's settings and these topics; changes nothing. Errors are those of Broker."""


@runtime_checkable
class WeaknessReporter(Protocol):
    """A Broker that logs how its server is weaker than it promises; before a first publish it does so by itself."""

    def report_weaknesses(self) -> None:
        """Inspect the server's settings, and log each weakness that was not logged yet. Errors are those of Broker."""
