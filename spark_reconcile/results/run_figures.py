"""The numbers of a run besides its verdict counts: its sources, totals, and time series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.classification import RULES
from spark_reconcile.core.dataframes import union
from spark_reconcile.core.plausible_times import InputCount, note_on
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_arguments import utc_text
from spark_reconcile.core.time_buckets import EVER_MS, HOUR_MS, TimeAxis
from spark_reconcile.load.completeness_bound import NEVER_MS
from spark_reconcile.load.name_checks import note_on_topic
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.results.summary import Example, InputExtent, VerdictCount
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


TROUBLE: Final = f"severity in ('{Severity.ATTENTION}', '{Severity.FINDING}')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a whole run."""

    messages: int = 0
    stored: int = 0
    resent: int = 0
    deduplicated_by_broker: int = 0
    message_groups: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    deduplicated_by_inbox: int = 0


def hourly(table: DataFrame) -> DataFrame:
    """Returns counts by topic, group, verdict and hour, in the columns of the written table."""
    return table.groupBy(
        "scope", "topic", "consumer_group", "state", "rule", _expression(f"at_ms div {HOUR_MS} * {HOUR_MS}L", "hour_ms")
    ).count()


def axis_of(evidence: Evidence) -> TimeAxis:
    """Returns the time axis of this run: from the first message stored to the broker's last action.

    Without records of the broker, over those of the other sources. Impossible times are in no count.
    """
    timed = [count for count in evidence.counts if count.first_ms > 0]
    shown = [count for count in timed if count.input_kind in {"messages", "actions"}] or timed
    if not shown:
        return TimeAxis(0, 1, 1)
    return TimeAxis.over(min(count.first_ms for count in shown), max(count.last_ms for count in shown))


def flow_events(table: DataFrame, axis: TimeAxis) -> dict[str, dict[int, int]]:
    """Returns counts by time bucket from the table of verdicts: stored, delivered first, acknowledged."""
    times = {
        "stored": (Scope.MESSAGE, "stored_ms"),
        "delivered": (Scope.DELIVERY, "first_delivered_ms"),
        "acknowledged": (Scope.DELIVERY, "acked_ms"),
    }
    frames = [
        table.where(f"scope = '{scope}' and {column} > 0").selectExpr(
            f"'{name}' as name", f"({column} - {axis.start_ms}L) div {axis.width_ms}L as bucket"
        )
        for name, (scope, column) in times.items()
    ]
    events: dict[str, dict[int, int]] = {name: {} for name in times}
    placed = union(*frames).where(f"bucket between 0 and {axis.buckets - 1}")
    for row in placed.groupBy("name", "bucket").count().collect():
        events[row["name"]][row["bucket"]] = row["count"]
    return events


def loudest_first(example: Example) -> tuple[bool, int, str, int, str, str]:
    return (
        example.severity is not Severity.FINDING,
        list(State).index(example.state),
        example.rule,
        example.at_ms,
        example.id,
        example.of,
    )


def inputs(evidence: Evidence, settings: Settings) -> list[InputExtent]:
    """Returns the inputs, from consumers to the business, and the time range for which each is complete."""
    totals: dict[tuple[str, str], list[int]] = {}
    reach: dict[tuple[str, str], tuple[int, int]] = {}
    counts: dict[tuple[str, str], list[InputCount]] = {}
    for count in [*_expected(settings), *evidence.counts]:
        source_key, reaches = _source(count.input_kind, count.note, evidence, settings)
        spans = totals.setdefault(source_key, [0, NEVER_MS, 0])
        spans[0] += count.rows
        spans[1], spans[2] = min(spans[1], count.first_ms or NEVER_MS), max(spans[2], count.last_ms)
        reach[source_key] = reaches
        counts.setdefault(source_key, []).append(count)
    extents = [
        InputExtent(
            source=source, what=what, rows=rows, first_ms=first_ms if first_ms < NEVER_MS else 0, last_ms=last_ms,
            complete_since_ms=None if reach[source, what][0] >= NEVER_MS else reach[source, what][0],
            complete_until_ms=None if reach[source, what][1] >= EVER_MS else reach[source, what][1],
            note="; ".join(filter(None, _notes(source, what, counts[source, what], evidence, settings))),
        )
        for (source, what), (rows, first_ms, last_ms) in totals.items()
    ]  # fmt: skip
    topics = {*evidence.known_topics, *(rule.topic for rule in settings.rules)}
    return with_empty_notes(extents, evidence.counts, topics=[] if settings.archives else sorted(topics))


def _notes(
    source: str, what: str, counts: Sequence[InputCount], evidence: Evidence, settings: Settings
) -> Iterator[str]:
    """Yields the notes on a source; empty ones are ignored."""
    yield evidence.torn.get(what, "") if source == "broker" else ""
    yield note_on_dropped(counts) if source == "broker" else ""
    yield note_on(counts)
    for rule_number in {int(count.note) for count in counts if count.input_kind == InputKind.BUSINESS}:
        yield note_on_topic(settings, evidence.counts, rule_number)


