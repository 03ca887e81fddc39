"""When a cron expression occurs in a time zone. Pure; APScheduler's CronTrigger computes, on a calendar without zones.

CronTrigger itself runs twice in the hour that a zone repeats in autumn. So it is asked for times of the wall clock
alone, and what an instant is called there is decided here, for gap and overlap by one rule, that of RFC 5545 (3.3.5)
and of PEP 495: a wall time that does not exist counts by the offset before the gap, which moves it by the gap's length,
and of one that exists twice the first counts.
"""

from __future__ import annotations

import re
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from apscheduler.triggers.cron import CronTrigger

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.limits import CRON_CHARS_MAX

COUNTED_MAX: Final = 1_000
"""Missed occurrences are counted up to this number: a broker may have been down for a year of minutes."""
_FIELDS: Final = 5
_DAY: Final = timedelta(days=1)
_SECOND: Final = timedelta(seconds=1)
_HOUR_MS: Final = 3_600_000
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_WEEKDAY: Final = "[0-7]|" + "|".join(_WEEKDAYS)
_WEEKDAY_PART: Final = re.compile(
    rf"(?:(?P<all>\*)|(?P<first>{_WEEKDAY})(?:-(?P<last>{_WEEKDAY}))?)(?:/(?P<step>[1-7]))?", re.ASCII
)


class Due(NamedTuple):
    """Occurrences that are to be published, oldest first, and how many before them were missed."""

    times_ms: list[int]
    missed: int


class CronSchedule:
    """The occurrences of a cron expression in a zone: instants in milliseconds since the Unix epoch, whole minutes.

    Raises InvalidMessage for an expression or a zone that is none, and for one that never occurs.
    """

    def __init__(self, cron: str, tz: str) -> None:
        self._zone = _zone_of(tz)
        self._trigger = _trigger_of(cron)
        if self.after(0) is None:
            raise InvalidMessage(f"the cron expression {cron!r} never occurs")

    def after(self, time_ms: int) -> int | None:
        """Returns the first occurrence after a time; None if the calendar ends before."""
        try:
            return self._after(time_ms)
        except (OverflowError, ValueError):  # behind the year 9999
            return None

    def following(self, time_ms: int, *, count: int) -> list[int]:
        """Returns the next occurrences after a time."""
        times_ms: list[int] = []
        while len(times_ms) < count:
            following_ms = self.after(time_ms)
            if following_ms is None:
                break
            times_ms.append(following_ms)
            time_ms = following_ms
        return times_ms

    def due(self, *, after_ms: int, now_ms: int, newest: int) -> Due:
        """Returns the `newest` occurrences after a time and up to now, and how many others there are (COUNTED_MAX)."""
        times_ms: deque[int] = deque(maxlen=newest)
        count, last_ms = 0, after_ms
        while count < newest + COUNTED_MAX:
            following_ms = self.after(last_ms)
            if following_ms is None or following_ms > now_ms:
                return Due(list(times_ms), count - len(times_ms))
            times_ms.append(following_ms)
            last_ms = following_ms
            count += 1
        return Due(self._newest(after_ms=last_ms, now_ms=now_ms, newest=newest) or list(times_ms), COUNTED_MAX)

    def _newest(self, *, after_ms: int, now_ms: int, newest: int) -> list[int]:
        """Returns the newest occurrences after a time, looking back from now further and further."""
        span_ms = _HOUR_MS
        while True:
            start_ms = max(after_ms, now_ms - span_ms)
            times_ms: deque[int] = deque(maxlen=newest)
            following_ms = self.after(start_ms)
            while following_ms is not None and following_ms <= now_ms:
                times_ms.append(following_ms)
                following_ms = self.after(following_ms)
            if len(times_ms) == newest or start_ms == after_ms:
                return list(times_ms)
            span_ms *= 2

    def _after(self, time_ms: int) -> int | None:
        moment = datetime.fromtimestamp(time_ms // 1000, UTC)
        wall = self._wall(moment)
        # What a gap of the last day moved is called later than its wall time: it is looked for from there on.
        gap = (wall - moment) - (self._wall(moment - _DAY) - (moment - _DAY))
        wall -= max(gap, timedelta())
        soonest: datetime | None = None
        while True:
            following: datetime | None = self._trigger.get_next_fire_time(None, wall + _SECOND)
            if following is None:
                return None if soonest is None else _ms(soonest)
            wall = following
            moment = wall.replace(tzinfo=self._zone).astimezone(UTC)
            if _ms(moment) <= time_ms:
                continue  # the second time of a wall time that was the first time before
            if soonest is None or moment < soonest:
                soonest = moment
            # A wall time behind a gap may be sooner than one in it that was moved; none is behind this one.
            if self._wall(soonest) <= wall:
                return _ms(soonest)

    def _wall(self, moment: datetime) -> datetime:
        """Returns what a clock on the wall shows, as if it were UTC."""
        return moment.astimezone(self._zone).replace(tzinfo=UTC)


@lru_cache(maxsize=4_096)
def cron_schedule(cron: str, tz: str) -> CronSchedule:
    """Returns the schedule; made once. Raises InvalidMessage."""
    return CronSchedule(cron, tz)


def _ms(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000


def _zone_of(tz: str) -> ZoneInfo:
    if tz == "localtime":
        raise InvalidMessage("name the time zone: the machine's own is another one after a move")
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError) as error:
        raise InvalidMessage(
            f"there is no time zone {tz[:80]!r} here; its name is like Europe/Berlin, or UTC"
        ) from error


def _trigger_of(cron: str) -> CronTrigger:
    fields = cron.lower().split()
    if len(cron) > CRON_CHARS_MAX or not cron.isascii() or len(fields) != _FIELDS:
        raise InvalidMessage(
            f"a cron expression has five fields, minute, hour, day, month and weekday, as '0 6 * * mon-fri', and up to "
            f"{CRON_CHARS_MAX} characters"
        )
    *others, day, month, weekday = fields
    if day != "*" and weekday != "*":
        # cron takes a day that fits either, APScheduler one that fits both: whichever it was, somebody would be wrong.
        raise InvalidMessage("give a day of the month or weekdays, not both: add two recurring messages")
    try:
        return CronTrigger.from_crontab(" ".join([*others, day, month, _weekdays_of(weekday)]), timezone=UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidMessage(f"the cron expression {cron!r} is wrong: {error}") from error


def _weekdays_of(field: str) -> str:
    """Returns weekdays by name. Raises ValueError. As numbers they are cron's, 0 and 7 Sunday; APScheduler's 0 is
    Monday.
    """
    if field == "*":
        return field
    weekdays: set[int] = set()
    for part in field.split(","):
        found = _WEEKDAY_PART.fullmatch(part)
        if found is None or (found["step"] and not (found["all"] or found["last"])):
            raise ValueError(f"unknown weekday {part!r}")
        first = 0 if found["all"] else _number_of(found["first"])
        last = 6 if found["all"] else _number_of(found["last"] or found["first"])
        if last == 0 < first:
            last = 7  # a week that ends with Sunday
        if last < first:
            raise ValueError(f"{part!r} ends before it begins")
        weekdays |= {weekday % len(_WEEKDAYS) for weekday in range(first, last + 1, int(found["step"] or 1))}
    return ",".join(_WEEKDAYS[weekday] for weekday in sorted(weekdays))


def _number_of(weekday: str) -> int:
    return int(weekday) if weekday.isdigit() else _WEEKDAYS.index(weekday)
