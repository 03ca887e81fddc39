"""Detects evidence that a source had in an earlier run and lost since, without a purge or deletion that explains it;
and evidence that a first run must expect, since the broker has the other half of it.

Compares sources as a whole: "no row in this time range" is not "no row". What the sources had when a run last read them
is in totals.json of the output folder. Decision 88 says what is proven, and what cannot be known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from outbox_core.protocol.decoder_cache import json_decoder
from spark_reconcile.core.dataframes import among, grouped, union
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.synced_files import write_whole
from spark_reconcile.core.time_arguments import utc_text
from spark_reconcile.load.completeness_bound import kept_since
from spark_reconcile.load.ledger_exports import refresh_broker_export
from spark_reconcile.load.lost_log_ends import UNSYNCED_MS, log_end
from spark_reconcile.load.name_checks import KnownGroups, check_names, known_groups
from spark_reconcile.load.read_plan import TableExtent
from spark_reconcile.load.source_reader import Evidence, log_frame
from spark_reconcile.results.run_figures import inputs
from spark_reconcile.sources.broker_logs import DELIVERY_KINDS, begins_whole, named_runs, survey
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_reconcile.load.read_plan import SourcePlan


LOGS: Final = {"messages": "message log", "actions": "action log"}
NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LostEvidence:
    """A source or group with missing evidence: what it had, and how to restore it."""

    name: str
    had: str
    cure: str


def check_evidence(
    evidence: Evidence, settings: Settings, plan: SourcePlan, *, now_ms: int, is_whole: bool
) -> list[str]:
    """Refuse to evaluate if the action log lost its end, evidence of earlier runs is missing, or the settings name a
    group unknown to the broker. Unproven losses are noted with the evidence. Returns a sentence for each source that
    an earlier run saw to reach further, which retention may explain, or to have more rows: for the headline.
    `is_whole`: rows of all times were read.

    Raises NotComparable; ConfigurationError if a name is wrong, or if a source in `settings.accept_missing` misses
    nothing.
    """
    note = refuse_lost_actions(evidence, settings, now_ms=now_ms)
    if note:
        torn = evidence.torn.get("action log", "")
        evidence.torn = {**evidence.torn, "action log": "; ".join(filter(None, (torn, note)))}
    broker_groups = _known(evidence)
    before = read_totals(settings.output)
    missing = find_missing(before, evidence, settings, plan, known=broker_groups, now_ms=now_ms)
    accepted = set(settings.accept_missing)
    needless = sorted(accepted - {lost.name for lost in missing})
    if needless:
        raise ConfigurationError(
            f"--accept-missing {needless[0]!r}: nothing of that is missing, so leave it out; it is not for every run"
        )
    refused = [lost for lost in missing if lost.name not in accepted]
    if refused:
        named = "; ".join(f"{lost.name}: {lost.had}. {lost.cure}" for lost in refused[:NAMED_MAX])
        more = f"; and {len(refused) - NAMED_MAX:,} more" if len(refused) > NAMED_MAX else ""
        options = " ".join(f"--accept-missing {lost.name!r}" for lost in refused[:NAMED_MAX])
        raise NotComparable(
            f"evidence is missing, so nothing is judged: {named}{more}. Where that was done on "
            f"purpose, run it once with {options}, or move {settings.output / TOTALS_FILE} away to forget all of it"
        )
    logs = {log: sum(count.rows for count in evidence.counts if count.input_kind == log) for log in LOGS}
    check_names(settings, broker_groups, plan.extents, rows=logs)
    sentences = shortened(before, evidence, settings, plan.extents)
    return [*sentences, *_fewer(before, evidence, settings, plan.extents)] if is_whole else sentences


def keep_totals(evidence: Evidence, settings: Settings, plan: SourcePlan, *, now_ms: int, is_whole: bool) -> None:
    """Store the totals of the sources for later runs; call after the results are published. Raises OSError."""
    before, broker_groups = read_totals(settings.output), _known(evidence)
    read_inputs = {
        (input_extent.source, input_extent.what): input_extent for input_extent in inputs(evidence, settings)
    }
    sources = dict(before.sources)
    for extent in plan.extents:
        read, noted = read_inputs[_kind(extent)], sources.get(extent.name)
        sources[extent.name] = SourceTotals(
            rows=read.rows, first_ms=extent.first_ms or 0, last_ms=extent.last_ms or 0,
            complete_since_ms=read.complete_since_ms, noted_at_ms=now_ms,
            whole_rows=read.rows if is_whole else noted.whole_rows if noted is not None else 0,
        )  # fmt: skip
    for log, log_title in LOGS.items():
        read, name = read_inputs["broker", log_title], _log_name(log, settings)
        noted = before.sources.get(name)
        end = evidence.ends[log]
        kept_end = noted.end_offset if noted is not None and noted.end_offset <= end.offset else 0
        sources[name] = SourceTotals(
            rows=read.rows, first_ms=read.first_ms, last_ms=max(read.last_ms, end.last_ms),
            complete_since_ms=read.complete_since_ms, noted_at_ms=now_ms,
            end_offset=max(kept_end, end.settled_offset),
        )  # fmt: skip
    folder = _folder(settings)
    # If the set of groups is not known, those of earlier runs are still expected.
    earlier = before.groups.get(folder, BrokerGroups(pairs=[], noted_at_ms=0)).pairs
    pairs = (
        broker_groups.live if broker_groups.is_complete else broker_groups.live.union(earlier) - broker_groups.deleted
    )
    groups = {**before.groups, folder: BrokerGroups(pairs=sorted(pairs)[:GROUPS_MAX], noted_at_ms=now_ms)}
    write_totals(settings.output, KeptTotals(sources=sources, groups=groups))


def find_missing(
    before: KeptTotals, evidence: Evidence, settings: Settings, plan: SourcePlan, *, known: KnownGroups, now_ms: int
) -> list[LostEvidence]:
    """Returns what is missing compared to the totals of earlier runs, for sources that are in the settings."""
    return [
        *_tables(before, settings, plan.extents, now_ms=now_ms),
        *_never_there(before, evidence, settings, plan.extents, now_ms=now_ms),
        *_logs(before, settings, evidence),
        *_groups(before, settings, evidence, known=known),
    ]


def is_gone(before: SourceTotals, now: TableExtent, *, since_ms: int | None) -> bool:
    """Whether a table lost rows that no purge deletes.

    `since_ms`: rows from then on are kept, by the settings; None: no setting. Then a table that lost all rows is
    missing, and one that lost some of them may have been purged.
    """
    if not before.last_ms:
        return False
    if since_ms is None:
        return now.first_ms is None
    if before.first_ms >= since_ms:
        return now.first_ms is None or now.first_ms > before.first_ms
    # Of the rows in between only the last one is known.
    return before.last_ms >= since_ms and (now.first_ms is None or now.first_ms > before.last_ms)


def shortened(before: KeptTotals, evidence: Evidence, settings: Settings, extents: Sequence[TableExtent]) -> list[str]:
    """Returns a sentence for each source that begins later, or ends earlier, than an earlier run saw it."""
    sentences = []
    for extent in extents:
        noted = before.sources.get(extent.name)
        if noted is None or extent.first_ms is None or extent.last_ms is None or not noted.first_ms:
            continue
        is_kept = _kept(settings, extent, now_ms=0)[0] is not None
        if extent.first_ms > noted.first_ms and not is_kept:
            sentences.append(_moved(extent.name, "begins at", noted, noted.first_ms, extent.first_ms))
        if extent.last_ms < noted.last_ms:
            sentences.append(_moved(extent.name, "ends at", noted, noted.last_ms, extent.last_ms))
    for log in LOGS:
        name, segments = _log_name(log, settings), evidence.surveyed[log]
        noted = before.sources.get(name)
        begins_ms = 0 if begins_whole(segments) else segments[0].created_at_ms
        # The reach of a log that was dropped in part is later than its first segment, by the skew.
        if noted is not None and begins_ms > (noted.complete_since_ms or 0):
            sentences.append(_moved(name, "begins at", noted, noted.first_ms, begins_ms))
    return sentences


def _fewer(before: KeptTotals, evidence: Evidence, settings: Settings, extents: Sequence[TableExtent]) -> Iterator[str]:
    """Tables of a kind that have fewer rows than an earlier run over all times read, though they all begin where they
    did: a purge takes the oldest rows, so these were taken from the middle.
    """
    rows_by_input = {
        (input_extent.source, input_extent.what): input_extent.rows for input_extent in inputs(evidence, settings)
    }
    for kind in dict.fromkeys(map(_kind, extents)):
        pairs = [(extent, before.sources.get(extent.name)) for extent in extents if _kind(extent) == kind]
        noted_pairs = [
            (extent, noted) for extent, noted in pairs if noted is not None and extent.first_ms == noted.first_ms
        ]
        rows = max((noted.whole_rows for _, noted in noted_pairs), default=0)
        if len(noted_pairs) == len(pairs) and rows_by_input[kind] < rows:
            extent, noted = noted_pairs[0]
            yield (
                f"The {extent.name} begins where it did, and has {rows_by_input[kind]:,} rows, where a run at "
                f"{utc_text(noted.noted_at_ms)} saw {rows:,}"
            )


def _kind(extent: TableExtent) -> tuple[str, str]:
    """Returns the source and the name under which a table is listed among the inputs."""
    return "inbox" if extent.input_kind is InputKind.INBOX else "archive", extent.what or "sent messages"


def _moved(name: str, verb: str, noted: SourceTotals, before_ms: int, now_ms: int) -> str:
    return (
        f"The {name} {verb} {utc_text(now_ms)}, where a run at {utc_text(noted.noted_at_ms)} saw it reach to "
        f"{utc_text(before_ms)}"
    )


def _never_there(
    before: KeptTotals, evidence: Evidence, settings: Settings, extents: Sequence[TableExtent], *, now_ms: int
) -> Iterator[LostEvidence]:
    """Empty tables that no run has noted, while the broker has what goes with their rows."""
    old_ms = now_ms - settings.grace.ms
    archives = [extent for extent in extents if extent.input_kind is InputKind.ARCHIVE]
    has_archive = settings.archive and not settings.archives and all(extent.is_empty for extent in archives)
    topics = {*evidence.known_topics, *(rule.topic for rule in settings.rules)}
    for extent in extents:
        if not extent.is_empty or extent.name in before.sources:
            continue
        since_ms, _ = _kept(settings, extent, now_ms=now_ms)
        if extent.input_kind is InputKind.INBOX:
            noted = [
                count
                for count in evidence.counts
                if count.input_kind == "actions" and count.note == f"acked {extent.what}"
            ]
            witness, cure = "acknowledgements of this group", "name the inbox that its consumers write, or leave it out"
        else:
            noted = [
                count
                for count in evidence.counts
                if count.input_kind == "messages" and count.topic in topics and has_archive
            ]
            witness, cure = "messages on topics of this outbox", "say archive = false in [database] if it is off"
        # Newer ones came after the table was read; of older ones than are kept, the rows are purged.
        noted = [count for count in noted if 0 < count.first_ms < old_ms and count.last_ms >= (since_ms or 0)]
        if noted:
            yield LostEvidence(
                name=extent.name,
                had=f"it is empty, while the broker has {sum(count.rows for count in noted):,} {witness}",
                cure=f"Restore it from a copy, or {cure}",
            )  # fmt: skip


def _tables(
    before: KeptTotals, settings: Settings, extents: Sequence[TableExtent], *, now_ms: int
) -> Iterator[LostEvidence]:
    for extent in extents:
        noted = before.sources.get(extent.name)
        # Rows of an archive may have been moved to Parquet files.
        if noted is None or (extent.input_kind is InputKind.ARCHIVE and settings.archives):
            continue
        since_ms, option = _kept(settings, extent, now_ms=now_ms)
        if is_gone(noted, extent, since_ms=since_ms):
            now = "it is empty" if extent.first_ms is None else f"its rows begin at {utc_text(extent.first_ms)}"
            yield LostEvidence(
                name=extent.name,
                had=f"it had rows from {utc_text(noted.first_ms)} to {utc_text(noted.last_ms)} when a run read it at "
                f"{utc_text(noted.noted_at_ms)}, and now {now}",
                cure=f"Restore it from a copy, or let {option} in the settings say for how long its rows are kept",
            )


def _kept(settings: Settings, extent: TableExtent, *, now_ms: int) -> tuple[int | None, str]:
    """Returns since when a table's rows are kept, by the settings, and the key of the setting."""
    if extent.input_kind is InputKind.ARCHIVE:
        return kept_since(settings.complete_since_ms, settings.archive_days, now_ms=now_ms), "archive_days"
    since_settings = [inbox.complete_since_ms for inbox in settings.inboxes if inbox.group == extent.what]
    since = [kept_since(complete_since_ms, settings.inbox_days, now_ms=now_ms) for complete_since_ms in since_settings]
    known_since = [since_ms for since_ms in since if since_ms is not None]
    return max(known_since) if len(known_since) == len(since) else None, "inbox_days"


