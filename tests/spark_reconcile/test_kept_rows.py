"""Since when tables that are purged have all rows, where no setting says so: since their oldest row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_reconcile import InboxSource, OutboxSource, Settings
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.load.completeness_bound import NEVER_MS, archive_reach, inbox_reaches
from spark_reconcile.load.read_plan import check_sources
from spark_reconcile.sources.sql_statements import InputKind
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, REMINDER, TICKETS, World

SKEW_MS = 1_000
FIRST_MS, LATER_MS = NOW_MS - 9 * HOUR_MS, NOW_MS - 5 * HOUR_MS


def test_a_topic_whose_rows_all_have_impossible_times_does_not_take_the_archive_back_to_1970() -> None:
    impossible = replace(_count(InputKind.ARCHIVE, first_ms=0), topic="newsletter", impossible=1, impossible_ms=-1_000)
    counts = [_count(InputKind.ARCHIVE, first_ms=LATER_MS), impossible]

    assert archive_reach(_settings(), counts, {}, now_ms=NOW_MS) == LATER_MS + SKEW_MS
    assert archive_reach(_settings(), [impossible], {}, now_ms=NOW_MS) == NEVER_MS
    assert (
        archive_reach(_settings(), [impossible], {(InputKind.ARCHIVE, ""): FIRST_MS}, now_ms=NOW_MS)
        == FIRST_MS + SKEW_MS
    )


def test_what_was_discarded_does_not_say_since_when_an_archive_that_is_off_is_complete(
    sqlite: Database, tmp_path: Path
) -> None:
    world, span = World(), Span(since_ms=NOW_MS - 3 * HOUR_MS, until_ms=NOW_MS)
    world.sent("discarded", key=None, age_ms=9 * HOUR_MS, outcome="discarded")
    settings = replace(world.write(sqlite, tmp_path), rules=[])
    world.sent("sent", key=None, age_ms=5 * HOUR_MS)
    other = Database(name="sqlite", url=f"sqlite:///{tmp_path / 'other.db'}", schema=None)
    world.write_tables(other)

    off = check_sources(settings, span=span).oldest_ms
    on = check_sources(replace(settings, database_url=other.url), span=span).oldest_ms

    counts = [_count(InputKind.ARCHIVE, note="discarded", first_ms=FIRST_MS)]
    assert archive_reach(_settings(), counts, off, now_ms=NOW_MS) == NEVER_MS
    assert archive_reach(_settings(), counts, on, now_ms=NOW_MS) == LATER_MS + 15 + SKEW_MS


@pytest.mark.parametrize("is_whole", [True, False], ids=["a whole run", "by the hour"])
def test_two_inboxes_of_one_group_are_complete_where_both_are(is_whole: bool) -> None:
    settings = _settings(InboxSource(group=TICKETS), InboxSource(group=TICKETS), InboxSource(group="mail"))
    counts = [_count(InputKind.INBOX, note=TICKETS, first_ms=FIRST_MS)]

    def reaches(*oldest_ms: int | None) -> dict[tuple[str, str], int]:
        return inbox_reaches(settings, counts, oldest_ms, now_ms=NOW_MS, is_whole=is_whole)

    assert reaches(FIRST_MS, LATER_MS, None) == {("", TICKETS): LATER_MS + SKEW_MS, ("", "mail"): NEVER_MS}
    assert reaches(FIRST_MS, None, LATER_MS) == {("", TICKETS): FIRST_MS + SKEW_MS, ("", "mail"): LATER_MS + SKEW_MS}


def test_rows_that_a_purge_took_since_they_were_looked_up_are_not_expected_by_a_whole_run() -> None:
    settings = _settings(InboxSource(group=TICKETS))
    counts = [_count(InputKind.INBOX, note=TICKETS, first_ms=LATER_MS)]

    whole, hourly = (
        inbox_reaches(settings, counts, [FIRST_MS], now_ms=NOW_MS, is_whole=is_whole) for is_whole in (True, False)
    )

    assert whole == {("", TICKETS): LATER_MS + SKEW_MS}
    assert hourly == {("", TICKETS): FIRST_MS + SKEW_MS}, "its rows are those of the span"


def test_a_setting_goes_before_the_oldest_row_and_may_be_since_ever() -> None:
    settings = _settings(
        InboxSource(group=TICKETS, topics=[PAID], complete_since_ms=0), InboxSource(group=TICKETS, topics=[REMINDER])
    )

    reaches = inbox_reaches(settings, [], [FIRST_MS, LATER_MS], now_ms=NOW_MS, is_whole=True)

    assert reaches == {(PAID, TICKETS): SKEW_MS, (REMINDER, TICKETS): LATER_MS + SKEW_MS}


def test_the_oldest_row_of_each_source_is_looked_up_in_its_own_table(sqlite: Database, tmp_path: Path) -> None:
    world, elsewhere = World(), World()
    for one, age_ms in ((world, 9 * HOUR_MS), (world, HOUR_MS), (elsewhere, 5 * HOUR_MS)):
        one.settled(age_ms=age_ms)
    world.inbox.append({**world.inbox[0], "message_id": "of 1970", "handled_at_us": 5_000_000})
    world.sent("of 1970", key=None)
    world.archive[-1]["sent_at_us"] = 5_000_000
    other = Database(name="sqlite", url=f"sqlite:///{tmp_path / 'other.db'}", schema=None)
    elsewhere.write_tables(other)
    settings = world.write(sqlite, tmp_path)
    inboxes = [*settings.inboxes, InboxSource(group=TICKETS, url=other.url), InboxSource(group="mail")]

    both = replace(settings, inboxes=inboxes, outboxes=[OutboxSource(url=other.url)], rules=[])
    plan = check_sources(both, span=Span(since_ms=NOW_MS - HOUR_MS, until_ms=NOW_MS))

    assert plan.inbox_oldest_ms == check_sources(both).inbox_oldest_ms == (FIRST_MS + 30, LATER_MS + 30, None)
    assert plan.oldest_ms == {(InputKind.ARCHIVE, ""): FIRST_MS + 15}


def _settings(*inboxes: InboxSource) -> Settings:
    return Settings(database_url="sqlite:///none", broker_data=Path("b"), output=Path("o"), inboxes=inboxes)


def _count(input_kind: InputKind, *, note: str = "", first_ms: int) -> InputCount:
    return InputCount(input_kind=input_kind, topic=PAID, note=note, rows=1, first_ms=first_ms, last_ms=NOW_MS)
