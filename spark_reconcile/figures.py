"""From judged tables to numbers: the books, latencies, examples, and the counts that are drawn. A few Spark jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.flow import Axis
from spark_reconcile.judging import RULES, Judged
from spark_reconcile.reaching import EVER_MS
from spark_reconcile.reading import NEVER_MS, Evidence, LegCount
from spark_reconcile.settings import Settings
from spark_reconcile.slots import HOUR_MS
from spark_reconcile.sources.statements import Leg
from spark_reconcile.summary import Book, Example, Input, Latency
from spark_reconcile.verdict import Scope, Severity, State

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EXAMPLES_A_RULE: Final = 10
TROUBLE: Final = f"severity in ('{Severity.ATTENTION}', '{Severity.FINDING}')"
_TURNED_AWAY: Final = (
    "if(effects > 0 and last_delivered_ms > effect_ms, greatest(deliveries - nacks - effects, 0L), 0L)"
)
"""Hand-outs after the effect that no failure explains: the inbox turned them away."""

_HANDLED_AT_ONCE: Final = "effects > 0 and published_ms > 0 and deliver_at_ms = 0"
"""Of what was scheduled, the time from the commit on says nothing."""
_HOPS: Final = (
    ("due to first hand-out", "first"),
    ("hand-out to acknowledgement", "acked"),
    ("commit to handler", "handled"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over everything."""

    messages: int = 0
    stored: int = 0
    resent: int = 0
    deduplicated_by_broker: int = 0
    message_groups: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    deduplicated_by_inbox: int = 0


def verdicts(judged: Judged, *also: str) -> DataFrame:
    """The table of verdicts on messages and deliveries, as it is written; `also`: more of their columns."""
    shared = ("topic", "state", "rule", "severity", "deliver_at_ms", "stored_ms", *also)
    messages = judged.messages.selectExpr(
        f"'{Scope.MESSAGE}' as scope", "id as message_id", *shared, "nullif(message_key, '') as message_key",
        "cast(null as string) as consumer_group", "created_ms", "sent_ms", "0L as first_delivered_ms",
        "0L as acked_ms", "0L as handled_ms", "outbox", "archive", "broker", "canceled", "business", "0L as deliveries",
        "0L as acks", "0L as effects", "if(created_ms > 0, created_ms, stored_ms) as at_ms",
        "created_ms as published_ms", "resent", "repeated", "0L as turned_away",
    )  # fmt: skip
    deliveries = judged.deliveries.selectExpr(
        f"'{Scope.DELIVERY}' as scope", "id as message_id", *shared, "cast(null as string) as message_key",
        "consumer_group", "0L as created_ms", "0L as sent_ms", "first_delivered_ms", "first_ack_ms as acked_ms",
        "effect_ms as handled_ms", "0L as outbox", "0L as archive", "stored as broker", "canceled", "0L as business",
        "deliveries", "acks", "effects", "if(ready_ms > 0, ready_ms, greatest(last_ms, effect_ms)) as at_ms",
        "published_ms", "0L as resent", "0L as repeated", f"{_TURNED_AWAY} as turned_away",
    )  # fmt: skip
    return messages.unionByName(deliveries)


def business_verdicts(judged: Judged, settings: Settings, *also: str) -> DataFrame:
    """The table of verdicts on business rows, as it is written: one row a rule and key; `also`: more columns."""
    names = [f"when {number} then '{sql_text(rule.name)}'" for number, rule in enumerate(settings.rules)]
    name = f"case rule_number {' '.join(names)} end" if names else "''"
    return judged.business.selectExpr(
        f"{name} as business_rule", "topic", "message_key", "rows", "messages", "time_ms as at_ms", "state", "rule",
        "severity", *also,
    )  # fmt: skip


def hourly(table: DataFrame) -> DataFrame:
    """Counts by topic, group, verdict and hour, as they are written."""
    return table.groupBy(
        "scope", "topic", "consumer_group", "state", "rule", _expression(f"at_ms div {HOUR_MS} * {HOUR_MS}L", "hour_ms")
    ).count()


def axis_of(evidence: Evidence) -> Axis:
    """The time axis of this run: from the first message stored to the last thing the broker did."""
    broker = [one for one in evidence.counts if one.leg in {"messages", "actions"} and one.first_ms > 0]
    if not broker:
        return Axis(0, 1, 1)
    return Axis.over(min(one.first_ms for one in broker), max(one.last_ms for one in broker))


