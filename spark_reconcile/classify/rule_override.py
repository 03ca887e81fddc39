"""Gives rows of a table of verdicts another rule, with its state and severity. Which rows is the caller's to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_reconcile.rules.verdict import Rule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rule_named(rules: Sequence[Rule], name: str) -> Rule:
    """The rule of this name, which is among these."""
    return next(rule for rule in rules if rule.name == name)


def overruled(frame: DataFrame, rule: Rule, *, where: str) -> DataFrame:
    """The frame with the verdict of this rule in the rows that `where`, in SQL, chooses; null chooses none."""
    from pyspark.sql.functions import expr

    given = {"rule": rule.name, "state": rule.state, "severity": rule.severity}
    return frame.withColumns({name: expr(f"if({where}, '{value}', {name})") for name, value in given.items()})
