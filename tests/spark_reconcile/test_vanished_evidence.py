"""Evidence that vanished is never balanced: an action log that lost its end, emptied tables, groups that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from outbox_core.journal.block import SEGMENT_HEAD_BYTES
from outbox_core.journal.deletion_records import DeletedGroup
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.runtime.command import main
from spark_reconcile import BusinessRule, InboxSource, NotComparable, Settings, Summary, run, run_windows
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.load.completeness_bound import Reach
from spark_reconcile.load.lost_log_ends import UNSYNCED_MS, LogEnd, log_end
from spark_reconcile.load.name_checks import KnownGroups, check_names, known_groups
from spark_reconcile.load.read_plan import SourcePlan, TableExtent, check_sources
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.runs.lost_evidence_check import (
    TOTALS_FILE,
    BrokerGroups,
    KeptTotals,
    SourceTotals,
    UnrecordedEffects,
    find_missing,
    is_gone,
    is_proven,
    read_totals,
    shortened,
    write_totals,
)
from spark_reconcile.sources.broker_logs import LogSegment, survey
from spark_reconcile.sources.sql_statements import InputKind
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import actions_of, blocks_in
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    PAID,
    REMINDER,
    SECOND_MS,
    SETTINGS,
    TICKETS,
    World,
    append,
    write_log,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AGES_H = (8, 7, 6, 5, 4)
"""How old the world's messages are, in hours."""
RESTARTED = journal.Opened(at_ms=NOW_MS - MINUTE_MS, number=2)


@pytest.fixture
def world() -> World:
    """Orders whose messages went all the way, one an hour."""
    return settled_world(AGES_H)


# -- the action log's end, which inboxes prove -------------------------------------------------------------------------