def _logs(before: KeptTotals, settings: Settings, evidence: Evidence) -> Iterator[LostEvidence]:
    for log in LOGS:
        name, end = _log_name(log, settings), evidence.ends[log].offset
        noted = before.sources.get(name)
        if noted is not None and end < noted.end_offset:
            yield LostEvidence(
                name=name,
                had=f"it went on to byte {noted.end_offset:,}, up to {utc_text(noted.last_ms)}, when a run read it at "
                f"{utc_text(noted.noted_at_ms)}, and now ends at byte {end:,}",
                cure="Restore the log's newest segments from a copy",
            )


def _groups(
    before: KeptTotals, settings: Settings, evidence: Evidence, *, known: KnownGroups
) -> Iterator[LostEvidence]:
    folder = _folder(settings)
    noted = before.groups.get(folder)
    segments = evidence.surveyed["actions"]
    # A later deletion is in the log, unless that part of the log was dropped, too.
    is_recorded = begins_whole(segments) or (noted is not None and segments[0].created_at_ms <= noted.noted_at_ms)
    if noted is None or not known.is_complete or not is_recorded:
        return
    for topic, group in sorted(set(noted.pairs) - known.pairs):
        yield LostEvidence(
            name=f"group {topic}/{group} in {folder}",
            had=f"the action log knew it when a run read it at {utc_text(noted.noted_at_ms)}, and now has no action of "
            "it, nor its deletion",
            cure="Restore the action log from a copy",
        )


