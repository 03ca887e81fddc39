"""Reads every input once, in causal order: consumer, broker, outbox, business, so that no moving message is a phantom.

Spark caches each input for the run; rows are counted as they are read. Classifies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spark_reconcile.core.dataframes import gathered, in_parallel, listed, union
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.plausible_times import LATEST_MS, InputCount, PlausibleTimes
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.evidence.delivery_evidence import GroupFacts, group_facts
from spark_reconcile.evidence.filter_evaluation import FilterEvaluation
from spark_reconcile.evidence.message_evidence import with_answers
from spark_reconcile.load.completeness_bound import NEVER_MS, Reach, archive_reach, inbox_reaches
from spark_reconcile.load.delay_records import DelayExport, read_configured, with_delayed
from spark_reconcile.load.ledger_exports import refresh_broker_export
from spark_reconcile.load.lost_log_ends import UNSYNCED_MS, LogEnd, log_end, refuse_lost_end
from spark_reconcile.load.read_plan import Read, SourcePlan, waves
from spark_reconcile.load.spark_session import one_partition
from spark_reconcile.sources.broker_logs import (
    ASIDE,
    RUN_SCHEMA,
    SCHEMAS,
    LogSegment,
    Row,
    begins_whole,
    named_runs,
    reach_ms,
    single,
    survey,
    under_former_ids,
)
from spark_reconcile.sources.messages_aside import PLACED_KINDS, asides_of, first_places
from spark_reconcile.sources.parquet_archives import MISREAD, read_archive, refuse_misread
from spark_reconcile.sources.parquet_file_identity import Files, some_files
from spark_reconcile.sources.segment_cache import keep, split, sweep
from spark_reconcile.sources.sql_statements import INPUT_SCHEMA, UNKNOWN_KIND, InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEGMENTS: Final = "segments"
"""Subfolder of the output folder that caches sealed segments of the broker's logs."""
_DAMAGE: Final = "!"


@dataclass(frozen=True, slots=True)
class LogRows:
    """A log's records; the frames that Spark has cached; and the part that is read from files, if any."""

    frame: DataFrame
    copies: Sequence[DataFrame]
    files: Files | None = None


@dataclass(slots=True)
class Evidence:
    """All inputs, their facts, and since when each is complete (milliseconds; 0: since the beginning)."""

    inboxes: DataFrame
    messages: DataFrame
    actions: DataFrame
    rows: DataFrame
    tables: Sequence[DataFrame]
    groups: Sequence[GroupFacts]
    counts: list[InputCount]
    archive_reach_ms: int
    broker_reach_ms: int
    actions_reach_ms: int
    business_reaches: Mapping[str, int] = field(default_factory=dict)
    reach: Reach = field(default_factory=Reach)
    """Until when each source is complete."""
    surveyed: Mapping[str, list[LogSegment]] = field(default_factory=dict)
    """The segments of the broker's logs at the time they were read."""
    files: Sequence[Files] = ()
    """Inputs, or parts of them, that are stored in files."""
    torn: Mapping[str, str] = field(default_factory=dict)
    """Torn tails or missing ends of the "message log" and of the "action log", in a sentence each."""
    ends: Mapping[str, LogEnd] = field(default_factory=dict)
    """The ends of the broker's logs."""
    latest_ms: int = LATEST_MS
    """Later times are impossible, not those of new rows."""
    loose: tuple[DataFrame | None, DataFrame | None] | None = None
    """The rows of `rows` and of `messages` that are in none of `files`; None: all of them."""
    filters: FilterEvaluation = field(default_factory=FilterEvaluation)
    delay: DelayExport | None = None
    """What was read of the delay cluster, if there is one."""
    is_few: bool = False
    """Whether there are so few rows, of all sources, that sets of them become literals of query plans."""

    @property
    def cancels_reach_ms(self) -> int:
        """Since when every cancel is known."""
        return max(self.actions_reach_ms, 0 if self.delay is None else self.delay.cancels_since_ms)

    @property
    def asides(self) -> DataFrame | None:
        """The actions of kind ASIDE; None: without looking, there are none."""
        segments = self.surveyed.get("messages", ())
        return self.actions.where(f"kind = '{ASIDE}'") if may_have_asides(self.counts, segments) else None

    @property
    def known_topics(self) -> list[str]:
        """Topics to which this outbox has published, by its remaining rows."""
        return sorted(
            {count.topic for count in self.counts if count.input_kind in {InputKind.OUTBOX, InputKind.ARCHIVE}}
        )

    @property
    def broker_seen_ms(self) -> int:
        """The time of the broker's newest record."""
        return max((count.last_ms for count in self.counts if count.input_kind in {"messages", "actions"}), default=0)

    @property
    def row_count(self) -> int:
        """How many rows were read, of all sources."""
        return sum(count.rows for count in self.counts)

    def release(self) -> None:
        """Release the frames that Spark has cached."""
        for frame in (self.inboxes, self.messages, self.actions, *self.tables):
            frame.unpersist()