def _expected(settings: Settings) -> list[InputCount]:
    """Returns a line for each source, so that empty ones are listed, too."""
    inputs: list[tuple[str, str]] = [(InputKind.INBOX, inbox.group) for inbox in settings.inboxes]
    inputs += [("actions", ""), ("messages", ""), (InputKind.ARCHIVE, ""), (InputKind.OUTBOX, "")]
    inputs += [(InputKind.BUSINESS, str(rule_number)) for rule_number in range(len(settings.rules))]
    return [
        InputCount(input_kind=input_kind, topic="", note=note, rows=0, first_ms=0, last_ms=0)
        for input_kind, note in inputs
    ]


def _source(
    input_kind: str, note: str, evidence: Evidence, settings: Settings
) -> tuple[tuple[str, str], tuple[int, int]]:
    """Returns an input's name; since when and until when it is complete."""
    until = evidence.reach
    match input_kind:
        case InputKind.INBOX:
            since = [facts.inbox_reach_ms for facts in evidence.groups if facts.consumer_group == note]
            ends = [until_ms for (_, group), until_ms in until.inboxes.items() if group == note]
            return ("inbox", note), (max(since, default=0), min(ends, default=EVER_MS))
        case InputKind.OUTBOX:
            return ("outbox", "unsent messages"), (0, until.archive_ms)
        case InputKind.ARCHIVE:
            return ("archive", "sent messages"), (evidence.archive_reach_ms, until.archive_ms)
        case InputKind.BUSINESS:
            rule = settings.rules[int(note)]
            ends_ms = until.business.get(rule.topic, EVER_MS)
            return ("business", rule.name), (evidence.business_reaches[rule.topic], ends_ms)
        case "messages":
            return ("broker", "message log"), (evidence.broker_reach_ms, EVER_MS)
        case _:
            return ("broker", "action log"), (evidence.actions_reach_ms, EVER_MS)


def verdict_of(scope: Scope, name: str) -> tuple[State, Severity, bool]:
    for rule in RULES[scope]:
        if rule.name == name:
            return rule.state, rule.severity, rule.echo
    return State.UNEXPLAINED, Severity.FINDING, False


def verdict_count(scope: Scope, topic: str, of: str, rule: str, *, count: int) -> VerdictCount:
    state, severity, echo = verdict_of(scope, rule)
    return VerdictCount(
        scope=scope, topic=topic, of=of, state=state, severity=severity, rule=rule, count=count, echo=echo
    )


def _expression(text: str, name: str) -> Column:
    from pyspark.sql.functions import expr

    return expr(text).alias(name)


def with_empty_notes(
    inputs: Sequence[InputExtent], counts: Sequence[InputCount], *, topics: Sequence[str]
) -> list[InputExtent]:
    """Returns the inputs, with notes on inboxes and archives that have no rows, and should: a single run cannot know
    whether they ever had any.

    `topics`: those to which this outbox publishes, by rules and rows; empty if its archive has files, too.
    """
    return [
        replace(extent, note="; ".join(filter(None, (extent.note, _note(extent, counts, topics))))) for extent in inputs
    ]


def _note(extent: InputExtent, counts: Sequence[InputCount], topics: Sequence[str]) -> str:
    if extent.rows:
        return ""
    # A run by the hour reads a time range: only a source without any row at all has no such time.
    is_empty = extent.complete_since_ms is None
    match extent.source:
        case "inbox":
            return _of_inbox(extent.what, counts, is_empty=is_empty)
        case "archive" if is_empty:
            return _of_archive(counts, topics)
        case _:
            return ""


def _of_inbox(group: str, counts: Sequence[InputCount], *, is_empty: bool) -> str:
    named = [count for count in counts if count.input_kind == "actions" and count.note.partition(" ")[2] == group]
    acked = sum(count.rows for count in named if count.note == f"acked {group}")
    if acked and is_empty:
        return (
            f"empty, while the broker has {acked:,} acknowledgements of this group: whether it was emptied cannot be "
            "known; if its consumers have their inbox in another schema, name it in [[inboxes]]"
        )
    return "" if named else "the broker knows no action of this group yet"


def _of_archive(counts: Sequence[InputCount], topics: Sequence[str]) -> str:
    stored = sum(count.rows for count in counts if count.input_kind == "messages" and count.topic in topics)
    if not stored:
        return ""
    return (
        f"empty, while the broker has {stored:,} messages on topics of this outbox: whether it was emptied, or is off, "
        "cannot be known"
    )


DROPPED: Final = "dropped"
"""The kind of the action."""
NAMED_MAX: Final = 3


def note_on_dropped(counts: Iterable[InputCount]) -> str:
    """Returns a note on the action log if retention dropped messages that a group had not settled; else empty.

    The broker does so only where it is configured to (`retention_drops_unread`), and records for each group up to
    where. These messages are in no log any more, so no verdict names them.
    """
    groups = ((count.note.partition(" "), count) for count in counts)
    dropped = sorted(
        (count.topic, group, count.last_sequence, count.last_ms)
        for (kind, _, group), count in groups
        if kind == DROPPED
    )
    named = [
        f"{group} those of {topic} below {sequence:,} (the last at {utc_text(last_ms)})"
        for topic, group, sequence, last_ms in dropped[:NAMED_MAX]
    ]
    if not named:
        return ""
    more = f"; and {len(dropped) - NAMED_MAX:,} more groups" if len(dropped) > NAMED_MAX else ""
    return (
        "retention dropped messages that groups had not settled, of which no verdict tells (retention_drops_unread of "
        f"the broker): {'; '.join(named)}{more}"
    )