def books_and_trouble(
    table: DataFrame, business: DataFrame, axis: Axis
) -> tuple[list[Book], dict[State, dict[int, int]]]:
    """The books, and where in time the trouble of messages and deliveries lies."""
    since = f"(at_ms - {axis.start_ms}L) div {axis.width_ms}L"
    bucket = f"if({TROUBLE}, greatest(least({since}, {axis.buckets - 1}L), 0L), -1L)"
    lines = table.selectExpr(
        "scope", "topic", "coalesce(consumer_group, '') as of", "rule", f"{bucket} as bucket", "1L as n"
    )
    rows = business.selectExpr(
        f"'{Scope.BUSINESS}' as scope", "topic", "business_rule as of", "rule", "-1L as bucket", "rows as n"
    )
    counted = lines.unionByName(rows).groupBy("scope", "topic", "of", "rule", "bucket").agg(_expression("sum(n)", "n"))
    totals: dict[tuple[Scope, str, str, str], int] = {}
    trouble: dict[State, dict[int, int]] = {}
    for row in counted.collect():
        scope = Scope(row["scope"])
        place = (scope, row["topic"] or "", row["of"] or "", row["rule"])
        count, found_in = int(row["n"]), int(row["bucket"])
        totals[place] = totals.get(place, 0) + count
        if found_in >= 0:
            cells = trouble.setdefault(_state(scope, row["rule"]), {})
            cells[found_in] = cells.get(found_in, 0) + count
    return [book(*place, count=count) for place, count in sorted(totals.items())], trouble


def flow_events(judged: Judged, axis: Axis) -> dict[str, dict[int, int]]:
    """What happened when: stored, handed out first, acknowledged."""
    times = [
        (judged.messages, "stored", "stored_ms"),
        (judged.deliveries, "handed out", "first_delivered_ms"),
        (judged.deliveries, "acknowledged", "first_ack_ms"),
    ]
    frames = [
        frame.where(f"{column} > 0").selectExpr(
            f"'{name}' as name", f"({column} - {axis.start_ms}L) div {axis.width_ms}L as bucket"
        )
        for frame, name, column in times
    ]
    events: dict[str, dict[int, int]] = {name: {} for _, name, _ in times}
    for row in reduce(lambda one, other: one.unionByName(other), frames).groupBy("name", "bucket").count().collect():
        events[row["name"]][row["bucket"]] = row["count"]
    return events


def totals_and_latencies(judged: Judged) -> tuple[Totals, list[Latency]]:
    """Sums over all messages and deliveries, and percentiles of each hop by topic and group."""
    by_topic = (
        judged.messages.groupBy("topic")
        .agg(
            *(_expression(f"sum({name})", name) for name in ("broker", "resent", "repeated")),
            _expression("count(*)", "n"),
            _percentiles("stored_ms - created_ms", "stored_ms > 0 and created_ms > 0", "stored"),
        )
        .collect()
    )
    by_group = judged.deliveries.groupBy("topic", "consumer_group").agg(
        _expression("count(*)", "n"),
        _expression("count_if(deliveries > 0)", "delivered"),
        _expression("sum(greatest(deliveries - 1, 0L))", "redelivered"),
        _expression("count_if(acks > 0)", "acknowledged"),
        _expression(f"sum({_TURNED_AWAY})", "turned_away"),
        _percentiles("first_delivered_ms - ready_ms", "deliveries > 0 and ready_ms > 0", "first"),
        _percentiles("first_ack_ms - first_delivered_ms", "deliveries > 0 and acks > 0", "acked"),
        _percentiles("effect_ms - published_ms", _HANDLED_AT_ONCE, "handled"),
    ).collect()  # fmt: skip
    totals = Totals(
        messages=sum(row["n"] for row in by_topic),
        stored=sum(row["broker"] for row in by_topic),
        resent=sum(row["resent"] for row in by_topic),
        deduplicated_by_broker=sum(row["repeated"] for row in by_topic),
        message_groups=sum(row["n"] for row in by_group),
        delivered=sum(row["delivered"] for row in by_group),
        redelivered=sum(row["redelivered"] for row in by_group),
        acknowledged=sum(row["acknowledged"] for row in by_group),
        deduplicated_by_inbox=sum(row["turned_away"] for row in by_group),
    )
    hops = [
        *(_latency("commit to broker", row["topic"], "", row["stored"]) for row in by_topic),
        *(_latency(hop, row["topic"], row["consumer_group"], row[name]) for row in by_group for hop, name in _HOPS),
    ]
    return totals, sorted((hop for hop in hops if hop is not None), key=lambda hop: (hop.topic, hop.hop, hop.of))


