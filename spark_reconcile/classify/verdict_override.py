"""Replaces the rule, state and severity of rows in a verdict table. The caller selects the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_reconcile.rules.verdict_rule import VerdictRule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rule_named(rules: Sequence[VerdictRule], name: str) -> VerdictRule:
    """Returns the rule of this name, which must be one of `rules`."""
    return next(rule for rule in rules if rule.name == name)


def overruled(frame: DataFrame, rule: VerdictRule, *, where: str) -> DataFrame:
    """Returns the frame with the verdict of this rule in the rows that match `where` (SQL); null does not match."""
    from pyspark.sql.functions import expr

    verdict = {"rule": rule.name, "state": rule.state, "severity": rule.severity}
    return frame.withColumns({name: expr(f"if({where}, '{value}', {name})") for name, value in verdict.items()})