def _known(evidence: Evidence) -> KnownGroups:
    return known_groups(evidence.counts, evidence.groups, evidence.surveyed["actions"])


def _log_name(log: str, settings: Settings) -> str:
    return f"{LOGS[log]} in {_folder(settings)}"


def _folder(settings: Settings) -> str:
    return str(settings.broker_data.resolve())


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedEffects:
    """Effects of one group on messages of one topic without a delivery in the action log."""

    topic: str
    group: str
    effects: int
    first_ms: int
    last_ms: int

    def __str__(self) -> str:
        span = f"from {utc_text(self.first_ms)} to {utc_text(self.last_ms)}"
        effects = f"{self.effects:,} effect{'' if self.effects == 1 else 's'}"
        return f"the inbox of {self.group} has {effects} of messages of {self.topic} {span}"


def refuse_lost_actions(evidence: Evidence, settings: Settings, *, now_ms: int) -> str:
    """Raises NotComparable if inboxes prove that the action log lost actions: effects without their deliveries.

    The broker appends a delivery to its action log before it answers the pull, and inboxes are read before the logs. So
    the delivery of every effect is in the log, with one exception: deliveries are synced only with the next settlement,
    and a power cut may lose the last ones. A broker that starts after that appends an action (Opened) that is newer
    than all of these effects, and they prove nothing then.

    Returns a sentence if effects lack their deliveries without proof of a loss; empty if none do.
    """
    skew_ms = settings.grace.clock_skew_ms
    last_ms = max(evidence.ends["actions"].last_ms, _last_ms(evidence.counts, "actions"))
    if _last_ms(evidence.counts, InputKind.INBOX) <= last_ms + skew_ms:
        return ""
    last = evidence.surveyed["actions"][-1]
    # The broker may be running: actions appended since the log was read count, too.
    refresh_broker_export(settings)
    now = [segment for segment in survey(settings.broker_data, "actions") if segment.first_offset >= last.first_offset]
    since = log_frame(evidence.messages.sparkSession, "actions", now)
    last_ms = max(last_ms, log_end(now).last_ms)
    actions = union(evidence.actions, named_runs(since, evidence.messages, is_whole=False))
    unrecorded = _without_delivery(evidence.inboxes.where(f"at_ms > {last_ms + skew_ms}L"), evidence.messages, actions)
    if not unrecorded:
        return ""
    named = _named(unrecorded, last_ms=last_ms)
    if not is_proven(unrecorded, now_ms=now_ms, skew_ms=skew_ms):
        return f"{named}: they are new, and the next run looks for them again"
    raise NotComparable(
        f"the end of the broker's action log is missing, so nothing is judged: {named}. Restore {last.path} from a "
        "copy; where its machine lost power, start the broker, which hands these messages out again; else name the "
        "folder of the broker that these groups consume from"
    )


