"""What a verdict is, and how an ordered table of rules gives one: in Python for one row, as a CASE for Spark.

Not the rules: message_rules, delivery_rules and business_rules hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spark_reconcile.rules.expressions import Predicate, facts_in, holds, sql


class Scope(StrEnum):
    """What a verdict is given on."""

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
    PARKED = "parked"
    CANCELED = "canceled"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    UNEXPLAINED = "unexplained"
    """No rule fits. It must never be given; the tests try all evidence to bring it about."""


class Severity(StrEnum):
    """What a verdict asks of people: nothing, patience, a note, a look, or action (a finding: exit status 1)."""

    OK = "ok"
    WAIT = "wait"
    INFO = "info"
    ATTENTION = "attention"
    FINDING = "finding"


FINDING: Final = f"severity = '{Severity.FINDING}'"
"""Whether a row of a table with verdicts is a finding, in SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of a verdict table. The first rule that holds gives the verdict.

    `echo`: it says again, of a business row, what its message's own verdict says; totals leave it out.
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


def classify(rules: Sequence[Rule], facts: Mapping[str, int]) -> str:
    """The name of the first rule that holds, in plain Python."""
    for rule in rules:
        if holds(rule.when, facts):
            return rule.name
    return UNEXPLAINED


def case_sql(rules: Sequence[Rule], bounds: Mapping[str, int]) -> str:
    """The same as one Spark SQL expression: the name of the first rule that holds."""
    arms = " ".join(f"when {sql(rule.when, bounds)} then '{rule.name}'" for rule in rules)
    return f"case {arms} else '{UNEXPLAINED}' end"


def lookup_sql(rules: Sequence[Rule], attribute: str, *, column: str) -> str:
    """A Spark SQL expression from a rule's name in `column` to its `state` or `severity`."""
    otherwise = State.UNEXPLAINED if attribute == "state" else Severity.FINDING
    arms = " ".join(f"when '{rule.name}' then '{getattr(rule, attribute)}'" for rule in rules)
    return f"case `{column}` {arms} else '{otherwise}' end"


def facts_asked(rules: Sequence[Rule]) -> set[str]:
    """The names of all facts and bounds that these rules ask for."""
    return set().union(*(facts_in(rule.when) for rule in rules))
