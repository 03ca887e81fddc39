"""Puts the rules on the evidence: three tables, one verdict a row. Neither the rules nor the evidence are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.business_evidence import business_evidence
from spark_reconcile.business_rules import BUSINESS_RULES
from spark_reconcile.delivery_evidence import delivery_evidence
from spark_reconcile.delivery_rules import DELIVERY_RULES
from spark_reconcile.message_evidence import business_keys, message_evidence
from spark_reconcile.message_rules import MESSAGE_RULES
from spark_reconcile.reaching import EVER_MS
from spark_reconcile.reading import Evidence
from spark_reconcile.settings import Grace
from spark_reconcile.slots import within
from spark_reconcile.sources.statements import Leg, Span
from spark_reconcile.verdict import Rule, Scope, case_sql, lookup_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RULES: Final[Mapping[Scope, Sequence[Rule]]] = {
    Scope.MESSAGE: MESSAGE_RULES,
    Scope.DELIVERY: DELIVERY_RULES,
    Scope.BUSINESS: BUSINESS_RULES,
}


@dataclass(frozen=True, slots=True)
class Judged:
    """Evidence with verdicts: columns `rule`, `state` and `severity` are added to each row."""

    messages: DataFrame
    deliveries: DataFrame
    business: DataFrame

    def release(self) -> None:
        """Let go of Spark's copies."""
        for frame in (self.messages, self.deliveries, self.business):
            frame.unpersist()


def bounds_of(grace: Grace, evidence: Evidence, *, now_ms: int) -> dict[str, int]:
    """The numbers of this run that rules ask for beside a row's facts."""
    return {
        "now_ms": now_ms,
        "grace_ms": int(grace.seconds * 1000),
        "late_after_ms": int(grace.late_after_seconds * 1000),
        "clock_skew_ms": int(grace.clock_skew_seconds * 1000),
        "archive_reach_ms": evidence.archive_reach_ms,
        "archive_until_ms": evidence.reach.archive_ms,
        "broker_reach_ms": evidence.broker_reach_ms,
        "broker_seen_ms": evidence.broker_seen_ms,
        "actions_reach_ms": evidence.actions_reach_ms,
    }


def judge(evidence: Evidence, bounds: Mapping[str, int], *, span: Span | None = None) -> Judged:
    """One verdict for each message, each message in each group, and each rule and key of business rows.

    `span`: business rows are of these times alone, so only messages of these times are theirs.
    """
    messages = judged(
        message_evidence(
            evidence.rows,
            evidence.messages,
            evidence.actions,
            business=business_keys(evidence.rows),
            reaches=evidence.business_reaches,
            until=evidence.reach.business or dict.fromkeys(evidence.business_reaches, EVER_MS),
            known_topics=evidence.known_topics,
        ),
        MESSAGE_RULES,
        bounds,
    ).persist()
    deliveries = judged(
        delivery_evidence(messages, evidence.actions, evidence.inboxes, groups=evidence.groups),
        DELIVERY_RULES,
        bounds,
    ).persist()
    theirs = messages.where(f"created_ms <= 0 or {within(span)}")
    asked = business_evidence(evidence.rows, theirs, is_shared=_is_shared(evidence))
    business = judged(asked, BUSINESS_RULES, bounds).persist()
    return Judged(messages=messages, deliveries=deliveries, business=business)


def _is_shared(evidence: Evidence) -> bool:
    """Whether rows of several rules ask for messages on one topic."""
    asking = {(one.topic, one.note) for one in evidence.counts if one.leg == Leg.BUSINESS}
    return len(asking) > len({topic for topic, _ in asking})


def judged(evidence: DataFrame, rules: Sequence[Rule], bounds: Mapping[str, int]) -> DataFrame:
    """The evidence with `rule`, `state` and `severity`."""
    named = evidence.selectExpr("*", f"{case_sql(rules, bounds)} as rule")
    return named.selectExpr(
        "*", *(f"{lookup_sql(rules, attribute, column='rule')} as {attribute}" for attribute in ("state", "severity"))
    )