def is_proven(effects: Sequence[UnrecordedEffects], *, now_ms: int, skew_ms: int) -> bool:
    """Whether the first of these effects is so old that its delivery must be visible to every reader of the log.

    Appended bytes are visible at once on the broker's machine; on others, when their file system revalidates the file.
    """
    return now_ms - min(group_effects.first_ms for group_effects in effects) > UNSYNCED_MS + skew_ms


def _without_delivery(effects: DataFrame, messages: DataFrame, actions: DataFrame) -> list[UnrecordedEffects]:
    """Returns effects on messages that the broker has: on others no action is expected, and the rules classify them."""
    stored = messages.where("sequence is not null").select("topic", "id")
    delivered = actions.where(among("kind", DELIVERY_KINDS)).select("topic", "id", "consumer_group")
    beyond = effects.join(stored, ["topic", "id"], "left_semi").join(
        delivered, ["topic", "id", "consumer_group"], "left_anti"
    )
    rows = grouped(
        beyond, "topic", "consumer_group", effects="count(*)", first_ms="min(at_ms)", last_ms="max(at_ms)"
    ).collect()
    return sorted(
        (
            UnrecordedEffects(
                topic=row["topic"], group=row["consumer_group"], effects=row["effects"], first_ms=row["first_ms"],
                last_ms=row["last_ms"],
            )
            for row in rows
        ),
        key=lambda unrecorded: (unrecorded.group, unrecorded.topic),
    )  # fmt: skip