def examples(table: DataFrame, business: DataFrame) -> list[Example]:
    """The first few rows of every rule that asks for a look or for action, findings first."""
    rows = table.where(TROUBLE).selectExpr(
        "scope", "rule", "message_id as id", "topic", "coalesce(consumer_group, '') as of",
        "coalesce(message_key, '') as key", "at_ms",
    ).unionByName(
        business.where(TROUBLE).selectExpr(
            f"'{Scope.BUSINESS}' as scope", "rule", "'' as id", "topic", "business_rule as of",
            "coalesce(message_key, '') as key", "at_ms",
        )
    )  # fmt: skip
    ranked = rows.selectExpr("*", "row_number() over (partition by scope, rule order by at_ms, id, of, key) as place")
    found = []
    for row in ranked.where(f"place <= {EXAMPLES_A_RULE}").drop("place").collect():
        scope = Scope(row["scope"])
        state, severity, echo = verdict_of(scope, row["rule"])
        if not echo:
            found.append(Example(**{**row.asDict(), "scope": scope}, state=state, severity=severity))
    return sorted(found, key=loudest_first)


def loudest_first(one: Example) -> tuple[bool, int, str, int, str, str]:
    return one.severity is not Severity.FINDING, list(State).index(one.state), one.rule, one.at_ms, one.id, one.of


def inputs(evidence: Evidence, settings: Settings) -> list[Input]:
    """What each source gave, from the end of the way to its beginning, and how far it reaches."""
    found: dict[tuple[str, str], list[int]] = {}
    reach: dict[tuple[str, str], tuple[int, int]] = {}
    for one in [*_expected(settings), *evidence.counts]:
        place, reaches = _source(one.leg, one.note, evidence, settings)
        spans = found.setdefault(place, [0, NEVER_MS, 0])
        spans[0] += one.rows
        spans[1], spans[2] = min(spans[1], one.first_ms or NEVER_MS), max(spans[2], one.last_ms)
        reach[place] = reaches
    return [
        Input(
            source=source, what=what, rows=rows, first_ms=first_ms if first_ms < NEVER_MS else 0, last_ms=last_ms,
            complete_since_ms=None if reach[source, what][0] >= NEVER_MS else reach[source, what][0],
            complete_until_ms=None if reach[source, what][1] >= EVER_MS else reach[source, what][1],
            note=evidence.torn.get(what, "") if source == "broker" else "",
        )
        for (source, what), (rows, first_ms, last_ms) in found.items()
    ]  # fmt: skip


def _expected(settings: Settings) -> list[LegCount]:
    """A line for each source, so that an empty one is seen to be empty."""
    legs: list[tuple[str, str]] = [(Leg.INBOX, inbox.group) for inbox in settings.inboxes]
    legs += [("actions", ""), ("messages", ""), (Leg.ARCHIVE, ""), (Leg.OUTBOX, "")]
    legs += [(Leg.BUSINESS, str(number)) for number in range(len(settings.rules))]
    return [LegCount(leg=leg, topic="", note=note, rows=0, first_ms=0, last_ms=0) for leg, note in legs]


def _source(leg: str, note: str, evidence: Evidence, settings: Settings) -> tuple[tuple[str, str], tuple[int, int]]:
    """What a leg is called; since when it is complete, and until when."""
    until = evidence.reach
    match leg:
        case Leg.INBOX:
            since = [one.inbox_reach_ms for one in evidence.groups if one.consumer_group == note]
            ends = [until_ms for (_, group), until_ms in until.inboxes.items() if group == note]
            return ("inbox", note), (max(since, default=0), min(ends, default=EVER_MS))
        case Leg.OUTBOX:
            return ("outbox", "unsent messages"), (0, until.archive_ms)
        case Leg.ARCHIVE:
            return ("archive", "sent messages"), (evidence.archive_reach_ms, until.archive_ms)
        case Leg.BUSINESS:
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


def _state(scope: Scope, name: str) -> State:
    return verdict_of(scope, name)[0]


def book(scope: Scope, topic: str, of: str, rule: str, *, count: int) -> Book:
    state, severity, echo = verdict_of(scope, rule)
    return Book(scope=scope, topic=topic, of=of, state=state, severity=severity, rule=rule, count=count, echo=echo)


def _latency(hop: str, topic: str | None, of: str, found: Sequence[int] | None) -> Latency | None:
    if found is None or found[0] is None:
        return None
    p50, p95, p99, longest, count = (int(number) for number in found)
    return Latency(
        hop=hop, topic=topic or "", of=of, count=count, p50_ms=p50, p95_ms=p95, p99_ms=p99, longest_ms=longest
    )


def _percentiles(value: str, condition: str, name: str) -> Column:
    """(median, 95 %, 99 %, longest, count) of the rows where the condition holds."""
    kept = f"case when {condition} then greatest({value}, 0L) end"
    shares = "array(0.5D, 0.95D, 0.99D, 1D)"
    return _expression(f"concat(percentile_approx({kept}, {shares}, 10000), array(count({kept})))", name)


def _expression(text: str, name: str) -> Column:
    from pyspark.sql.functions import expr

    return expr(text).alias(name)


def sql_text(text: str) -> str:
    """Text inside a Spark SQL literal."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
