"""When recurring messages occur: cron's fields in a zone whose clock is put forward and back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest

from outbox_broker.recurring.occurrences import COUNTED_MAX, CronSchedule
from outbox_core.common.errors import InvalidMessage

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
SINCE, UNTIL = datetime(2026, 11, 1, tzinfo=UTC), datetime(2028, 11, 1, tzinfo=UTC)
STEP = timedelta(minutes=5)
EVERY_HOUR = range(24)


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1000


def local(times_ms: Sequence[int], tz: str) -> list[str]:
    return [datetime.fromtimestamp(one / 1000, ZoneInfo(tz)).isoformat()[:-9] for one in times_ms]


def between(schedule: CronSchedule, since_ms: int, until_ms: int) -> list[int]:
    found: list[int] = []
    following = schedule.after(since_ms - 1)
    while following is not None and following < until_ms:
        found.append(following)
        following = schedule.after(following)
    return found


@cache
def instants_of(tz: str) -> dict[datetime, int]:
    """When a clock on the wall first shows a time, by looking at it every five minutes for two years; and the times
    that it never shows, moved by what it was put forward.
    """
    zone, seen = ZoneInfo(tz), dict[datetime, int]()
    moment, before = SINCE, SINCE.astimezone(zone).replace(tzinfo=None) - STEP
    while moment < UNTIL:
        wall = moment.astimezone(zone).replace(tzinfo=None)
        skipped = before + STEP
        while skipped < wall:
            seen[skipped] = int((moment + (skipped - before - STEP)).timestamp()) * 1000
            skipped += STEP
        seen.setdefault(wall, int(moment.timestamp()) * 1000)
        before, moment = wall, moment + STEP
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("tz", [BERLIN, NEW_YORK, LORD_HOWE, "UTC", "Asia/Kolkata", "Africa/Casablanca"])
@pytest.mark.parametrize(
    ("cron", "minutes", "hours", "weekdays"),
    [
        ("0 6 * * *", [0], [6], range(7)),
        ("30 2 * * *", [30], [2], range(7)),
        ("20,40 1-3 * * *", [20, 40], [1, 2, 3], range(7)),
        ("35 * * * *", [35], EVERY_HOUR, range(7)),
        ("45 1,2 * * 0", [45], [1, 2], [6]),
        ("15 */2 * * mon-fri", [15], range(0, 24, 2), range(5)),
    ],
)
def test_for_two_years_each_wall_time_occurs_once_moved_where_there_is_none(
    cron: str, minutes: Sequence[int], hours: Sequence[int], weekdays: Sequence[int], tz: str
) -> None:
    wanted = sorted(
        {
            at_ms
            for wall, at_ms in instants_of(tz).items()
            if wall.minute in minutes and wall.hour in hours and wall.weekday() in weekdays
        }
    )

    found = between(CronSchedule(cron, tz), int(SINCE.timestamp()) * 1000, wanted[-1] + 1)

    assert found == wanted


def test_in_spring_a_time_that_does_not_exist_is_moved_by_an_hour() -> None:
    schedule = CronSchedule("30 2 * * *", BERLIN)

    times = schedule.following(ms("2027-03-27T00:00+01:00"), count=3)

    assert local(times, BERLIN) == ["2027-03-27T02:30", "2027-03-28T03:30", "2027-03-29T02:30"]


def test_what_is_moved_onto_another_occurrence_is_one_with_it() -> None:
    schedule = CronSchedule("30 2,3 * * *", BERLIN)

    times = schedule.following(ms("2027-03-28T00:00+01:00"), count=2)

    assert local(times, BERLIN) == ["2027-03-28T03:30", "2027-03-29T02:30"]


def test_what_is_moved_by_half_an_hour_keeps_its_order_with_what_is_not() -> None:
    schedule = CronSchedule("20,40 2 * * *", LORD_HOWE)

    times = schedule.following(ms("2027-10-03T00:00+10:30"), count=2)

    assert local(times, LORD_HOWE) == ["2027-10-03T02:40", "2027-10-03T02:50"]


def test_in_autumn_a_time_that_comes_twice_occurs_the_first_time() -> None:
    schedule = CronSchedule("30 2 * * *", BERLIN)

    times = schedule.following(ms("2027-10-31T00:00+02:00"), count=2)

    assert times == [ms("2027-10-31T02:30+02:00"), ms("2027-11-01T02:30+01:00")]


@pytest.mark.parametrize("second", ["2027-10-31T02:00+01:00", "2027-10-31T02:29+01:00", "2027-10-31T02:31+01:00"])
def test_begun_in_the_repeated_hour_it_waits_for_the_next_day(second: str) -> None:
    schedule = CronSchedule("30 2 * * *", BERLIN)

    assert schedule.after(ms(second)) == ms("2027-11-01T02:30+01:00")


@pytest.mark.parametrize(
    ("cron", "weekday"),
    [("0 6 * * 0", 6), ("0 6 * * 7", 6), ("0 6 * * 1", 0), ("0 6 * * SUN", 6), ("0 6 * * 5-5", 4), ("0 6 * * sat", 5)],
)
def test_weekdays_are_cron_s(cron: str, weekday: int) -> None:
    [at_ms] = CronSchedule(cron, "UTC").following(0, count=1)

    assert datetime.fromtimestamp(at_ms / 1000, UTC).weekday() == weekday


@pytest.mark.parametrize(
    ("field", "weekdays"),
    [
        ("1-5", {0, 1, 2, 3, 4}), ("fri-sun", {4, 5, 6}), ("5-7", {4, 5, 6}), ("0-2", {6, 0, 1}), ("*/2", {6, 1, 3, 5}),
        ("mon,3", {0, 2}), ("1-5/2", {0, 2, 4}), ("0,7", {6}),
    ],
)  # fmt: skip
def test_ranges_of_weekdays_go_from_sunday_to_sunday(field: str, weekdays: set[int]) -> None:
    times = CronSchedule(f"0 6 * * {field}", "UTC").following(0, count=14)

    assert {datetime.fromtimestamp(one / 1000, UTC).weekday() for one in times} == weekdays


@pytest.mark.parametrize(
    ("cron", "tz", "reason"),
    [
        ("0 6 * *", "UTC", "five fields"),
        ("0 6 * * * *", "UTC", "five fields"),
        ("@daily", "UTC", "five fields"),
        ("", "UTC", "five fields"),
        ("５ 6 * * *", "UTC", "five fields"),
        ("0" + ",0" * 200 + " 6 * * *", "UTC", "up to 256 characters"),
        ("60 6 * * *", "UTC", "wrong"),
        ("0 24 * * *", "UTC", "wrong"),
        ("0 6 ? * *", "UTC", "wrong"),
        ("0 6 * * 8", "UTC", "unknown weekday"),
        ("0 6 * * 1/2", "UTC", "unknown weekday"),
        ("0 6 * * 5-1", "UTC", "ends before it begins"),
        ("*/0 * * * *", "UTC", "wrong"),
        ("0 6 13 * 5", "UTC", "not both"),
        ("0 6 30 2 *", "UTC", "never occurs"),
        ("0 6 * * *", "Europe/Nowhere", "no time zone"),
        ("0 6 * * *", "", "no time zone"),
        ("0 6 * * *", "../../etc/passwd", "no time zone"),
        ("0 6 * * *", "localtime", "name the time zone"),
        ("0 6 * * *", "Europe", "no time zone"),
        ("0 6 * * *", "x" * 5_000, "no time zone"),
    ],
)
def test_what_is_no_expression_or_no_zone_is_refused_with_the_reason(cron: str, tz: str, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        CronSchedule(cron, tz)


def test_a_leap_day_is_waited_for() -> None:
    schedule = CronSchedule("0 0 29 2 *", "UTC")

    assert schedule.after(ms("2096-03-01T00:00+00:00")) == ms("2104-02-29T00:00+00:00")
    assert schedule.after(ms("9999-01-01T00:00+00:00")) is None


def test_of_what_passed_the_newest_are_due_and_the_others_counted_as_missed() -> None:
    schedule = CronSchedule("0 6 * * *", BERLIN)
    since, now = ms("2027-10-25T06:00+02:00"), ms("2027-11-02T05:59+01:00")

    assert schedule.due(after_ms=since, now_ms=since + 1, newest=1) == ([], 0)
    assert schedule.due(after_ms=since, now_ms=now, newest=1) == ([ms("2027-11-01T06:00+01:00")], 6)
    assert schedule.due(after_ms=since, now_ms=now, newest=5).missed == 2
    assert schedule.due(after_ms=since, now_ms=now, newest=100) == (
        schedule.following(since, count=7), 0
    )  # fmt: skip
    assert schedule.due(after_ms=now, now_ms=since, newest=5) == ([], 0), "a clock that was put back"


def test_of_ten_years_of_minutes_the_newest_are_found_at_once() -> None:
    schedule = CronSchedule("* * * * *", "UTC")
    now = ms("2036-11-30T12:00+00:00")

    due = schedule.due(after_ms=ms("2026-11-30T12:00+00:00"), now_ms=now, newest=3)

    assert due == ([now - 120_000, now - 60_000, now], COUNTED_MAX)


def test_where_few_occur_among_many_that_were_missed_all_that_are_wanted_are_found() -> None:
    schedule = CronSchedule("* 0-17 1 1 *", "UTC")  # a thousand minutes, once a year

    due = schedule.due(after_ms=ms("2020-01-01T00:00+00:00"), now_ms=ms("2026-11-30T00:00+00:00"), newest=2)

    assert due.times_ms == [ms("2026-01-01T17:58+00:00"), ms("2026-01-01T17:59+00:00")]