def _named(effects: Sequence[UnrecordedEffects], *, last_ms: int) -> str:
    named = "; ".join(map(str, effects[:NAMED_MAX]))
    more = f"; and {len(effects) - NAMED_MAX:,} more groups and topics" if len(effects) > NAMED_MAX else ""
    last = f"its last action is of {utc_text(last_ms)}" if last_ms else "it has no action"
    return f"{named}{more}, whose deliveries the action log does not have ({last})"


def _last_ms(counts: Sequence[InputCount], input_kind: str) -> int:
    return max((count.last_ms for count in counts if count.input_kind == input_kind), default=0)


TOTALS_FILE: Final = "totals.json"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
SOURCES_MAX: Final = 10_000
GROUPS_MAX: Final = 100_000
"""Limit of the groups stored for one broker."""


class SourceTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One source: for an archive or an inbox, the times of its first and last row as a whole; for a log of the broker,
    those of its records; times in milliseconds, 0 if it was empty.

    `rows`: the number that the run read of the sources of this kind; in a run by the hour, of its time range;
    `whole_rows`: the number that the newest whole run read of them. `end_offset`: for a log, the offset up to which it
    was certainly on the disk. `noted_at_ms`: when the run began.
    """

    rows: int
    first_ms: int
    last_ms: int
    complete_since_ms: int | None
    noted_at_ms: int
    end_offset: int = 0
    whole_rows: int = 0


class BrokerGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The (topic, group) pairs that the action log of one broker knew, sorted, without those that were deleted."""

    pairs: list[tuple[str, str]]
    noted_at_ms: int


class KeptTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals by the names of the sources, and groups by the brokers' data folders.

    A source that is not among a run's settings keeps its entry: several settings may share one output folder.
    """

    format: int = FORMAT
    sources: dict[str, SourceTotals] = {}
    groups: dict[str, BrokerGroups] = {}


def read_totals(output: Path) -> KeptTotals:
    """Reads the totals of earlier runs; empty if there are none. Raises ConfigurationError for an unreadable file."""
    path = output / TOTALS_FILE
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigurationError(f"{path} has more than {FILE_BYTES_MAX:,} bytes: no run wrote it; move it away")
        totals = json_decoder(KeptTotals).decode(data)
    except FileNotFoundError:
        return KeptTotals()
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}); restore it from a copy, or move it away: then what vanished since "
            "earlier runs cannot be noticed by the next one"
        ) from error
    if totals.format != FORMAT:
        raise ConfigurationError(f"{path} was written by another version (format {totals.format}); move it away")
    return totals


def write_totals(output: Path, totals: KeptTotals) -> None:
    """Replace the file atomically. Beyond SOURCES_MAX, sources read longest ago are dropped. Raises OSError."""
    newest = sorted(totals.sources.items(), key=lambda item: -item[1].noted_at_ms)[:SOURCES_MAX]
    kept = KeptTotals(sources=dict(sorted(newest)), groups=dict(sorted(totals.groups.items())))
    write_whole(output / TOTALS_FILE, msgspec.json.format(msgspec.json.encode(kept)))
