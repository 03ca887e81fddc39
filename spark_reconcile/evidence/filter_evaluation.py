"""Evaluates groups' filters on messages that were never delivered to them: the broker's filters over their headers.

Only deliveries in doubt are evaluated. Headers are read from the broker's log once more, of their topics and segments
only, and are not part of the results. Verdicts are given elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, FilterError
from spark_reconcile.core.dataframes import computed, grouped, listed, union
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.rules.delivery_rules import FilterAnswer
from spark_reconcile.sources.broker_logs import STEP_BACK_MS, LogSegment

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from outbox_broker.filter import Predicate

_DELIVERY: Final = ["topic", "consumer_group", "sequence"]
_ANSWER_SCHEMA: Final = "topic string, consumer_group string, sequence bigint, wanted bigint"
_FILTER_SCHEMA: Final = "topic string, consumer_group string, filter_number bigint, filter_since_ms bigint"
_TAKES_ALL: Final = -1
_PLACED_MS: Final = "greatest(stored_ms, deliver_at_ms)"
"""The broker appended the message at this time or later."""


class FilterEvaluation:
    """Evaluates the filters of groups for the deliveries of a run.

    Results are cached until the run ends, so that a recheck of some deliveries does not read headers again.
    `segments`: the message log as it was read. Not safe for threads.
    """

    def __init__(self, segments: Sequence[LogSegment] = ()) -> None:
        self._segments = segments
        self._answers: DataFrame | None = None

    def with_wanted(
        self, deliveries: DataFrame, groups: Sequence[GroupFacts], *, skew_ms: int, is_few: bool
    ) -> DataFrame:
        """Returns the deliveries of delivery_evidence(), with `wanted` as the group's filter decides.

        CHANGED if the filter is newer than the message, by the broker's clock and `skew_ms`; NOT_KNOWN if the filter,
        or the message's headers, cannot be read. `is_few`: there are few deliveries.
        """
        texts = sorted({facts.filter for facts in groups if facts.filter})
        columns = [name for name in deliveries.columns if name != "wanted"]
        group_filters = listed(deliveries.sparkSession, _filters(groups, texts), _FILTER_SCHEMA).hint("broadcast")
        decided = deliveries.join(group_filters, ["topic", "consumer_group"], "left").selectExpr(
            *columns, "filter_number",
            f"case when coalesce(filter_since_ms, -1L) < 0 then {FilterAnswer.NOT_KNOWN:d}L "
            f"when filter_since_ms > 0 and {_PLACED_MS} <= filter_since_ms + {skew_ms}L then {FilterAnswer.CHANGED:d}L "
            f"when filter_number = {_TAKES_ALL} then {FilterAnswer.YES:d}L end as decided",
        )  # fmt: skip
        undecided = decided.where("decided is null").selectExpr(
            *_DELIVERY, "filter_number", f"{_PLACED_MS} as placed_ms"
        )  # fmt: skip
        answers = self._answered(undecided, texts, is_few=is_few)
        joined = decided.join(answers.withColumnRenamed("wanted", "answer"), _DELIVERY, "left")
        return joined.selectExpr(*columns, f"coalesce(decided, answer, {FilterAnswer.NOT_KNOWN:d}L) as wanted")

    def _answered(self, deliveries: DataFrame, texts: Sequence[str], *, is_few: bool) -> DataFrame:
        """Returns the answer for each of these deliveries, and for others."""
        session = deliveries.sparkSession
        answers = listed(session, [], _ANSWER_SCHEMA) if self._answers is None else self._answers
        unanswered = computed(deliveries.join(answers, _DELIVERY, "left_anti"), is_few=is_few)
        if is_few and unanswered.is_empty():
            return answers
        topics = grouped(unanswered.frame, "topic", since_ms="min(placed_ms)").collect()
        if topics:
            headers = self._headers(
                session, [row["topic"] for row in topics], since_ms=min(row["since_ms"] for row in topics)
            )
            joined = unanswered.frame.join(headers, ["topic", "sequence"], "left").select(
                *_DELIVERY, "filter_number", "headers"
            )
            evaluated = joined.mapInArrow(partial(evaluate, texts=tuple(texts)), _ANSWER_SCHEMA)
            # A sequence has one message; two with the same sequence have no answer, unless it is equal.
            once = grouped(
                evaluated, *_DELIVERY, wanted=f"if(min(wanted) = max(wanted), min(wanted), {FilterAnswer.NOT_KNOWN:d}L)"
            )
            answers = self._answers = union(answers, computed(once, is_few=is_few).frame)
        return answers

    def _headers(self, session: SparkSession, topics: Sequence[str], *, since_ms: int) -> DataFrame:
        """Returns headers by topic and sequence, of messages that were appended since then."""
        segments = _written_since(self._segments, since_ms)
        log = (
            session.read.format("outbox_broker_log")
            .option("log", "messages")
            .option("columns", "topic,sequence,headers")
            .option("pushdown", "true")
            .option("segments", msgspec.json.encode(segments).decode())
            .load()
        )
        named = log.where(log["topic"].isin(sorted(topics)))
        return named.where("sequence is not null").select("topic", "sequence", "headers")


def evaluate(batches: Iterator[pa.RecordBatch], *, texts: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Maps batches of (topic, consumer_group, sequence, filter_number, headers) to batches of _ANSWER_SCHEMA.

    `texts`: the filters by number. Runs in Spark's workers.
    """
    import pyarrow as pa

    predicates: dict[int, Predicate | None] = {}
    names = [*_DELIVERY, "wanted"]
    for batch in batches:
        numbered_headers = zip(
            batch.column("filter_number").to_pylist(), batch.column("headers").to_pylist(), strict=True
        )
        answers = [_answer(filter_number, headers, texts, predicates) for filter_number, headers in numbered_headers]
        columns = [batch.column(name) for name in _DELIVERY]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(answers, pa.int64())], names=names)


def _answer(
    filter_number: int, headers: bytes | None, texts: Sequence[str], predicates: dict[int, Predicate | None]
) -> int:  # fmt: skip
    if filter_number not in predicates:
        predicates[filter_number] = _predicate(texts[filter_number])
    predicate = predicates[filter_number]
    if predicate is None or headers is None:
        return int(FilterAnswer.NOT_KNOWN)
    try:
        return int(FilterAnswer.YES if predicate(_decode_headers(headers)) else FilterAnswer.NO)
    except DECODE_ERRORS:
        return int(FilterAnswer.NOT_KNOWN)


def _predicate(text: str) -> Predicate | None:
    """Compiles a filter like the broker; None if this version cannot read it."""
    # Only runs with filters need the parser.
    from outbox_broker.filter import compile_condition, parse

    try:
        return compile_condition(parse(text))
    except FilterError:
        return None


_decode_headers: Final = msgspec.msgpack.Decoder(dict[str, str]).decode


def _filters(groups: Sequence[GroupFacts], texts: Sequence[str]) -> list[tuple[str, str, int, int]]:
    numbers: Mapping[str, int] = {text: filter_number for filter_number, text in enumerate(texts)}
    return [
        (facts.topic, facts.consumer_group, numbers.get(facts.filter, _TAKES_ALL), facts.filter_since_ms)
        for facts in groups
    ]


def _written_since(segments: Sequence[LogSegment], since_ms: int) -> list[LogSegment]:
    """Returns segments that may have records written since then: each ends where the next begins."""
    ended = {
        segment.path for segment, following in pairwise(segments) if following.created_at_ms + STEP_BACK_MS < since_ms
    }
    return [segment for segment in segments if segment.path not in ended]
