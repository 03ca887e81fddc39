"""Verdicts, and their evaluation by an ordered table of rules, as a CASE in SQL.

The rules are in message_rules, delivery_rules and business_row_rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spark_reconcile.rules.fact_conditions import Predicate, facts_in, sql


class Scope(StrEnum):
    """The kind of row to which a verdict applies."""

    MESSAGE = "message"
    DELIVERY = "delivery"
    BUSINESS = "business"


class State(StrEnum):
    """The verdicts."""

    SETTLED = "settled"
    PENDING = "pending"
    UNSENT = "unsent"
    LOST = "lost"
    PHANTOM = "phantom"
    DUPLICATE = "duplicate"
    EARLY = "early"
    LATE = "late"
    DEAD = "dead"
    DISCARDED = "discarded"
    PARKED = "parked"
    CANCELED = "canceled"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    UNEXPLAINED = "unexplained"
    """No rule matches. It must never occur; tests try all combinations of evidence to produce it."""


class Severity(StrEnum):
    """What a verdict requires of users: nothing, patience, a note, attention, or action (a finding: exit status 1)."""

    OK = "ok"
    WAIT = "wait"
    INFO = "info"
    ATTENTION = "attention"
    FINDING = "finding"


FINDING: Final = f"severity = '{Severity.FINDING}'"
"""SQL condition: a row of a verdict table is a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRule:
    """One row of a table of rules. The first rule that matches gives the verdict.

    `echo`: it repeats, for a business row, the verdict of its message; totals exclude it.
    """

    name: str
    state: State
    severity: Severity
    when: Predicate
    meaning: str
    cause: str = ""
    cure: str = ""
    echo: bool = False


UNEXPLAINED: Final = "unexplained"


def case_sql(rules: Sequence[VerdictRule], bounds: Mapping[str, int]) -> str:
    """Returns a Spark SQL expression for the name of the first rule that matches."""
    arms = " ".join(f"when {sql(rule.when, bounds)} then '{rule.name}'" for rule in rules)
    return f"case {arms} else '{UNEXPLAINED}' end"


def lookup_sql(rules: Sequence[VerdictRule], attribute: str, *, column: str) -> str:
    """Returns a Spark SQL expression that maps a rule's name in `column` to its `state` or `severity`."""
    otherwise = State.UNEXPLAINED if attribute == "state" else Severity.FINDING
    names: dict[str, list[str]] = {}
    for rule in rules:
        names.setdefault(getattr(rule, attribute), []).append(f"'{rule.name}'")
    # An arm for each value, not for each rule: a third of the expression that Spark plans and sends to each task.
    arms = " ".join(f"when `{column}` in ({', '.join(some)}) then '{value}'" for value, some in names.items())
    return f"case {arms} else '{otherwise}' end"


def facts_asked(rules: Sequence[VerdictRule]) -> set[str]:
    """Returns the names of all facts and bounds in these rules."""
    return set().union(*(facts_in(rule.when) for rule in rules))
