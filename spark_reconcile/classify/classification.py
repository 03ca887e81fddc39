"""Applies the rules to the evidence: three tables, one verdict a row. Rules and evidence are defined elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.window_placement import WindowPlacement
from spark_reconcile.core.dataframes import computed, grouped, in_parallel, union
from spark_reconcile.core.plausible_times import EARLIEST_MS
from spark_reconcile.core.settings import Grace
from spark_reconcile.core.time_buckets import EVER_MS, Span, within
from spark_reconcile.evidence.business_evidence import business_evidence
from spark_reconcile.evidence.delivery_evidence import delivery_evidence
from spark_reconcile.evidence.message_evidence import RECURRING, business_keys, message_evidence
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.rules.business_row_rules import BUSINESS_ROW_RULES
from spark_reconcile.rules.delivery_rules import DELIVERY_RULES
from spark_reconcile.rules.message_rules import MESSAGE_RULES
from spark_reconcile.rules.verdict_rule import Scope, VerdictRule, case_sql, lookup_sql
from spark_reconcile.sources.sql_statements import InputKind

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


def classify(
    evidence: Evidence, bounds: Mapping[str, int], *, placement: WindowPlacement, span: Span | None = None
) -> ClassifiedEvidence:
    """Classify each message, each message in each group, and each rule and key of business rows.

    `span`: business rows were read of this time range only, so only messages of it are compared with them.
    """
    keep = _checkpoint if evidence.is_few else _persist
    messages = with_verdicts(
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
    first = with_verdicts(
        delivery_evidence(messages, evidence.actions, evidence.inboxes, groups=evidence.groups, asides=evidence.asides),
        DELIVERY_RULES,
        bounds,
    )
    first = keep(first)
    decided = _decided_by_filters(first, evidence, bounds, keep=keep)
    deliveries = first if decided is None else union(first.where(f"not ({_IN_DOUBT})"), decided)
    # No row asks for a recurring message, which must not stand for one of its key that is lost.
    theirs = copies.where(f"created_ms <= 0 or {within(span)}").where(f"not {RECURRING}")
    business_rows = business_evidence(evidence.rows, theirs, is_shared=_is_shared(evidence))
    business = keep(with_verdicts(business_rows, BUSINESS_ROW_RULES, bounds))

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
    return keep(with_verdicts(decided, DELIVERY_RULES, bounds).select(*deliveries.columns))


def _is_shared(evidence: Evidence) -> bool:
    """Whether several rules cover one topic."""
    asking = {(count.topic, count.note) for count in evidence.counts if count.input_kind == InputKind.BUSINESS}
    return len(asking) > len({topic for topic, _ in asking})


def with_verdicts(evidence: DataFrame, rules: Sequence[VerdictRule], bounds: Mapping[str, int]) -> DataFrame:
    """Returns the evidence with the columns `rule`, `state` and `severity`."""
    named = evidence.selectExpr("*", f"{case_sql(rules, bounds)} as rule")
    return named.selectExpr(
        "*", *(f"{lookup_sql(rules, attribute, column='rule')} as {attribute}" for attribute in ("state", "severity"))
    )


# One that was discarded for its topic, and published again to another one under its id, is two messages.
_PUBLISHED_ALONE: Final = "topic is not null and cancel = 0 and discarded = 0 and broker = 0 and outbox + archive > 0"
BROADCAST_MAX: Final = 1_000_000
_STORED_ALONE: Final = "topic is not null and broker > 0 and outbox + archive = 0"


def with_topic_mismatches(messages: DataFrame, *, is_few: bool) -> DataFrame:
    """Returns classified messages with the column `is_other_copy`: whether the copy on another topic has the message's
    verdict. Those whose copies name two topics get `topic_differs`, unless a rule of higher precedence applies.

    A message is identified by its topic and its id, so these look like one that was lost and one that was not
    published. They are one mismatch: the broker's copy gets the verdict, since consumers saw that one.
    An id with several copies on either side is not changed.
    """
    pairs = _pairs_of_few(messages) if is_few else _pairs_of_many(messages)
    if pairs is None:
        return messages.selectExpr("*", "false as is_other_copy")
    marked = messages.join(pairs.hint("broadcast"), "id", "left")
    differing = f"is_pair and (({_PUBLISHED_ALONE}) or ({_STORED_ALONE}))"
    rule = rule_named(MESSAGE_RULES, "topic_differs")
    before = ", ".join(f"'{earlier.name}'" for earlier in MESSAGE_RULES[: MESSAGE_RULES.index(rule)])
    overruled_rows = overruled(marked, rule, where=f"{differing} and rule not in ({before})")
    return overruled_rows.selectExpr(*messages.columns, f"coalesce({differing} and broker = 0, false) as is_other_copy")


def _pairs_of_few(messages: DataFrame) -> DataFrame | None:
    """Returns the ids with one copy on either side, with `is_pair`, by one job; None: there are none."""
    alone = messages.where(f"({_PUBLISHED_ALONE}) or ({_STORED_ALONE})")
    counted = grouped(alone, "id", published=f"count_if({_PUBLISHED_ALONE})", stored=f"count_if({_STORED_ALONE})")
    pairs = computed(counted.where("published = 1 and stored = 1").selectExpr("id", "true as is_pair"), is_few=True)
    return None if pairs.is_empty() else pairs.frame


def _pairs_of_many(messages: DataFrame) -> DataFrame | None:
    """Returns the same. Another publisher's messages, which may be very many, are joined before they are grouped."""
    published = messages.where(_PUBLISHED_ALONE).select("id", "topic").localCheckpoint()
    count = published.count()
    if not count:
        return None
    single = grouped(published, "id", n="count(*)").where("n = 1").select("id")
    # After a long outage of the broker millions of rows are unsent: too many to broadcast.
    single = single.hint("broadcast") if count <= BROADCAST_MAX else single
    stored = messages.where(_STORED_ALONE).select("id").join(single, "id", "left_semi")
    pairs = grouped(stored, "id", n="count(*)").where("n = 1").selectExpr("id", "true as is_pair").localCheckpoint()
    return None if pairs.isEmpty() else pairs


def rule_named(rules: Sequence[VerdictRule], name: str) -> VerdictRule:
    """Returns the rule of this name, which must be one of `rules`."""
    return next(rule for rule in rules if rule.name == name)


def overruled(frame: DataFrame, rule: VerdictRule, *, where: str) -> DataFrame:
    """Returns the frame with the rule, state and severity of this rule in the rows that match `where` (SQL); null does
    not match.
    """
    from pyspark.sql.functions import expr

    verdict = {"rule": rule.name, "state": rule.state, "severity": rule.severity}
    return frame.withColumns({name: expr(f"if({where}, '{value}', {name})") for name, value in verdict.items()})
