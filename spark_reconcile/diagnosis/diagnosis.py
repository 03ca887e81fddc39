"""Finds causes that explain many verdicts of a run at once: measures the candidates, and returns those that hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, assert_never

from spark_reconcile.core.dataframes import listed, union
from spark_reconcile.core.settings import BusinessRule, Settings
from spark_reconcile.diagnosis.common_causes import (
    OFFSET_ROWS_MIN,
    ComparedTimes,
    Offset,
    RuleMatches,
    TimeDifferences,
    extent_causes,
    extents_of,
    findings_outside,
    key_causes,
    measured_differences,
    offset_causes,
    shared_offset_ms,
)
from spark_reconcile.load.read_plan import Read
from spark_reconcile.load.source_reader import Evidence, sql_frame, united
from spark_reconcile.results.summary import Cause, InputExtent, VerdictCount
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.results.window_totals import verdict_counts_of
from spark_reconcile.rules.verdict_rule import Scope, Severity
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from spark_reconcile.sources.sql_statements import InputKind, business_statement, narrowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


PENDING_SHARE_MIN: Final = 0.01
"""Share of pending verdicts that is normal in a run with correct clocks."""
_WITHOUT_MESSAGE: Final = frozenset({"no_message", "message_in_grace"})
_WITHOUT_ROW: Final = "no_business_row"
Tables = Callable[[], "tuple[DataFrame, DataFrame]"]
"""Loads the verdicts on messages and deliveries, and those on business rows; called only if needed."""


_EXPLAINED: Final[Mapping[ComparedTimes, frozenset[str]]] = {
    ComparedTimes.ARCHIVE: frozenset(
        {"not_in_broker", "sent_in_grace", "not_sent", "in_grace", "no_business_row", "business_in_grace", "unrecorded",
         "unrecorded_in_grace", "cancel_not_noted"}
    ),
    ComparedTimes.INBOX: frozenset(
        {"handled_early", "acknowledged_not_handled", "effect_in_grace", "handled_never_stored", "seen_in_grace"}
    ),
    ComparedTimes.BUSINESS_TIME: frozenset(
        {"no_message", "too_few_messages", "message_in_grace", "message_replica_behind", "no_business_row",
         "business_in_grace"}
    ),
    ComparedTimes.BUSINESS_DUE: frozenset({"due_time_differs"}),
}  # fmt: skip
"""Verdicts that wrong times of a source may cause."""


def diagnose(
    tables: Tables, *, evidence: Evidence, settings: Settings, verdict_counts: Sequence[VerdictCount],
    inputs: Sequence[InputExtent], displaced: Callable[[DataFrame], Evidence] | None = None,
) -> list[Cause]:  # fmt: skip
    """Returns the causes of a run's verdicts: rules whose keys are none of the messages', then those that explain most.

    `displaced`: given verdicts on messages, loads evidence with the business rows of their keys; for a run that has
    read business rows of a time range only.
    """
    extents = extents_of(verdict_counts, inputs, settings.rules)
    causes = extent_causes(findings_outside(*tables(), extents)) if extents else []
    causes += _offset_causes(_TimedEvidence(tables, evidence, displaced), settings, verdict_counts)
    # By the hour, rows whose times are off are not read beside their messages: their keys are none of these, either.
    explained = {cause.what for cause in causes if cause.source == "business"}
    matches = [of_rule for of_rule in rule_matches(verdict_counts, settings.rules) if of_rule.rule not in explained]
    return [*key_causes(matches), *sorted(causes, key=lambda cause: (-cause.count, cause.sentence))]


def rule_matches(verdict_counts: Sequence[VerdictCount], rules: Sequence[BusinessRule]) -> list[RuleMatches]:
    """Counts, for each rule that alone covers its topic, rows with and without messages, and the reverse."""
    topics = [rule.topic for rule in rules]
    all_matches = []
    for rule in rules:
        if topics.count(rule.topic) > 1:
            continue
        rows = {True: 0, False: 0}
        messages = {True: 0, False: 0}
        for counted in verdict_counts:
            if counted.scope is Scope.BUSINESS and counted.of == rule.name:
                rows[counted.rule in _WITHOUT_MESSAGE] += counted.count
            elif counted.scope is Scope.MESSAGE and counted.topic == rule.topic:
                messages[counted.rule == _WITHOUT_ROW] += counted.count
        all_matches.append(
            RuleMatches(
                rule=rule.name, topic=rule.topic, key_column=rule.key_column, matched=rows[False],
                unmatched=rows[True], asked_for=messages[False], unasked_for=messages[True],
            )
        )  # fmt: skip
    return all_matches


@dataclass(frozen=True, slots=True)
class _TimedEvidence:
    """The evidence whose times are compared."""

    tables: Tables
    evidence: Evidence
    displaced: Callable[[DataFrame], Evidence] | None

    def differences(
        self, times: Collection[ComparedTimes], verdict_counts: Sequence[VerdictCount]
    ) -> list[TimeDifferences]:
        """Measure; in a run on a time range, missing business rows may have times outside of it: they are loaded."""
        business = ComparedTimes.BUSINESS_TIME
        unasked = sum(counted.count for counted in verdict_counts if counted.rule == UNASKED)
        if self.displaced is None or business not in times or unasked < OFFSET_ROWS_MIN:
            return measured_differences(self.evidence, times)
        table, _ = self.tables()
        displaced = measured_differences(self.displaced(table), [business])
        other_times = [compared for compared in times if compared is not business]
        return [*measured_differences(self.evidence, other_times), *displaced] if other_times else displaced


def _offset_causes(measured: _TimedEvidence, settings: Settings, verdict_counts: Sequence[VerdictCount]) -> list[Cause]:
    """Measure only if there are enough verdicts that wrong times may have caused."""
    times = [compared for compared in ComparedTimes if _may_explain(verdict_counts, _EXPLAINED[compared])]
    if not times:
        return []
    skew_ms = settings.grace.clock_skew_ms
    offsets = [
        _offset(differences, settings, verdict_counts, skew_ms=skew_ms)
        for differences in measured.differences(times, verdict_counts)
    ]
    return offset_causes([offset for offset in offsets if offset is not None], skew_ms=skew_ms)


def _may_explain(verdict_counts: Sequence[VerdictCount], rules: Collection[str]) -> bool:
    """Whether there are enough findings, or more pending verdicts than are normal while messages are sent."""
    mine = [counted for counted in verdict_counts if counted.rule in rules]
    pending = sum(counted.count for counted in mine if counted.severity is Severity.WAIT)
    other_count = sum(counted.count for counted in mine) - pending
    return other_count >= OFFSET_ROWS_MIN or pending >= max(
        OFFSET_ROWS_MIN, PENDING_SHARE_MIN * sum(counted.count for counted in verdict_counts)
    )


def _offset(
    differences: TimeDifferences, settings: Settings, verdict_counts: Sequence[VerdictCount], *, skew_ms: int
) -> Offset | None:
    """Returns the offset that a source's rows share, and the verdicts that it may explain; None: there are none."""
    size_ms = shared_offset_ms(differences.percentiles_ms, rows=differences.rows, skew_ms=skew_ms)
    explains = _explained(differences, settings, verdict_counts)
    if size_ms is None or sum(explains.values()) < OFFSET_ROWS_MIN:
        return None
    name, reference, source, what = _names(differences, settings)
    return Offset(
        name=name, reference=reference, source=source, what=what, size_ms=size_ms, rows=differences.rows,
        explains=explains, is_clock=differences.compared in {ComparedTimes.ARCHIVE, ComparedTimes.INBOX},
    )  # fmt: skip


