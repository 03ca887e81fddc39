"""Determines since when and until when each source is complete. Reads no rows.

Since when: by settings, by its retention, or since its oldest row. Until when: by settings, by a replica's status, or
until now. A replica that lags or is stopped lacks rows that the broker's log already has: without these times, correct
messages would become phantom or lost. The newest row of a table is no evidence: a table without new rows need not lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import CompletenessBound, Settings
from spark_reconcile.core.time_buckets import DAY_MS, EVER_MS
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, reading
from spark_reconcile.sources.sql_statements import DISCARDED, InputKind

if TYPE_CHECKING:
    from spark_reconcile.core.plausible_times import InputCount


_STEP_SECONDS: Final = 1
"""Servers report whole seconds."""
_BEHIND: Final = ("seconds_behind_source", "seconds_behind_master")
_THREADS: Final = ("replica_io_running", "replica_sql_running", "slave_io_running", "slave_sql_running")
_CURE: Final = (
    "say so in the settings file: complete_until = TIME where it stands still, lag_seconds = N where it follows, in "
    "[database] or beside the source's url"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Until when sources are complete, in milliseconds: each the minimum over its databases.

    `archive_ms`: outboxes and their archives; `business`: by topic; `inboxes`: by topic ("": all) and group.
    """

    archive_ms: int = EVER_MS
    business: Mapping[str, int] = field(default_factory=dict)
    inboxes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def least_ms(self) -> int:
        """The time until which every source is complete."""
        return min(self.archive_ms, *self.business.values(), *self.inboxes.values(), EVER_MS)


def reach_of(settings: Settings, *, now_ms: int) -> Reach:
    """Query the status of every database without a setting.

    Raises NotComparable if a replica's lag is not known, DatabaseUnavailable and ConfigurationError.
    """
    behind: dict[str, int] = {}
    # Rules leave the grace time before an end; a source's own clock may be further off.
    apart_ms = max(0, settings.grace.clock_skew_ms - settings.grace.ms)

    def until(bound: CompletenessBound, urls: Iterable[str]) -> int:
        effective = bound if bound.is_set else settings.until
        if effective.is_set:
            return effective.at(now_ms) - apart_ms
        return min(now_ms - _behind_ms(url, behind) for url in urls)

    business: dict[str, int] = {}
    for rule in settings.rules:
        business[rule.topic] = min(until(rule.until, settings.urls_of(rule)), business.get(rule.topic, EVER_MS))
    inboxes: dict[tuple[str, str], int] = {}
    for inbox in settings.inboxes:
        until_ms = until(inbox.until, [inbox.url or settings.database_url])
        for topic in inbox.topics or ("",):
            inboxes[topic, inbox.group] = min(until_ms, inboxes.get((topic, inbox.group), EVER_MS))
    archive_ms = min(until(outbox.until, [outbox.url]) for outbox in settings.all_outboxes)
    return Reach(archive_ms=archive_ms, business=business, inboxes=inboxes)


def _behind_ms(url: str, lags_ms: dict[str, int]) -> int:
    address = DatabaseAddress.of(url)
    if str(address) not in lags_ms:
        with reading(address) as reader:
            lags_ms[str(address)] = _lag_ms(reader)
    return lags_ms[str(address)]


def _lag_ms(reader: DbApiReader) -> int:
    """Returns a replica's lag; 0 if the database is no replica."""
    status = reader.replica_status()
    if status is not None:
        return lag_ms(status, name=str(reader.address))
    if reader.read_only():
        raise ConfigurationError(
            f"{reader.address} is read_only, so it may be a replica, and this user may not ask how far behind it is: "
            f"GRANT REPLICATION CLIENT (on MariaDB REPLICA MONITOR) to the url's user, or {_CURE}"
        )
    return 0


