"""Applies the rules to the evidence: three tables, one verdict a row. Rules and evidence are defined elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.topic_mismatches import with_topic_mismatches
from spark_reconcile.classify.window_placement import WindowPlacement
from spark_reconcile.core.dataframes import union
from spark_reconcile.core.parallel_jobs import in_parallel
from spark_reconcile.core.settings import Grace
from spark_reconcile.core.time_buckets import within
from spark_reconcile.core.time_range import EVER_MS, Span
from spark_reconcile.evidence.business_evidence import business_evidence
from spark_reconcile.evidence.delivery_evidence import delivery_evidence
from spark_reconcile.evidence.message_evidence import business_keys, message_evidence
from spark_reconcile.load.evidence import Evidence
from spark_reconcile.rules.business_row_rules import BUSINESS_ROW_RULES
from spark_reconcile.rules.delivery_rules import DELIVERY_RULES
from spark_reconcile.rules.message_rules import MESSAGE_RULES
from spark_reconcile.rules.plausible_times import EARLIEST_MS
from spark_reconcile.rules.verdict_rule import Scope, VerdictRule, case_sql, lookup_sql
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RULES: Final[Mapping[Scope, Sequence[VerdictRule]]] = {
    Scope.MESSAGE: MESSAGE_RULES,
    Scope.DELIVERY: DELIVERY_RULES,
    Scope.BUSINESS: BUSINESS_ROW_RULES,
}
_IN_DOUBT: Final = "rule = 'filtered_out_or_waiting'"
"""The rule of every delivery whose verdict depends on a filter, before the filter is evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedEvidence:
    """Evidence with verdicts: columns `rule`, `state`, `severity` and `window_ms` are added to each row."""

    messages: DataFrame
    deliveries: DataFrame
    business: DataFrame
    kept: Sequence[DataFrame] = ()
    """The frames that Spark has cached for these."""

    @property
    def frames(self) -> tuple[DataFrame, DataFrame, DataFrame]:
        """All three frames."""
        return self.messages, self.deliveries, self.business

    def map(self, change: Callable[[DataFrame], DataFrame]) -> ClassifiedEvidence:
        """Returns the same verdicts with `change` applied to each frame."""
        messages, deliveries, business = map(change, self.frames)
        return ClassifiedEvidence(messages=messages, deliveries=deliveries, business=business, kept=self.kept)

    def checkpointed(self) -> ClassifiedEvidence:
        """Returns the same rows without their query plans: if these are joined repeatedly, planning takes longer than
        execution. Rows that are checkpoints already stay as they are.
        """
        if not self.kept:
            return self
        messages, deliveries, business = in_parallel(*(frame.localCheckpoint for frame in self.frames))
        self.release()
        return ClassifiedEvidence(messages=messages, deliveries=deliveries, business=business)

    def release(self) -> None:
        """Release the frames that Spark has cached."""
        for frame in self.kept:
            frame.unpersist()


def bounds_of(grace: Grace, evidence: Evidence, *, now_ms: int) -> dict[str, int]:
    """Returns the bounds of this run, which rules use in addition to a row's facts."""
    return {
        "now_ms": now_ms,
        "earliest_ms": EARLIEST_MS,
        "latest_ms": evidence.latest_ms,
        "grace_ms": grace.ms,
        "late_after_ms": int(grace.late_after_seconds * 1000),
        "clock_skew_ms": grace.clock_skew_ms,
        "archive_reach_ms": evidence.archive_reach_ms,
        "archive_until_ms": evidence.reach.archive_ms,
        "broker_reach_ms": evidence.broker_reach_ms,
        "broker_seen_ms": evidence.broker_seen_ms,
        "actions_reach_ms": evidence.actions_reach_ms,
        "cancels_reach_ms": evidence.cancels_reach_ms,
        "delay_cluster": 0 if evidence.delay is None else 1,
    }


def judge(
    evidence: Evidence, bounds: Mapping[str, int], *, placement: WindowPlacement, span: Span | None = None
) -> ClassifiedEvidence:
    """Classify each message, each message in each group, and each rule and key of business rows.

    `span`: business rows were read of this time range only, so only messages of it are compared with them.
    """
    keep = _checkpoint if evidence.is_few else _persist
    messages = judged(
        message_evidence(
            evidence.rows,
            evidence.messages,
            evidence.actions,
            business=business_keys(evidence.rows),
            reaches=evidence.business_reaches,
            until=evidence.reach.business or dict.fromkeys(evidence.business_reaches, EVER_MS),
            known_topics=evidence.known_topics,
            is_few=evidence.is_few,
        ),
        MESSAGE_RULES,
        bounds,
    )
    messages = keep(messages)
    copies = with_topic_mismatches(messages, is_few=evidence.is_few)
    first = judged(
        delivery_evidence(messages, evidence.actions, evidence.inboxes, groups=evidence.groups),
        DELIVERY_RULES,
        bounds,
    )
    first = keep(first)
    decided = _decided_by_filters(first, evidence, bounds, keep=keep)
    deliveries = first if decided is None else union(first.where(f"not ({_IN_DOUBT})"), decided)
    theirs = copies.where(f"created_ms <= 0 or {within(span)}")
    business_rows = business_evidence(evidence.rows, theirs, is_shared=_is_shared(evidence))
    business = keep(judged(business_rows, BUSINESS_ROW_RULES, bounds))

    def placed(frame: DataFrame, window: str) -> DataFrame:
        return frame.selectExpr("*", f"{window} as window_ms").where(placement.chosen)

    return ClassifiedEvidence(
        messages=placed(copies.where("not is_other_copy"), placement.message),
        deliveries=placed(deliveries, placement.delivery),
        business=placed(business, placement.business),
        kept=() if evidence.is_few else [frame for frame in (messages, first, decided, business) if frame is not None],
    )


def _persist(frame: DataFrame) -> DataFrame:
    """Cache the rows when they are first read. Each job that reads them is sent all steps that they come from."""
    return frame.persist()


def _checkpoint(frame: DataFrame) -> DataFrame:
    """Compute the rows now, without the steps that they come from: of few rows, sending those takes longer. Plans that
    contain one another took minutes to analyse, also where they were cached, since Spark analyses the whole tree.
    """
    return frame.localCheckpoint()


def _decided_by_filters(
    deliveries: DataFrame, evidence: Evidence, bounds: Mapping[str, int], *, keep: Callable[[DataFrame], DataFrame]
) -> DataFrame | None:
    """Classify deliveries whose verdict depends on a group's filter; None: no group has a filter."""
    groups = [facts for facts in evidence.groups if facts.filtered]
    if not groups:
        return None
    doubtful = deliveries.where(_IN_DOUBT).drop("rule", "state", "severity")
    decided = evidence.filters.with_wanted(doubtful, groups, skew_ms=bounds["clock_skew_ms"], is_few=evidence.is_few)
    return keep(judged(decided, DELIVERY_RULES, bounds).select(*deliveries.columns))


def _is_shared(evidence: Evidence) -> bool:
    """Whether several rules cover one topic."""
    asking = {(count.topic, count.note) for count in evidence.counts if count.leg == Leg.BUSINESS}
    return len(asking) > len({topic for topic, _ in asking})


def judged(evidence: DataFrame, rules: Sequence[VerdictRule], bounds: Mapping[str, int]) -> DataFrame:
    """Returns the evidence with the columns `rule`, `state` and `severity`."""
    named = evidence.selectExpr("*", f"{case_sql(rules, bounds)} as rule")
    return named.selectExpr(
        "*", *(f"{lookup_sql(rules, attribute, column='rule')} as {attribute}" for attribute in ("state", "severity"))
    )