def _explained(
    differences: TimeDifferences, settings: Settings, verdict_counts: Sequence[VerdictCount]
) -> dict[str, int]:
    counts: dict[str, int] = {}
    for counted in verdict_counts:
        if counted.rule in _EXPLAINED[differences.compared] and _is_of(differences, counted, settings):
            counts[counted.rule] = counts.get(counted.rule, 0) + counted.count
    return counts


def _is_of(differences: TimeDifferences, counted: VerdictCount, settings: Settings) -> bool:
    match differences.compared:
        case ComparedTimes.ARCHIVE:
            return True
        case ComparedTimes.INBOX:
            return counted.of == differences.of
        case ComparedTimes.BUSINESS_TIME | ComparedTimes.BUSINESS_DUE:
            rule = settings.rules[int(differences.of)]
            return counted.of == rule.name if counted.scope is Scope.BUSINESS else counted.topic == rule.topic
        case _:
            assert_never(differences.compared)


def _names(differences: TimeDifferences, settings: Settings) -> tuple[str, str, str, str]:
    """Names of the times, of the reference times, and of the source."""
    match differences.compared:
        case ComparedTimes.ARCHIVE:
            return "the times of the archive", "the broker's", "archive", "sent messages"
        case ComparedTimes.INBOX:
            return f"the times of the inbox ({differences.of})", "the broker's", "inbox", differences.of
        case ComparedTimes.BUSINESS_TIME:
            rule = settings.rules[int(differences.of)]
            return f"the times in {rule.time_column} ({rule.name})", "their messages'", "business", rule.name
        case ComparedTimes.BUSINESS_DUE:
            rule = settings.rules[int(differences.of)]
            name = f"the due times in {rule.deliver_at_column} ({rule.name})"
            return name, "their messages'", "business", rule.name
        case _:
            assert_never(differences.compared)