def lag_ms(status: Sequence[Mapping[str, Any]], *, name: str) -> int:
    """Returns a replica's greatest lag behind its sources, by its status. Raises NotComparable if that is not known."""
    lags_ms = [0]
    for status_row in status:
        row = {key.lower(): value for key, value in status_row.items()}
        behind = next((row[key] for key in _BEHIND if row.get(key) is not None), None)
        if behind is None or any(str(row.get(key, "Yes")) != "Yes" for key in _THREADS):
            raise NotComparable(
                f"{name} is a replica that does not follow its source now, so nothing tells until when it is complete: "
                f"start it, or {_CURE}; lag_seconds = 0 where it was made a primary"
            )
        lags_ms.append((int(behind) + _STEP_SECONDS) * 1000)
    return max(lags_ms)


NEVER_MS: Final = 1 << 53
"""Start of completeness of an empty source: later than any time."""
PURGE_MARGIN_MS: Final = 60 * 60 * 1000


def archive_reach(
    settings: Settings, counts: Sequence[InputCount], oldest_ms: Mapping[tuple[InputKind, str], int], *, now_ms: int
) -> int:
    """Since when the archive is complete: by settings, by its retention, or since its oldest row."""
    reach = _kept_since(settings.complete_since_ms, settings.archive_days, settings, now_ms=now_ms)
    if reach is not None:
        return reach
    # A discard writes to an archive that is off, too: its row says nothing of what was sent since.
    return oldest_row(
        [count for count in counts if count.input_kind == InputKind.ARCHIVE and count.note != DISCARDED],
        settings,
        oldest_ms.get((InputKind.ARCHIVE, "")),
    )


def kept_since(complete_since_ms: int | None, days: float | None, *, now_ms: int) -> int | None:
    """Since when rows are kept, by the settings: the time takes precedence over the days; None without settings.

    A purge may run while we read, by another clock: hence the margin.
    """
    if complete_since_ms is not None or days is None:
        return complete_since_ms
    return int(now_ms - days * DAY_MS) + PURGE_MARGIN_MS


def _kept_since(complete_since_ms: int | None, days: float | None, settings: Settings, *, now_ms: int) -> int | None:
    """Since when the settings say that rows are kept, by every clock: what the broker dates a moment later may have
    been written a moment before, by the database's clock.
    """
    since_ms = kept_since(complete_since_ms, days, now_ms=now_ms)
    return None if since_ms is None else since_ms + settings.grace.clock_skew_ms


def inbox_reaches(
    settings: Settings, counts: Sequence[InputCount], oldest_ms: Sequence[int | None], *, now_ms: int, is_whole: bool
) -> dict[tuple[str, str], int]:
    """Since when the inbox of each (topic, group) is complete; topic "" is any topic.

    `oldest_ms`: the group's oldest row in the table of each inbox of the settings; None: it has none. Two tables may
    serve one group: they are complete only where both are, but for one that has no row. `is_whole`: rows of all times
    were read, so a purge has taken what is older than these.
    """
    reaches_by_group: dict[tuple[str, str], list[int]] = {}
    for inbox, known_ms in zip(settings.inboxes, oldest_ms, strict=True):
        read = (
            [count for count in counts if count.input_kind == InputKind.INBOX and count.note == inbox.group]
            if is_whole
            else []
        )
        reach = _kept_since(inbox.complete_since_ms, settings.inbox_days, settings, now_ms=now_ms)
        if reach is None and known_ms is not None:
            reach = max(known_ms + settings.grace.clock_skew_ms, 0 if not read else oldest_row(read, settings, None))
        for topic in inbox.topics or ("",):
            reaches_by_group.setdefault((topic, inbox.group), []).extend([] if reach is None else [reach])
    return {topic_group: max(reaches, default=NEVER_MS) for topic_group, reaches in reaches_by_group.items()}


def oldest_row(counts: Sequence[InputCount], settings: Settings, known_ms: int | None) -> int:
    """The oldest row's time plus the clock skew; NEVER_MS without rows. `known_ms`: the oldest of rows not read."""
    # Rows of a topic may all have impossible times: then these have no first one.
    first_times = [count.first_ms for count in counts if count.first_ms] + ([] if known_ms is None else [known_ms])
    return min(first_times) + settings.grace.clock_skew_ms if first_times else NEVER_MS
