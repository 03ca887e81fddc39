"""Detects inbox effects that are missing in the action log: they prove that the log has lost its end.

The broker appends a delivery to its action log before it answers the pull, and inboxes are read before the logs. So the
delivery of every effect is in the log, with one exception: deliveries are synced only with the next settlement, and a
power cut may lose the last ones. A broker that starts after that appends an action (Opened) that is newer than all of
these effects, and they prove nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped, union
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.source_counts import LegCount
from spark_reconcile.core.time_arguments import utc_text
from spark_reconcile.load.evidence import Evidence, log_frame
from spark_reconcile.load.lost_log_ends import UNSYNCED_MS, log_end
from spark_reconcile.sources.log_segments import survey
from spark_reconcile.sources.message_range_expansion import named_runs, single
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HANDED_OUT: Final = ("delivered", "extended", "requeued", "acked", "died", "redriven")
"""Actions on a message that was delivered to a group."""
NAMED_MAX: Final = 3


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
    """Raises NotComparable if inboxes prove that the action log lost actions.

    Returns a sentence if effects lack their deliveries without proof of a loss; empty if none do.
    """
    skew_ms = settings.grace.clock_skew_ms
    last_ms = max(evidence.ends["actions"].last_ms, _last_ms(evidence.counts, "actions"))
    if _last_ms(evidence.counts, Leg.INBOX) <= last_ms + skew_ms:
        return ""
    last = evidence.surveyed["actions"][-1]
    # The broker may be running: actions appended since the log was read count, too.
    now = [segment for segment in survey(settings.broker_data, "actions") if segment.first_offset >= last.first_offset]
    since = log_frame(evidence.messages.sparkSession, "actions", now)
    last_ms = max(last_ms, log_end(now).last_ms)
    actions = union(evidence.actions, single(since), named_runs(since, evidence.messages, is_whole=False))
    unrecorded = _without_hand_out(evidence.inboxes.where(f"at_ms > {last_ms + skew_ms}L"), evidence.messages, actions)
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


def _without_hand_out(effects: DataFrame, messages: DataFrame, actions: DataFrame) -> list[UnrecordedEffects]:
    """Returns effects on messages that the broker has: on others no action is expected, and the rules classify them."""
    kinds = ", ".join(f"'{kind}'" for kind in HANDED_OUT)
    stored = messages.where("sequence is not null").select("topic", "id")
    handed_out = actions.where(f"kind in ({kinds})").select("topic", "id", "consumer_group")
    beyond = effects.join(stored, ["topic", "id"], "left_semi").join(
        handed_out, ["topic", "id", "consumer_group"], "left_anti"
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


def _last_ms(counts: Sequence[LegCount], leg: str) -> int:
    return max((count.last_ms for count in counts if count.leg == leg), default=0)