def window_tables(session: SparkSession, store: WindowStore, windows: Sequence[int]) -> tuple[DataFrame, DataFrame]:
    """Returns the verdict tables of the hours that have findings."""
    folders = [store.folder(start) for start in windows if _has_findings(store.windows[start].result)]
    paths = {
        name: [str(folder / name) for folder in folders if (folder / name).exists()]
        for name in ("verdicts", "business_verdicts")
    }
    table, business = (_read(session, paths[name], schema) for name, schema in _SCHEMAS.items())
    return table, business


_SCHEMAS: Final[Mapping[str, str]] = {
    "verdicts": "scope string, rule string, severity string, topic string, message_key string, consumer_group string, "
    "at_ms bigint, sent_ms bigint, acked_ms bigint",
    "business_verdicts": "rule string, severity string, business_rule string, at_ms bigint, rows bigint",
}


def _read(session: SparkSession, paths: Sequence[str], schema: str) -> DataFrame:
    return session.read.schema(schema).parquet(*paths) if paths else listed(session, [], schema)


def _has_findings(result: Mapping[str, object]) -> bool:
    return any(counted.severity is Severity.FINDING for counted in verdict_counts_of([result]))


UNASKED: Final = "no_business_row"
"""The rule of a message without a business row in the time range that was read."""
KEYS_MAX: Final = 1_000
"""Limit of keys that are queried; they suffice to detect whether rows share an offset."""


def with_displaced_rows(
    session: SparkSession, settings: Settings, evidence: Evidence, table: DataFrame
) -> Evidence:  # fmt: skip
    """Returns the evidence of messages without a business row, and the business rows with their keys, of any time.

    A run by the hour has not read those of other hours.

    `table`: verdicts on messages. Raises DatabaseUnavailable.
    """
    unasked = table.where(f"scope = '{Scope.MESSAGE}' and rule = '{UNASKED}' and message_key is not null")
    key_rows = unasked.select("topic", "message_key").distinct().limit(KEYS_MAX).collect()
    keys = [(row["topic"], row["message_key"]) for row in key_rows]
    named = listed(session, keys, "topic string, message_key string").hint("broadcast")
    theirs = evidence.rows.where(f"input_kind = '{InputKind.ARCHIVE}'").join(
        named, ["topic", "message_key"], "left_semi"
    )
    rows = united(session, [sql_frame(session, read) for read in _reads(settings, keys)])
    counts = [count for count in evidence.counts if count.input_kind != InputKind.BUSINESS]
    return replace(evidence, rows=union(theirs.select(*rows.columns), rows), counts=counts)


def _reads(settings: Settings, keys: Sequence[tuple[str, str]]) -> Iterator[Read]:
    for rule_number, rule in enumerate(settings.rules):
        topic_keys = [key for topic, key in keys if topic == rule.topic]
        for url in settings.urls_of(rule):
            with reading(DatabaseAddress.of(url)) as reader:
                statement = narrowed(business_statement(reader, rule, rule_number), ids=[], keys=topic_keys)
            if statement is not None:
                yield Read(url, (statement,), snapshot=True)