@pytest.mark.spark
def test_an_action_log_that_lost_its_end_is_refused_and_one_that_a_power_cut_shortened_is_not(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    settings = world.write(sqlite, tmp_path)
    path = Path(survey(settings.broker_data, "actions")[-1].path)
    whole, ends = path.read_bytes(), record_ends(path)

    path.write_bytes(whole[: ends[len(ends) // 2]])
    told = rf"inbox of {TICKETS} has 2 effects of messages of {PAID} from .*T.* to .*last action is of.*Restore {path}"
    with pytest.raises(NotComparable, match=told):
        run(settings, session=spark, now_ms=NOW_MS)
    with pytest.raises(NotComparable, match=told):
        run_windows(settings, since_ms=NOW_MS - 6 * HOUR_MS, session=spark, now_ms=NOW_MS)
    assert not (settings.output / "manifest.json").exists()

    # Of the last message's four actions none was synced when its machine lost power.
    path.write_bytes(whole[: ends[-5]])
    with pytest.raises(NotComparable, match=r"has 1 effect of messages .*lost power, start the broker"):
        run(settings, session=spark, now_ms=NOW_MS)
    summary = run(settings, session=spark, now_ms=NOW_MS - AGES_H[-1] * HOUR_MS + MINUTE_MS // 2)
    assert summary.balanced
    assert "1 effect of messages" in note_of(summary, "action log")
    assert "the next run looks for them again" in (Path(summary.folder) / "report.html").read_text()

    append(settings, "actions", [RESTARTED])
    summary = run(settings, session=spark, now_ms=NOW_MS)
    assert (summary.balanced, note_of(summary, "action log")) == (True, "")


@pytest.mark.spark
def test_a_broker_at_work_whose_consumers_take_long_is_not_accused(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world, clock = World(), ManualClock(NOW_MS - 3 * HOUR_MS)
    engine = Engine.open(tmp_path / "engine", clock=clock)
    try:
        engine.admin.declare_group(PAID, TICKETS, GroupConfig())
        for number in range(3):
            order = world.order(age_ms=3 * HOUR_MS)
            name = world.sent(f"m{number}", key=str(order), age_ms=3 * HOUR_MS)
            engine.publisher.publish(
                [Message(id=name, topic=PAID, key=str(order), body=name.encode(), created_at_ms=clock.now_ms())]
            )
        deliveries = engine.puller.pull(PAID, TICKETS, max_messages=2, invisible_ms=2 * HOUR_MS)
        for number, one in enumerate(deliveries):  # neither is acknowledged, and nothing of it is synced
            world.handle(one.id, age_ms=2 * HOUR_MS - number * HOUR_MS // 2)
        settings = replace(world.write(sqlite, tmp_path), broker_data=tmp_path / "engine")

        summary = run(settings, session=spark, now_ms=NOW_MS)
    finally:
        engine.close()

    assert (summary.balanced, note_of(summary, "action log")) == (True, "")
    assert [one.rule for one in summary.verdict_counts if one.of == TICKETS and "handled" in one.rule] == [
        "handled_not_acknowledged"
    ]


def test_a_loss_is_proven_by_effects_that_are_older_than_what_every_reader_of_a_log_sees() -> None:
    first_ms = NOW_MS - UNSYNCED_MS - SECOND_MS
    young, old = (
        UnrecordedEffects(topic=PAID, group=TICKETS, effects=2, first_ms=first_ms - earlier_ms, last_ms=NOW_MS)
        for earlier_ms in (0, 1)
    )

    proven = [is_proven(found, now_ms=NOW_MS, skew_ms=SECOND_MS) for found in ([young], [old], [young, old])]

    assert proven == [False, True, True]


def test_the_end_of_a_log_and_the_place_where_it_stood_a_minute_ago(sqlite: Database, tmp_path: Path) -> None:
    world = settled_world((2, 1))
    settings = world.write(sqlite, tmp_path)
    for log, behind in (("messages", 1), ("actions", 4)):
        segments = survey(settings.broker_data, log)
        ends = [end - SEGMENT_HEAD_BYTES for end in record_ends(Path(segments[-1].path))]

        now, then, before = (log_end(segments, settled_ms=NOW_MS - age * MINUTE_MS) for age in (0, 90, 1800))

        assert (now.offset, now.settled_offset, now.torn) == (ends[-1], ends[-1], "")
        assert now.last_ms in range(NOW_MS - HOUR_MS - SECOND_MS, NOW_MS - HOUR_MS + SECOND_MS)
        assert then.settled_offset == ends[-1 - behind]
        assert before.settled_offset == 0


# -- what earlier runs had ---------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_tables_that_were_emptied_since_an_earlier_run_are_refused_until_it_is_accepted(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    settings = world.write(sqlite, tmp_path)
    assert run(settings, session=spark, now_ms=NOW_MS).balanced
    assert narrow(settings, spark).balanced  # no source has a row in these hours
    noted = read_totals(settings.output).sources
    inbox, archive = (
        next(name for name in noted if name.startswith(input_kind)) for input_kind in ("inbox", "archive")
    )
    assert inbox == f"inbox {TICKETS} in {tmp_path / 'business.db'}"
    assert (noted[inbox].first_ms, noted[inbox].last_ms) == tuple(NOW_MS - age * HOUR_MS + 30 for age in (8, 4))
    shown = (settings.output / "manifest.json").read_bytes()

    rows, world.inbox = world.inbox, []
    world.write_tables(sqlite)
    for again in (lambda: run(settings, session=spark, now_ms=NOW_MS), lambda: narrow(settings, spark)):
        with pytest.raises(
            NotComparable, match=rf"{inbox}: it had rows from .*now it is empty.*--accept-missing '{inbox}'"
        ):
            again()
    assert (settings.output / "manifest.json").read_bytes() == shown

    accepting = replace(settings, accept_missing=[inbox])
    assert narrow(accepting, spark).balanced
    assert narrow(settings, spark).balanced
    with pytest.raises(ConfigurationError, match="nothing of that is missing"):
        narrow(accepting, spark)

    world.inbox, sent, world.archive = rows, world.archive, []
    world.write_tables(sqlite)
    with pytest.raises(NotComparable, match=f"{archive}: it had rows.*archive_days"):
        run(settings, session=spark, now_ms=NOW_MS)

    # Kept for six hours, and a purge has an hour: the first two may go, and not the others.
    kept = replace(settings, archive_days=0.25)
    world.archive = sent[2:]
    world.write_tables(sqlite)
    assert narrow(kept, spark).balanced
    world.archive = sent[:0]
    world.write_tables(sqlite)
    with pytest.raises(NotComparable, match=f"{archive}: it had rows"):
        narrow(kept, spark)
    later_ms = NOW_MS + 6 * HOUR_MS
    assert run_windows(kept, since_ms=later_ms - HOUR_MS - 1, session=spark, now_ms=later_ms).balanced


@pytest.mark.spark
def test_groups_that_vanished_from_the_action_log_are_refused_and_deleted_ones_are_not(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    settings = world.write(sqlite, tmp_path)
    run(settings, session=spark, now_ms=NOW_MS)
    folder = str(settings.broker_data)
    assert read_totals(settings.output).groups[folder].pairs == [(PAID, MAIL), (PAID, TICKETS), (REMINDER, MAIL)]
    actions = decoded(settings)

    # As many bytes as before, and without a group: the log seems to have all of its end.
    padding = [RESTARTED] * len(actions)
    write_actions(settings, [*(one for one in actions if getattr(one, "group", "") != MAIL), *padding])
    with pytest.raises(NotComparable, match=rf"group {PAID}/{MAIL} in {folder}: .*nor its deletion.*--accept-missing"):
        narrow(settings, spark)

    write_actions(settings, actions[: len(actions) * 3 // 4])
    append(settings, "actions", [RESTARTED])
    with pytest.raises(NotComparable, match=rf"action log in {folder}: it went on to byte .*, and now ends at byte"):
        narrow(settings, spark)

    write_actions(settings, actions)
    append(settings, "actions", [DeletedGroup(topic=PAID, group=MAIL, at_ms=NOW_MS - MINUTE_MS)])
    assert narrow(settings, spark).balanced
    assert read_totals(settings.output).groups[folder].pairs == [(PAID, TICKETS), (REMINDER, MAIL)]


KEPT_MS = NOW_MS - 5 * HOUR_MS


@pytest.mark.parametrize(
    ("before", "now", "since_ms", "gone"),
    [
        ((0, 0), None, None, False),
        ((8, 4), (8, 4), None, False),
        ((8, 4), None, None, True),
        ((8, 4), (3, 1), None, False),
        ((8, 4), (6, 4), KEPT_MS, False),
        ((8, 4), (4, 1), KEPT_MS, False),
        ((8, 4), (3, 1), KEPT_MS, True),
        ((8, 4), None, KEPT_MS, True),
        ((8, 6), None, KEPT_MS, False),
        ((8, 6), (3, 1), KEPT_MS, False),
        ((4, 2), (4, 1), KEPT_MS, False),
        ((4, 2), (3, 1), KEPT_MS, True),
    ],
)
def test_rows_are_gone_where_no_purge_takes_them(
    before: tuple[int, int], now: tuple[int, int] | None, since_ms: int | None, gone: bool
) -> None:
    first_ms, last_ms = (NOW_MS - age * HOUR_MS if age else 0 for age in before)
    noted = SourceTotals(
        rows=9, first_ms=first_ms, last_ms=last_ms, complete_since_ms=None, noted_at_ms=NOW_MS - HOUR_MS
    )
    times = (None, None) if now is None else tuple(NOW_MS - age * HOUR_MS for age in now)
    extent = TableExtent(name="inbox", input_kind=InputKind.INBOX, what=TICKETS, first_ms=times[0], last_ms=times[1])

    assert is_gone(noted, extent, since_ms=since_ms) is gone


@pytest.mark.parametrize(
    ("since_h", "inbox_days", "gone"),
    [
        ([None], None, False),
        ([None], 0.25, True),  # six hours, of which a purge has one
        ([None], 0.125, False),
        ([5], None, True),
        ([3], None, False),
        ([3], 0.25, False),
        ([5, 3], None, False),  # each may be the table of the shorter retention
        ([5, 4], None, True),
        ([5, None], None, False),
    ],
)
def test_the_settings_of_a_group_s_inboxes_say_which_of_its_effects_no_purge_takes(
    tmp_path: Path, since_h: list[int | None], inbox_days: float | None, gone: bool
) -> None:
    sources = [
        InboxSource(group=TICKETS, complete_since_ms=None if age is None else NOW_MS - age * HOUR_MS) for age in since_h
    ]
    settings = Settings(
        database_url="sqlite:///none", broker_data=tmp_path, output=tmp_path, inbox_days=inbox_days,
        inboxes=[*sources, InboxSource(group=MAIL)],
    )  # fmt: skip
    noted = SourceTotals(
        rows=9, first_ms=NOW_MS - 8 * HOUR_MS, last_ms=NOW_MS - 4 * HOUR_MS, complete_since_ms=None, noted_at_ms=NOW_MS
    )
    now = TableExtent(
        name="inbox", input_kind=InputKind.INBOX, what=TICKETS, first_ms=NOW_MS - 3 * HOUR_MS, last_ms=NOW_MS - HOUR_MS
    )
    known = KnownGroups(pairs=frozenset(), deleted=frozenset(), is_complete=True, is_whole=True)

    missing = find_missing(
        KeptTotals(sources={"inbox": noted}), whole_logs(), settings, SourcePlan((), (), 0, extents=[now]), known=known,
        now_ms=NOW_MS,
    )  # fmt: skip

    assert ["let inbox_days in the settings say" in one.cure for one in missing] == [True] * gone


EMPTY_INBOX = TableExtent(name="inbox", input_kind=InputKind.INBOX, what=TICKETS, first_ms=None, last_ms=None)
EMPTY_ARCHIVE = TableExtent(name="archive", input_kind=InputKind.ARCHIVE, what="", first_ms=None, last_ms=None)
FULL_ARCHIVE = TableExtent(
    name="other", input_kind=InputKind.ARCHIVE, what="", first_ms=NOW_MS - HOUR_MS, last_ms=NOW_MS - HOUR_MS
)
SUMMARY = Summary(
    run_id="r", judged_at_ms=1, business_rows=0, messages=0, message_groups=0, stored=0, delivered=0, redelivered=0,
    acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0,
)  # fmt: skip
NOTED_EMPTY = SourceTotals(rows=0, first_ms=0, last_ms=0, complete_since_ms=None, noted_at_ms=NOW_MS - HOUR_MS)


@pytest.mark.parametrize(
    ("extents", "settings", "noted", "ages_h", "missing"),
    [
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {}, [], (3, 2), ["inbox", "archive"]),
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {}, ["inbox"], (3, 2), ["archive"]),
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {}, ["inbox", "archive"], (3, 2), []),
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {"archive": False}, [], (3, 2), ["inbox"]),
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {"archives": ["s3a://moved"]}, [], (3, 2), ["inbox"]),
        ([EMPTY_ARCHIVE, FULL_ARCHIVE], {}, [], (3, 2), []),
        ([EMPTY_INBOX, EMPTY_ARCHIVE], {}, [], (0, 0), []),  # they came while the tables were read
        ([EMPTY_INBOX], {"inbox_days": 0.1}, [], (30, 20), []),  # a purge took their effects
        ([EMPTY_INBOX], {"inbox_days": 0.1}, [], (30, 1), ["inbox"]),
        ([EMPTY_ARCHIVE], {"archive_days": 0.1}, [], (30, 20), []),
        ([EMPTY_ARCHIVE], {"archive_days": 0.1}, [], (30, 1), ["archive"]),
    ],
)
def test_an_empty_table_is_missing_where_the_broker_has_what_goes_with_its_rows(
    tmp_path: Path, extents: list[TableExtent], settings: dict[str, Any], noted: list[str], ages_h: tuple[int, int],
    missing: list[str],
) -> None:  # fmt: skip
    times = {"first_ms": NOW_MS - ages_h[0] * HOUR_MS, "last_ms": NOW_MS - ages_h[1] * HOUR_MS}
    evidence = whole_logs()
    evidence.counts = [
        InputCount(input_kind="actions", topic=PAID, note=f"acked {TICKETS}", rows=5, **times),
        InputCount(input_kind="messages", topic=PAID, note="", rows=5, **times),
        InputCount(input_kind="messages", topic="of another outbox", note="", rows=7, first_ms=1, last_ms=NOW_MS),
    ]
    given = Settings(
        database_url="sqlite:///none", broker_data=tmp_path, output=tmp_path, inboxes=[InboxSource(group=TICKETS)],
        rules=[BusinessRule(name="r", table="t", key_column="id", time_column="at", topic=PAID)], **settings,
    )  # fmt: skip
    known = KnownGroups(pairs=frozenset(), deleted=frozenset(), is_complete=True, is_whole=True)

    found = find_missing(
        KeptTotals(sources=dict.fromkeys(noted, NOTED_EMPTY)), evidence, given,
        SourcePlan((), (), 0, extents=extents), known=known, now_ms=NOW_MS,
    )  # fmt: skip

    assert [one.name for one in found] == missing
    assert all("while the broker has 5 " in one.had for one in found)


@pytest.mark.parametrize(
    ("now_h", "archive_days", "first_offset", "told"),
    [
        ((8, 4), None, 0, []),
        ((8, 1), None, 0, []),
        ((6, 4), None, 0, ["archive begins at"]),
        ((6, 4), 0.2, 0, []),  # a purge may take these
        ((8, 6), None, 0, ["archive ends at"]),
        ((8, 6), 1, 0, ["archive ends at"]),
        ((8, 4), None, 4096, ["message log in BROKER begins at", "action log in BROKER begins at"]),
    ],
)
def test_a_source_that_reaches_less_far_than_an_earlier_run_saw_is_told_in_the_headline(
    tmp_path: Path, now_h: tuple[int, int], archive_days: float | None, first_offset: int, told: list[str]
) -> None:
    def noted(first_h: int, last_h: int) -> SourceTotals:
        first_ms, last_ms = (NOW_MS - age * HOUR_MS for age in (first_h, last_h))
        return SourceTotals(rows=9, first_ms=first_ms, last_ms=last_ms, complete_since_ms=0, noted_at_ms=NOW_MS)

    settings = Settings(
        database_url="sqlite:///none", broker_data=tmp_path, output=tmp_path, archive_days=archive_days
    )  # fmt: skip
    before = {"archive": noted(8, 4), **{f"{log} in {tmp_path}": noted(8, 4) for log in ("message log", "action log")}}
    first_ms, last_ms = (NOW_MS - age * HOUR_MS for age in now_h)
    extent = TableExtent(name="archive", input_kind=InputKind.ARCHIVE, what="", first_ms=first_ms, last_ms=last_ms)
    evidence = whole_logs()
    evidence.surveyed = {
        log: [LogSegment(path="s", first_offset=first_offset, created_at_ms=NOW_MS, size_bytes=0, last=True)]
        for log in evidence.surveyed
    }

    found = shortened(KeptTotals(sources=before), evidence, settings, [extent])

    begun = [one.removeprefix("The ").replace(str(tmp_path), "BROKER").partition(" 20")[0] for one in found]
    assert begun == told
    summary = replace(SUMMARY, shortened=found)
    assert all(one in summary.headline for one in found)


@pytest.mark.spark
def test_rows_that_were_taken_out_of_the_middle_or_the_beginning_since_an_earlier_whole_run_are_told_in_the_headline(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    settings = world.write(sqlite, tmp_path, records_a_segment=1)
    assert run(settings, session=spark, now_ms=NOW_MS).shortened == []
    del world.archive[2]
    world.write_tables(sqlite)
    assert narrow(settings, spark).shortened == [], "it has not read all rows"

    summary = run(settings, session=spark, now_ms=NOW_MS)

    (told,) = summary.shortened
    assert told.startswith(
        f"The archive in {tmp_path / 'business.db'} begins where it did, and has 4 rows, where a run"
    )
    assert told.endswith("saw 5")
    assert told in summary.headline
    del world.archive[:2]
    world.write_tables(sqlite)
    Path(survey(settings.broker_data, "messages")[0].path).unlink()

    summary = run(settings, session=spark, now_ms=NOW_MS)

    archive, log = summary.shortened
    assert archive.startswith(f"The archive in {tmp_path / 'business.db'} begins at ")
    assert log.startswith(f"The message log in {settings.broker_data} begins at ")
    assert archive in summary.headline
    assert log in summary.headline


def test_without_an_archive_and_inboxes_in_the_settings_none_is_missing(
    sqlite: Database, tmp_path: Path, world: World
) -> None:
    world.inbox, world.archive = [], []
    settings = world.write(sqlite, tmp_path)
    evidence = whole_logs()
    times = {"first_ms": NOW_MS - 8 * HOUR_MS, "last_ms": NOW_MS - 4 * HOUR_MS}
    evidence.counts = [
        InputCount(input_kind="actions", topic=PAID, note=f"acked {TICKETS}", rows=5, **times),
        InputCount(input_kind="messages", topic=PAID, note="", rows=5, **times),
    ]
    known = KnownGroups(pairs=frozenset(), deleted=frozenset(), is_complete=True, is_whole=True)

    def missing(given: Settings) -> list[str]:
        plan = check_sources(given, reach=Reach(), span=None, now_ms=NOW_MS)
        found = find_missing(KeptTotals(), evidence, given, plan, known=known, now_ms=NOW_MS)
        return sorted(one.name.split()[0] for one in found)

    assert missing(settings) == ["archive", "inbox"]
    assert missing(replace(settings, archive=False)) == ["inbox"]
    assert missing(replace(settings, archive=False, inboxes=[])) == []


def test_a_row_whose_time_cannot_be_true_is_no_end_of_a_table_and_ends_no_later_run(
    sqlite: Database, tmp_path: Path, world: World
) -> None:
    for rows, column in ((world.inbox, "handled_at_us"), (world.archive, "sent_at_us")):
        rows[0][column], rows[-1][column] = 5_000_000, 2**63 - 1
    settings = world.write(sqlite, tmp_path)

    plan = check_sources(settings, reach=Reach(), now_ms=NOW_MS)

    first_ms, last_ms = NOW_MS - 7 * HOUR_MS, NOW_MS - 5 * HOUR_MS
    assert {one.input_kind: (one.first_ms, one.last_ms) for one in plan.extents} == {
        InputKind.INBOX: (first_ms + 30, last_ms + 30), InputKind.ARCHIVE: (first_ms + 15, last_ms + 15),
    }  # fmt: skip
    (archive,) = (one.name for one in plan.extents if one.input_kind is InputKind.ARCHIVE)
    # As a run noted it that took such a row for the end.
    noted = SourceTotals(rows=5, first_ms=5_000, last_ms=2**63 // 1000, complete_since_ms=0, noted_at_ms=NOW_MS)
    told = shortened(KeptTotals(sources={archive: noted}), whole_logs(), settings, plan.extents)
    assert f"The {archive} ends at 2027-01-15T03:30:00+00:00, where a run" in told[-1]
    assert told[-1].endswith("saw it reach to 9223372036854775 ms")


def test_totals_are_read_back_and_what_no_run_wrote_is_refused(tmp_path: Path) -> None:
    source = SourceTotals(rows=1, first_ms=2, last_ms=3, complete_since_ms=None, noted_at_ms=4, end_offset=5)
    totals = KeptTotals(sources={"inbox": source}, groups={"b": BrokerGroups(pairs=[(PAID, MAIL)], noted_at_ms=6)})
    assert read_totals(tmp_path) == KeptTotals()

    write_totals(tmp_path, totals)

    assert read_totals(tmp_path) == totals
    for text_ in ('{"format": 2}', '{"sources": 3}', "{"):
        (tmp_path / TOTALS_FILE).write_text(text_)
        with pytest.raises(ConfigurationError, match="move it away"):
            read_totals(tmp_path)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_first_run_on_emptied_tables_is_refused_unless_that_is_accepted_or_the_settings_say_so(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    world.inbox, world.archive = [], []
    settings = world.write(sqlite, tmp_path / "emptied")
    inbox, archive = (f"{name} in {tmp_path / 'business.db'}" for name in (f"inbox {TICKETS}", "archive"))

    for first in (lambda: run(settings, session=spark, now_ms=NOW_MS), lambda: narrow(settings, spark)):
        with pytest.raises(
            NotComparable,
            match=rf"{inbox}: it is empty, while the broker has 5 acknow.*{archive}: it is empty.* has 5 messages.*"
            rf"archive = false.*--accept-missing '{inbox}' --accept-missing '{archive}'",
        ):
            first()
    summary = run(replace(settings, accept_missing=[inbox, archive]), session=spark, now_ms=NOW_MS)

    assert "5 acknowledgements of this group: whether it was emptied cannot be known; " in note_of(summary, TICKETS)
    assert "their inbox in another schema, name it in [[inboxes]]" in note_of(summary, TICKETS)
    assert "5 messages on topics of this outbox: whether it was emptied" in note_of(summary, "sent messages")
    assert "whether it was emptied cannot be known" in (Path(summary.folder) / "report.html").read_text()
    assert narrow(settings, spark).balanced, "what was accepted once is known"

    new = World()
    new.sent("first", key=str(new.order()))
    new.store("first", key="1")
    summary = run(new.write(sqlite, tmp_path / "new"), session=spark, now_ms=NOW_MS)
    assert summary.balanced
    assert note_of(summary, TICKETS) == "the broker knows no action of this group yet"


@pytest.mark.spark
def test_groups_that_the_broker_does_not_know_are_refused(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World
) -> None:
    settings = world.write(sqlite, tmp_path)
    misspelt = replace(settings, inboxes=[InboxSource(group="tickest")])

    with pytest.raises(ConfigurationError, match="no group 'tickest'; did you mean 'tickets'"):
        run(misspelt, session=spark, now_ms=NOW_MS)
    write_actions(settings, [one for one in decoded(settings) if getattr(one, "group", "") != TICKETS] + [RESTARTED])
    with pytest.raises(NotComparable, match=r"inbox tickets in .* has effects, .*no group 'tickets'.*Restore"):
        run(settings, session=spark, now_ms=NOW_MS)


LOG = {"messages": 5, "actions": 9}


@pytest.mark.parametrize(
    ("pairs", "group", "inbox_topics", "groups", "told"),
    [
        ([(PAID, TICKETS)], TICKETS, [], [TICKETS, f"{PAID}/{TICKETS}"], ""),
        ([(PAID, TICKETS)], TICKETS, [PAID], [], ""),
        ([(PAID, TICKETS)], TICKETS, [REMINDER], [], f"no group 'tickets' on {REMINDER}; it knows tickets"),
        ([(PAID, TICKETS)], "ticket", [], [], "did you mean 'tickets'"),
        ([(PAID, TICKETS)], TICKETS, [], ["mial"], "no group 'mial'; it knows tickets"),
        ([(PAID, MAIL), (PAID, TICKETS)], TICKETS, [], ["mial"], "did you mean 'mail'"),
        ([(PAID, TICKETS)], TICKETS, [], [f"{REMINDER}/{TICKETS}"], f"did you mean '{PAID}/{TICKETS}'"),
        ([], TICKETS, [], [], ""),
        ([], TICKETS, [], [MAIL], "no group 'mail'; it knows none"),
    ],
)
def test_a_name_that_fits_no_group_is_refused_with_the_nearest_one(
    tmp_path: Path, pairs: list[tuple[str, str]], group: str, inbox_topics: list[str], groups: list[str], told: str
) -> None:
    settings = Settings(
        database_url="sqlite:///none", broker_data=tmp_path, output=tmp_path, groups=groups,
        inboxes=[InboxSource(group=group, topics=inbox_topics)],
    )  # fmt: skip
    known = KnownGroups(pairs=frozenset(pairs), deleted=frozenset(), is_complete=True, is_whole=True)
    unsure = replace(known, is_complete=False)
    empty = TableExtent(name=f"inbox {group} in x", input_kind=InputKind.INBOX, what=group, first_ms=None, last_ms=None)
    filled = replace(empty, first_ms=1, last_ms=1)

    check_names(settings, unsure, [filled], rows=LOG)
    if not told:
        check_names(settings, known, [empty], rows=LOG)
        return
    with pytest.raises(ConfigurationError, match=told):
        check_names(settings, known, [empty], rows=LOG)
    if not groups:
        with pytest.raises(NotComparable, match=told):
            check_names(settings, known, [filled], rows=LOG)
        with pytest.raises(ConfigurationError, match="if it was deleted, leave it out"):
            check_names(settings, replace(known, is_whole=False), [filled], rows=LOG)


def test_the_settings_file_names_groups_that_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "reconcile.toml"
    path.write_text(
        '[database]\nurl = "sqlite:///x.db"\n[broker]\ndata = "b"\ngroups = ["mail", "order.paid/tickets"]\n'
    )

    assert settings_of(read_config(path)).groups == ("mail", "order.paid/tickets")
    path.write_text(path.read_text().replace('"mail"', '"no group"'))
    with pytest.raises(ConfigurationError, match="no group"):
        settings_of(read_config(path))


def test_groups_of_which_old_actions_were_dropped_are_known_by_the_checkpoint(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS - HOUR_MS)
    options = EngineOptions(checkpoint_bytes=4096, retention_ms=MINUTE_MS)
    engine = Engine.open(tmp_path / "engine", clock=clock, options=options)
    try:
        engine.admin.declare_group(PAID, "idle", GroupConfig())
        for _ in range(300):
            engine.admin.declare_group(PAID, "busy", GroupConfig())
            clock.advance(SECOND_MS)
        engine.retention.drop_outdated()
    finally:
        engine.close()
    segments = survey(tmp_path / "engine", "actions")
    counts = [InputCount(input_kind="actions", topic=PAID, note="declared busy", rows=1, first_ms=1, last_ms=1)]
    facts = [GroupFacts(topic=PAID, consumer_group="busy")]

    found = known_groups(counts, facts, segments)

    assert segments[0].first_offset > 0
    assert (found.live, found.is_complete) == ({(PAID, "idle"), (PAID, "busy")}, True)
    write_log(tmp_path / "engine" / "actions", [RESTARTED], 9, first_offset=64)
    assert not known_groups(counts, facts, survey(tmp_path / "engine", "actions")).is_complete


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_the_exit_statuses_of_the_command(
    spark: SparkSession, sqlite: Database, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "spark_reconcile.runs.reconciliation.run", partial(run, session=spark)
    )  # Spark starts once for all
    settings = world.write(sqlite, tmp_path)
    config = tmp_path / "reconcile.toml"
    config.write_text(SETTINGS.format(url=sqlite.url))
    assert outbox(config) == 0
    with create_engine(sqlite.url).begin() as connection:
        connection.execute(text("DELETE FROM outbox_inbox"))
    inbox = f"inbox {TICKETS} in {tmp_path / 'business.db'}"
    capfd.readouterr()

    assert outbox(config) == 3
    refused = capfd.readouterr()
    assert outbox(config, "--accept-missing", inbox) == 0
    world.write_tables(sqlite)
    path = Path(survey(settings.broker_data, "actions")[-1].path)
    path.write_bytes(path.read_bytes()[: record_ends(path)[10]])
    capfd.readouterr()
    assert outbox(config, "--output", str(tmp_path / "another")) == 3
    cut = capfd.readouterr()
    config.write_text(SETTINGS.format(url=sqlite.url).replace('group = "tickets"', 'group = "tikets"'))
    assert outbox(config, "--output", str(tmp_path / "another")) == 2
    misspelt = capfd.readouterr()

    assert (refused.out, cut.out, misspelt.out) == ("", "", "")
    assert f"--accept-missing '{inbox}'" in refused.err
    assert "end of the broker's action log is missing" in cut.err
    assert "did you mean 'tickets'" in misspelt.err


# -- given -------------------------------------------------------------------------------------------------------------


def settled_world(ages_h: Sequence[int]) -> World:
    world = World()
    world.groups()
    for age in ages_h:
        world.settled(age_ms=age * HOUR_MS)
    return world


def whole_logs() -> Evidence:
    """Evidence without rows, and logs of which nothing was dropped."""
    none: Any = None
    segment = LogSegment(path="1.segment", first_offset=0, created_at_ms=NOW_MS, size_bytes=0, last=True)
    return Evidence(
        inboxes=none, messages=none, actions=none, rows=none, tables=(), groups=(), counts=[], archive_reach_ms=0,
        broker_reach_ms=0, actions_reach_ms=0, surveyed={"messages": [segment], "actions": [segment]},
        ends={"messages": LogEnd(), "actions": LogEnd()},
    )  # fmt: skip


def narrow(settings: Settings, spark: SparkSession) -> Summary:
    """A run on one hour in which nothing happened."""
    return run_windows(
        settings, since_ms=NOW_MS - 2 * HOUR_MS, until_ms=NOW_MS - HOUR_MS, session=spark, now_ms=NOW_MS
    )  # fmt: skip


def note_of(summary: Summary, what: str) -> str:
    return next(one.note for one in summary.inputs if one.what == what)


def record_ends(path: Path) -> list[int]:
    """Behind which bytes of a segment's file its records end, which are in a block each."""
    return [block.end for block in blocks_in(path)]


def decoded(settings: Settings) -> list[journal.Action]:
    return actions_of(settings.broker_data)


def write_actions(settings: Settings, actions: Sequence[journal.Action]) -> None:
    write_log(settings.broker_data / "actions", actions, 1000)


def outbox(config: Path, *options: str) -> object:
    """The exit status of `outbox reconcile run`."""
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", "run", "--config", str(config), "--now-ms", str(NOW_MS), *options])
    return ended.value.code