def read_all(
    session: SparkSession, settings: Settings, plan: SourcePlan, *, now_ms: int, say: Callable[[str], None],
    span: Span | None = None,
) -> Evidence:  # fmt: skip
    """Read every input; from Parquet archives only rows in `span`. Raises NotComparable for a damaged broker log."""
    counts: list[InputCount] = []
    skew_ms = settings.grace.clock_skew_ms
    times = PlausibleTimes.at(max(now_ms, time.time_ns() // 1_000_000), clocks=plan.clocks, skew_ms=skew_ms)
    say("reading the inboxes")
    effects = _read_sql(session, plan.inboxes, counts, times)
    delayed = read_configured(session, settings, say)
    say("reading the broker's logs, the outbox and the business rows")
    surveyed, messages, actions, tables, ends, placed = _read_rest(session, settings, plan, counts, times, now_ms)
    counts += _counted_places(placed)
    archives = _read_archives(session, settings, counts, span, times)
    total = sum(count.rows for count in counts) + (0 if delayed is None else delayed.rows)
    is_few = total <= settings.limits.one_partition_rows_max
    few = partial(gathered, rows=total, rows_max=settings.limits.one_partition_rows_max)
    with one_partition(session, is_few=is_few):
        runs = few(union(actions.frame, listed(session, placed, RUN_SCHEMA)) if placed else actions.frame)
        named, asides = _on_messages(runs, few(messages.frame), surveyed, counts, is_few=is_few)
        rows = few(united(session, [*tables, *(frame for frame, _ in archives)]))
        stored, acted = map(few, with_delayed(messages.frame, union(single(runs), named, *asides), delayed))
        copies = [*messages.copies, *([] if delayed is None else [delayed.messages])]
        return Evidence(
            inboxes=few(effects_of(united(session, effects), acted, counts)),
            messages=stored,
            actions=few(with_answers(acted, rows, stored, counts)),
            rows=rows,
            tables=(*effects, *tables, *copies, *actions.copies, named),
            groups=_groups(
                settings, runs, counts, plan, is_whole=begins_whole(surveyed["actions"]), is_all=span is None,
                now_ms=now_ms,
            ),
            counts=counts,
            archive_reach_ms=archive_reach(settings, counts, plan.oldest_ms, now_ms=now_ms),
            broker_reach_ms=_log_reach(surveyed["messages"], skew_ms=skew_ms),
            actions_reach_ms=_log_reach(surveyed["actions"], skew_ms=skew_ms),
            business_reaches=_business_reaches(settings),
            reach=plan.reach, surveyed=surveyed, ends=ends,
            torn={f"{log.removesuffix('s')} log": end.torn for log, end in ends.items()},
            latest_ms=times.latest_ms,
            files=[*(files for _, files in archives), *([messages.files] if messages.files else [])],
            loose=(few(united(session, tables)), few(union(*copies)) if copies else None),
            filters=FilterEvaluation(surveyed["messages"]),
            delay=None if delayed is None else delayed.export,
            is_few=is_few,
        )  # fmt: skip


def _read_rest(
    session: SparkSession, settings: Settings, plan: SourcePlan, counts: list[InputCount], times: PlausibleTimes,
    now_ms: int,
) -> tuple[dict[str, list[LogSegment]], LogRows, LogRows, list[DataFrame], dict[str, LogEnd], list[Row]]:  # fmt: skip
    """Returns the broker's segments, its messages and actions, the tables, where the logs end, and the places of
    messages that the actions left do not have.
    """
    refresh_broker_export(settings)
    # Actions first: each message that they name is in the message log when that is surveyed.
    surveyed = {log: survey(settings.broker_data, log) for log in ("actions", "messages")}
    # The survey fixes the extent of the broker's logs: the tables may be read while its logs are.
    messages, actions, tables, ends, placed = in_parallel(
        lambda: _read_kept(session, settings, "messages", surveyed["messages"], counts, times),
        lambda: _read_kept(session, settings, "actions", surveyed["actions"], counts, times),
        lambda: _read_sql(session, plan.rest, counts, times),
        lambda: {log: log_end(segments, settled_ms=now_ms - UNSYNCED_MS) for log, segments in surveyed.items()},
        lambda: [] if begins_whole(surveyed["messages"]) else first_places(surveyed["actions"]),
    )
    refuse_lost_end(
        counts, surveyed["messages"], torn=ends["messages"].torn,
        again=lambda: _messages_since(session, settings, surveyed["messages"][-1]),
    )  # fmt: skip
    return surveyed, messages, actions, tables, ends, placed


def _counted_places(placed: Sequence[Row]) -> list[InputCount]:
    """Returns the groups of such places as groups with an action at the log's beginning, and without a row of it."""
    return [
        InputCount(input_kind="actions", topic=topic, note=f"{kind} {group}", rows=0, first_ms=at_ms, last_ms=at_ms)
        for kind, topic, group, at_ms in sorted({(row[0], row[1], row[2], row[6]) for row in placed})
    ]


def _on_messages(
    runs: DataFrame, messages: DataFrame, surveyed: Mapping[str, list[LogSegment]], counts: Sequence[InputCount], *,
    is_few: bool,
) -> tuple[DataFrame, list[DataFrame]]:  # fmt: skip
    """Returns the actions on runs of messages, one for each, cached; and those of kind ASIDE, if there may be any."""
    segments = surveyed["messages"]
    asides = asides_of(runs, messages, segments, is_few=is_few) if may_have_asides(counts, segments) else None
    is_whole = all(map(begins_whole, surveyed.values()))
    named = named_runs(runs, messages, is_whole=is_whole, asides=asides).persist()
    return named, [] if asides is None else [asides]


def _messages_since(session: SparkSession, settings: Settings, segment: LogSegment) -> list[InputCount]:
    """Count the message log again, from this segment on."""
    refresh_broker_export(settings)
    now = [
        current for current in survey(settings.broker_data, "messages") if current.first_offset >= segment.first_offset
    ]
    counts: list[InputCount] = []
    for copy in read_log(session, "messages", now, counts).copies:
        copy.unpersist()
    return counts


def _read_sql(
    session: SparkSession, reads: Sequence[Read], counts: list[InputCount], times: PlausibleTimes
) -> list[DataFrame]:
    """Read wave after wave; the databases of a wave are read concurrently, each by a worker of its own.

    Each frame is cached separately: Spark flattens a union of unions, and would not recognize a cached one.
    """
    frames = []
    for wave in waves(reads):
        kept = [sql_frame(session, read).persist() for read in wave]
        counts += _counted(
            united(session, kept),
            input_kind="input_kind", topic="coalesce(topic, '')", note="coalesce(consumer_group, note, '')",
            times=times.of_table(),
        )  # fmt: skip
        frames += kept
    unknown = [count for count in counts if count.topic == UNKNOWN_KIND]
    if unknown:
        raise NotComparable(
            f"{unknown[0].rows:,} rows of the {unknown[0].input_kind} have a kind that is neither publish nor cancel, "
            "so nothing is judged: another version wrote them; run that version's outbox reconcile, or remove them"
        )
    return frames


def sql_frame(session: SparkSession, read: Read) -> DataFrame:
    """Returns the rows of a read; lazy."""
    return (
        session.read.format("outbox_sql")
        .option("url", read.url)
        .option("statements", msgspec.json.encode(read.statements).decode())
        .option("snapshot", str(read.snapshot).lower())
        .load()
    )


def _read_archives(
    session: SparkSession, settings: Settings, counts: list[InputCount], span: Span | None, times: PlausibleTimes
) -> list[tuple[DataFrame, Files]]:
    """Returns archive rows that were moved to Parquet, in the columns of all inputs; files are not cached by Spark."""
    archives = []
    for folder in settings.archives:
        archive = read_archive(session, folder, span=span, latest_ms=times.latest_ms)
        counted = _counted(
            archive.frame, input_kind="input_kind", topic="topic", note="coalesce(note, '')", times=times.of_table()
        )  # fmt: skip
        misread: dict[str, int] = {}
        for count in counted:
            if count.input_kind == MISREAD:
                misread[count.topic] = misread.get(count.topic, 0) + count.rows
        refuse_misread(archive, misread, rows=sum(count.rows for count in counted), is_whole=span is None)
        counts += counted
        archives.append((archive.understood, archive.files))
    return archives


def effects_of(rows: DataFrame, actions: DataFrame, counts: Sequence[InputCount]) -> DataFrame:
    """Returns the inboxes' rows, with the effects of edited messages under their former ids."""
    return under_former_ids(rows, actions) if has_places(counts) else rows


def has_places(counts: Sequence[InputCount]) -> bool:
    """Whether a group had a message aside from its topic, as it was edited or moved: else nothing of it is computed."""
    return any(count.input_kind == "actions" and count.note.partition(" ")[0] in PLACED_KINDS for count in counts)


def may_have_asides(counts: Sequence[InputCount], segments: Sequence[LogSegment]) -> bool:
    """Whether such a message may be in the message log no more but for its frames aside: nothing is, of a whole log."""
    return bool(segments) and not begins_whole(segments) and has_places(counts)


def united(session: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    """Returns the union of frames of inputs."""
    return union(*frames) if frames else listed(session, [], INPUT_SCHEMA)


def _read_kept(
    session: SparkSession, settings: Settings, log: str, segments: list[LogSegment], counts: list[InputCount],
    times: PlausibleTimes,
) -> LogRows:  # fmt: skip
    """Read a log by the cache of the output folder."""
    kept, bytes_min = settings.output / SEGMENTS / log, settings.limits.kept_segment_bytes_min
    return read_log(session, log, segments, counts, kept=kept, kept_bytes_min=bytes_min, times=times)


def read_log(
    session: SparkSession, log: str, segments: list[LogSegment], counts: list[InputCount], *, kept: Path | None = None,
    kept_bytes_min: int = 0, times: PlausibleTimes | None = None,
) -> LogRows:  # fmt: skip
    """Read a log's records, and count them. Sealed segments are read from the cache folder `kept`; new ones of at least
    `kept_bytes_min` are added.

    Spark caches records that are read in place. Raises NotComparable if the log is damaged.
    """
    files, fresh, others = split(kept, segments, bytes_min=kept_bytes_min) if kept else ([], [], segments)
    read = [log_frame(session, log, some).persist() for some in (fresh, others) if some]
    parquet = [session.read.schema(SCHEMAS[log]).parquet(*map(str, files))] if files else []
    frame = union(*read, *parquet)
    note = "''" if log == "messages" else "concat(kind, ' ', consumer_group)"
    rows = "1" if log == "messages" else "coalesce(messages, 1L)"
    sequence_sql = "sequence" if log == "messages" else "sequence + coalesce(messages, 1L) - 1"
    log_counts = _counted(
        frame, input_kind=f"'{log}'", topic="coalesce(damage, topic, '')",
        note=f"if(damage is null, coalesce({note}, ''), '{_DAMAGE}')", rows=rows,
        sequence=sequence_sql, times=(times or PlausibleTimes()).of_log(log, rows=rows),
    )  # fmt: skip
    damaged = sorted(count.topic for count in log_counts if count.note == _DAMAGE)
    if damaged:
        raise NotComparable(
            f"the broker's log is damaged, so nothing is judged: {'; '.join(damaged[:3])}. "
            "Restore the segment from a copy"
        )
    counts += log_counts
    if kept is not None and fresh:
        keep(read[0], kept, fresh)
    if kept is not None:
        sweep(kept, segments)
    if not (files and kept):
        return LogRows(frame, read)
    names = parquet[0].inputFiles()
    return LogRows(frame, read, Files(input_kind=log, names=names, read=some_files(session, kept, parquet[0])))


def log_frame(session: SparkSession, log: str, segments: Sequence[LogSegment]) -> DataFrame:
    """Returns the records of segments, one partition a segment; lazy."""
    return (
        session.read.format("outbox_broker_log")
        .option("log", log)
        .option("segments", msgspec.json.encode(list(segments)).decode())
        .load()
    )


def _counted(
    frame: DataFrame, *, input_kind: str, topic: str, note: str, times: Mapping[str, str], rows: str = "1",
    sequence: str = "-1L",
) -> list[InputCount]:  # fmt: skip
    """Fill Spark's cache of the input, and count its rows. `times`: aggregates, by the names of InputCount's fields."""
    from pyspark.sql.functions import expr

    grouped = frame.groupBy(
        expr(input_kind).alias("input_kind"), expr(topic).alias("topic"), expr(note).alias("note")
    ).agg(
        expr(f"sum({rows})").alias("rows"),
        *(expr(value).alias(name) for name, value in times.items()),
        expr(f"coalesce(max({sequence}), -1L)").alias("last_sequence"),
    )
    return [InputCount(**row.asDict()) for row in grouped.collect()]


def _groups(
    settings: Settings, actions: DataFrame, counts: list[InputCount], plan: SourcePlan, *, is_whole: bool, is_all: bool,
    now_ms: int,
) -> list[GroupFacts]:  # fmt: skip
    """`is_whole`: nothing of the action log was dropped. `is_all`: rows of all times were read."""
    events: list[tuple[Any, ...]] = [
        tuple(row)
        for row in actions.where("kind in ('declared', 'deleted', 'sought', 'paused', 'resumed')")
        .select("kind", "topic", "consumer_group", "sequence", "position", "at_ms", "reason")
        .collect()
    ]
    inboxes = inbox_reaches(settings, counts, plan.inbox_oldest_ms, now_ms=now_ms, is_whole=is_all)
    return group_facts(events, inboxes=inboxes, until=plan.reach.inboxes, acting={} if is_whole else _acting(counts))


def _acting(counts: Sequence[InputCount]) -> dict[tuple[str, str], int]:
    """Since when each topic's groups have deliveries and settlements; never for groups that only an inbox names.

    The broker drops old actions, including declarations, since its checkpoint has the groups.
    """
    acting_since: dict[tuple[str, str], int] = {}
    for count in counts:
        kind, _, acting = count.note.partition(" ")
        group, since_ms = (count.note, NEVER_MS) if count.input_kind == InputKind.INBOX else (acting, count.first_ms)
        if group and count.input_kind in {"actions", InputKind.INBOX} and kind != "declared":
            acting_since[count.topic, group] = min(since_ms, acting_since.get((count.topic, group), NEVER_MS))
    return acting_since


def _business_reaches(settings: Settings) -> dict[str, int]:
    """Since when each covered topic's business rows are complete: since the beginning, unless configured; and then by
    every clock, since a message may be dated a moment later than its row.
    """
    reaches: dict[str, int] = {}
    for rule in settings.rules:
        since_ms = 0 if rule.complete_since_ms is None else rule.complete_since_ms + settings.grace.clock_skew_ms
        reaches[rule.topic] = max(since_ms, reaches.get(rule.topic, 0))
    return reaches


def _log_reach(segments: list[LogSegment], *, skew_ms: int) -> int:
    reach = reach_ms(segments)
    return reach + skew_ms if reach else 0
