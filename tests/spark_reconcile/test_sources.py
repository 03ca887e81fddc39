"""The two data sources: what they read, what they refuse, how they part it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan, StringStartsWith
from sqlalchemy import create_engine, text

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, SchemaMissing
from outbox_core.journal import journal
from outbox_core.journal.block import BLOCK_HEAD_BYTES, SEGMENT_HEAD_BYTES
from outbox_core.journal.dead_letter_records import ClockStepped, Discarded, Edited, RedriveStopped
from outbox_core.messages.message import GroupConfig, Message
from spark_reconcile import Condition, NotComparable, Operator, Settings, run
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.load.read_plan import check_sources
from spark_reconcile.load.spark_session import Size
from spark_reconcile.sources.broker_logs import ACTION_SCHEMA, RUN_SCHEMA, action_rows, named_runs, single, survey
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, reading
from spark_reconcile.sources.log_source import BrokerLogSource, PushingLogReader, SegmentPart
from spark_reconcile.sources.sql_source import Part, PushingSqlReader, SqlReader
from spark_reconcile.sources.sql_statements import InputKind, Statement, business_statement
from tests.fixtures.certificate_authority import Authority
from tests.fixtures.databases import Database
from tests.outbox_broker.message_log import messages_of
from tests.spark_reconcile.message_log import logged, write_messages
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, PAID, World, append, write_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def written(sqlite: Database, tmp_path: Path) -> Settings:
    """Ten settled orders on SQLite, five records a segment."""
    return _world(10).write(sqlite, tmp_path, records_a_segment=5)


def test_a_torn_tail_ends_the_log_and_loses_nothing_before_it(written: Settings) -> None:
    last = Path(survey(written.broker_data, "messages")[-1].path)
    with last.open("ab") as file:
        file.write(b"\x20\x00\x00\x00torn")

    rows = _log_rows(written, "messages")

    assert len(rows) == 10
    assert all(row["damage"] is None for row in rows)


def test_what_is_appended_after_the_survey_is_not_read(written: Settings) -> None:
    segments = survey(written.broker_data, "messages")
    append(written, "messages", list(map(logged, messages_of(written.broker_data)[:5])))

    rows = _log_rows(written, "messages", segments=segments)

    assert len(rows) == 10


def test_a_flipped_bit_is_named_and_nothing_is_judged(written: Settings, spark: SparkSession) -> None:
    first = Path(survey(written.broker_data, "messages")[0].path)
    data = bytearray(first.read_bytes())
    data[SEGMENT_HEAD_BYTES + BLOCK_HEAD_BYTES + 40] ^= 1
    first.write_bytes(data)

    with pytest.raises(NotComparable, match=rf"{first.name}: damaged .* at offset"):
        run(written, session=spark, now_ms=NOW_MS)

    assert not (written.output / "manifest.json").exists()
    assert [path.name for path in written.output.iterdir()] == [".lock"]


def test_a_segment_cut_short_in_the_middle_of_the_log_is_a_hole(written: Settings) -> None:
    first = Path(survey(written.broker_data, "messages")[0].path)
    first.write_bytes(first.read_bytes()[:-3])

    with pytest.raises(NotComparable, match="has a hole"):
        check_sources(written)


def test_a_missing_segment_is_a_hole(written: Settings) -> None:
    Path(survey(written.broker_data, "actions")[1].path).unlink()

    with pytest.raises(NotComparable, match="has a hole between"):
        check_sources(written)


def test_a_record_of_a_newer_kind_is_refused_rather_than_passed_over(written: Settings, tmp_path: Path) -> None:
    append(written, "actions", [["teleported", "topic"]])

    damage = [row["damage"] for row in _log_rows(written, "actions") if row["damage"]]

    assert len(damage) == 1
    assert "teleported" in damage[0]


def test_a_log_whose_beginning_was_dropped_reaches_back_to_its_first_segment(
    written: Settings, spark: SparkSession
) -> None:
    world = _world(10)
    kept = world.stored[5:]
    write_messages(
        written.broker_data / "messages", kept, 5, created_at_ms=kept[0].stored_at_ms - 1, first_offset=4_096,
        first_number=2,
    )  # fmt: skip

    summary = run(written, session=spark, now_ms=NOW_MS)

    assert summary.balanced
    assert sorted(
        (one.scope, one.rule, one.of, one.count) for one in summary.verdict_counts if one.state == "unknown"
    ) == [
        ("business", "message_unknown", "paid orders are announced", 5),
        ("delivery", "message_out_of_reach", "tickets", 5),
        ("message", "broker_out_of_reach", "", 5),
    ]


def test_segments_outside_the_times_asked_for_are_not_opened_and_other_rows_are_not_made(tmp_path: Path) -> None:
    world = _world(10)
    actions = sorted(world.actions, key=lambda action: action.at_ms)
    paths = write_log(tmp_path / "actions", actions, 5)
    segments = [
        msgspec.structs.replace(one, created_at_ms=number * 10 * HOUR_MS)
        for number, one in enumerate(survey(tmp_path, "actions"))
    ]
    reader = PushingLogReader(segments, rows_of=action_rows, columns=_columns(RUN_SCHEMA))
    since, until = GreaterThanOrEqual(("at_ms",), 32 * HOUR_MS), LessThan(("at_ms",), 38 * HOUR_MS)

    left = list(
        reader.pushFilters([EqualTo(("kind",), "acked"), In(("consumer_group",), ("mail", "none")), since, until])
    )
    parts = [part for part in reader.partitions() if isinstance(part, SegmentPart)]

    assert left == [since, until], "Spark looks at the rows' times itself"
    assert [part.number for part in parts] == [3]
    everything = PushingLogReader(segments, rows_of=action_rows, columns=_columns(RUN_SCHEMA))
    assert list(everything.pushFilters([EqualTo(("kind",), "acked"), In(("consumer_group",), ("mail", "none"))])) == []
    assert len(everything.partitions()) == len(paths)
    rows = [row for part in everything.partitions() for batch in everything.read(part) for row in batch.to_pylist()]
    assert {(row["kind"], row["consumer_group"]) for row in rows} == {("acked", "mail")}
    assert [row["sequence"] for row in rows] == list(range(10))


@pytest.mark.spark
def test_spark_pushes_into_the_log_where_it_is_asked_to(written: Settings, spark: SparkSession) -> None:
    segments = msgspec.json.encode(survey(written.broker_data, "actions")).decode()
    options = {"log": "actions", "segments": segments, "pushdown": "true"}
    frame = spark.read.format("outbox_broker_log").options(**options).load()

    assert frame.where(f"kind = 'acked' and consumer_group = 'mail' and at_ms < {NOW_MS}").count() == 10


def test_every_kind_of_action_becomes_rows(tmp_path: Path) -> None:
    common: dict[str, Any] = {"topic": "t", "group": "g", "at_ms": 7}
    actions = [
        journal.Declared(**common, position=3, settings={}),
        journal.Fired(topic="t", at_ms=7, entries=[(3, "a")]),
        journal.Handed(**common, visible_at_ms=9, runs=[journal.HandedRun(3, 2, 1, 1)]),
        journal.Extended(**common, visible_at_ms=19, entries=[(3, 1)]),
        journal.Requeued(**common, entries=[(3, 1, 11, 1)], reason="no"),
        journal.Settled(**common, runs=[(4, 1)]),
        journal.Died(**common, entries=[(3, 1, 2)], reason="no"),
        journal.Redriven(**common, entries=[(3, 1)]),
        journal.Sought(**common, position=9, generation=2),
        journal.Paused(**common, paused=True),
        journal.Paused(**common, paused=False),
        journal.Canceled(at_ms=7, ids=["c"], topics=[""]),
        journal.Dropped(**common, position=5),
    ]
    write_log(tmp_path / "actions", actions, 100)

    rows = _read_log("actions", survey(tmp_path, "actions"))

    assert [(row["kind"], row["id"], row["sequence"], row["visible_at_ms"]) for row in rows] == [
        ("declared", None, 3, None), ("fired", "a", 3, None), ("delivered", None, 3, 9), ("extended", None, 3, 19),
        ("requeued", None, 3, 11), ("acked", None, 4, None), ("died", None, 3, None), ("redriven", None, 3, 7),
        ("sought", None, 9, None), ("paused", None, None, None), ("resumed", None, None, None),
        ("canceled", "c", None, None), ("dropped", None, 5, None),
    ]  # fmt: skip
    assert all(row["at_ms"] == 7 for row in rows)


def test_actions_on_runs_become_a_row_a_run(tmp_path: Path) -> None:
    common: dict[str, Any] = {"topic": "t", "group": "g", "at_ms": 7}
    actions = [
        journal.Handed(
            **common, visible_at_ms=9, runs=[journal.HandedRun(3, 500, 1, 2), journal.HandedRun(900, 2, 1, 1)]
        ),
        journal.Extended(**common, visible_at_ms=19, entries=[(3, 2)]),
        journal.Requeued(**common, entries=[(3, 4, 11, 1)], reason="no"),
        journal.Settled(**common, runs=[(7, 490), (900, 1)]),
        journal.Died(**common, entries=[(499, 4, 2)], reason="no"),
        journal.Redriven(**common, entries=[(499, 3), (502, 1)], per_second=2),
        RedriveStopped(**common, entries=[(501, 2)], by="ops"),
        ClockStepped(at_ms=7, by_ms=-9),
        Discarded(**common, entries=[(600, 2)], by="ops", why="paid by hand"),
        Edited(**common, entries=[(700, 4_000, 90, "edit-1")], by="ops", why="typo"),
        journal.MovedAside(
            **common, entries=[(800, 6_000, 90, 5), (801, (1 << 64) - 1, 0, 5), (802, 6_100, 90, 6)], moved_to=803
        ),
    ]
    write_log(tmp_path / "actions", actions, 100)

    rows = _read_log("actions", survey(tmp_path, "actions"))

    names = ("kind", "id", "sequence", "messages", "visible_at_ms", "attempt")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("delivered", None, 3, 500, 9, 2), ("delivered", None, 900, 2, 9, 1), ("extended", None, 3, 2, 19, None),
        ("requeued", None, 3, 4, 11, 1), ("acked", None, 7, 490, None, None), ("acked", None, 900, 1, None, None),
        ("died", None, 499, 4, None, 2),
        ("redriven", None, 499, 2, 7, None), ("redriven", None, 501, 1, 1_000, None),
        ("redriven", None, 502, 1, 1_000, None), ("redrive_stopped", None, 501, 2, None, None),
        ("discarded", None, 600, 2, None, None), ("edited", None, 700, 1, 7, 4_000),
        ("aside", None, 800, None, 5, 6_000), ("aside", None, 802, None, 6, 6_100),
    ]  # fmt: skip


@pytest.mark.spark
def test_each_message_of_a_run_has_its_action_under_its_id(spark: SparkSession) -> None:
    runs = spark.createDataFrame(
        [
            ("fired", "t", None, "c", 2, 1, 5, None, None, None, None, None),
            ("fired", "t", None, "c", 2, 2, 6, None, None, None, None, None),  # told again after a restart
            ("delivered", "t", "g", None, 0, 3, 7, 9, 1, None, 3, None),
            ("acked", "t", "g", None, 1, 4, 8, None, None, None, 3, None),
        ],
        RUN_SCHEMA,
    )
    messages = spark.createDataFrame(
        [("a", "t", 0), ("b", "t", 1), ("c", "t", None), ("c", "t", 2)],
        "id string, topic string, sequence bigint",
    )

    def found(*, is_whole: bool) -> list[tuple[Any, ...]]:
        named = named_runs(runs, messages, is_whole=is_whole)
        assert named.columns == _columns(ACTION_SCHEMA)
        rows = named.select("kind", "id", "sequence", "at_ms", "position").collect()
        return sorted(tuple(row) for row in rows)

    known = [
        ("acked", "b", 1, 8, 4), ("acked", "c", 2, 8, 4),
        ("delivered", "a", 0, 7, 3), ("delivered", "b", 1, 7, 3), ("delivered", "c", 2, 7, 3),
    ]  # fmt: skip
    assert found(is_whole=False) == known
    assert found(is_whole=True) == sorted([*known, ("acked", "t#3", 3, 8, 4)])
    assert [(row["kind"], row["id"]) for row in single(runs).collect()] == [("fired", "c"), ("fired", "c")]


def test_redriven_letters_are_ready_so_many_a_second(tmp_path: Path) -> None:
    letters = [(sequence, 1) for sequence in range(5)]
    common: dict[str, Any] = {"topic": "t", "group": "g", "at_ms": 7_000, "entries": letters}
    actions = [journal.Redriven(**common, per_second=2), journal.Redriven(**common)]
    write_log(tmp_path / "actions", actions, 100)

    rows = _read_log("actions", survey(tmp_path, "actions"))

    assert [row["visible_at_ms"] for row in rows] == [7_000, 7_000, 8_000, 8_000, 9_000, *[7_000] * 5]


def test_a_redriven_letter_is_ready_when_the_broker_says_also_behind_an_earlier_redrive(
    tmp_path: Path, clock: ManualClock
) -> None:
    with closing(Engine.open(tmp_path, clock=clock, options=EngineOptions(redrive_batch_max=3))) as engine:
        engine.admin.declare_group("t", "g", GroupConfig(max_attempts=1))
        engine.publisher.publish([Message(id=f"m{number}", topic="t", body=b"") for number in range(12)])
        engine.settler.nack([one.receipt for one in engine.puller.pull("t", "g", max_messages=12)], delay_ms=0)
        engine.dead_letters.redrive("t", "g", ids=[f"m{number}" for number in range(8)], per_second=2)
        clock.advance(1_500)
        engine.dead_letters.redrive("t", "g", per_second=3)
        group = engine.context.state.group("t", "g")
        assert group is not None
        ready = {at: held.visible_at_ms for held in group.unsettled for at in range(held.first, held.end)}

    rows = _read_log("actions", survey(tmp_path, "actions"))

    told = {
        at: row["visible_at_ms"]
        for row in rows
        if row["kind"] == "redriven"
        for at in range(row["sequence"], row["sequence"] + row["messages"])
    }
    assert told == ready
    assert sorted(Counter(told.values()).values()) == [2, 2, 2, 3, 3]


def test_a_folder_that_is_no_brokers_is_refused_with_the_cure(written: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="outbox broker serve --data"):
        check_sources(replace(written, broker_data=tmp_path / "nowhere"))


def test_ranges_cover_every_row_once_even_rows_without_a_value(sqlite: Database) -> None:
    engine = create_engine(sqlite.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (id INTEGER PRIMARY KEY, at INTEGER)"))
        connection.execute(text("INSERT INTO t (id, at) VALUES (1, NULL), (2, 10), (3, 20), (4, 30), (5, 40), (6, 41)"))
    engine.dispose()
    statement = Statement(
        input_kind=InputKind.BUSINESS, table="t", columns={"id": "CAST(id AS TEXT)"}, constants={"topic": "x"},
        range_by="at", rows_about=700_000,
    )  # fmt: skip
    reader = SqlReader(DatabaseAddress.of(sqlite.url), [statement], snapshot=False)

    parts = [part for part in reader.partitions() if isinstance(part, Part)]
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]

    assert len(parts) == 3
    assert sorted(row["id"] for row in rows) == ["1", "2", "3", "4", "5", "6"]
    assert {row["topic"] for row in rows} == {"x"}


def test_comparisons_are_evaluated_by_the_database(written: Settings) -> None:
    plan = check_sources(written)
    since_ms = NOW_MS - 2 * HOUR_MS + 5 * MINUTE_MS
    late, input_kind, pattern = (
        GreaterThanOrEqual(("created_ms",), since_ms),
        EqualTo(("input_kind",), "archive"),
        StringStartsWith(("id",), "x"),
    )
    reader = PushingSqlReader(DatabaseAddress.of(written.database_url), list(plan.rest[0].statements), snapshot=True)

    left = list(reader.pushFilters([late, input_kind, pattern]))
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    assert left == [input_kind, pattern]
    assert {row["input_kind"] for row in rows} == {"archive"}
    assert len(rows) == 5


@pytest.mark.spark
def test_spark_pushes_its_comparisons_down_where_it_is_asked_to(written: Settings, spark: SparkSession) -> None:
    frame = _frame(spark, written, pushdown="true")

    assert frame.where(f"input_kind = 'archive' and created_ms >= {NOW_MS - 2 * HOUR_MS + 5 * MINUTE_MS}").count() == 5


@pytest.mark.spark
def test_two_filters_on_one_frame_do_not_disturb_each_other(written: Settings, spark: SparkSession) -> None:
    frame = _frame(spark, written, pushdown="false")

    both = frame.where("input_kind = 'archive'").union(frame.where("input_kind = 'business'"))

    assert sorted(row["input_kind"] for row in both.collect()) == ["archive"] * 10 + ["business"] * 10


def test_large_tables_are_read_one_after_the_other_and_small_ones_in_one_snapshot(written: Settings) -> None:
    small = check_sources(written)
    large = check_sources(replace(written, limits=RunLimits(snapshot_rows_max=5)))

    assert [read.snapshot for read in small.rest] == [True]
    assert [(read.snapshot, read.statements[0].input_kind) for read in large.rest] == [
        (False, InputKind.OUTBOX), (False, InputKind.ARCHIVE), (False, InputKind.BUSINESS), (False, InputKind.BUSINESS),
    ]  # fmt: skip


def test_java_is_set_for_how_much_there_is_to_read(written: Settings) -> None:
    limits = (RunLimits(), RunLimits(snapshot_rows_max=5), RunLimits(snapshot_rows_max=5, medium_rows_max=5))
    sizes = [check_sources(replace(written, limits=one)).size for one in limits]

    assert sizes == [Size.SMALL, Size.MEDIUM, Size.LARGE]


@pytest.mark.spark
def test_reading_in_ranges_gives_the_same_verdicts_as_one_snapshot(
    mysql_like: Database, tmp_path: Path, spark: SparkSession
) -> None:
    settings = replace(_world(10).write(mysql_like, tmp_path), limits=RunLimits(snapshot_rows_max=0))

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert summary.balanced
    assert (summary.business_rows, summary.messages, summary.message_groups) == (10, 10, 20)


@pytest.mark.parametrize("kind", ["DATETIME", "DATETIME(6)", "TIMESTAMP", "BIGINT"])
def test_times_of_every_type_are_read_as_utc(mysql_like: Database, kind: str) -> None:
    value = "1767323045000000" if kind == "BIGINT" else "'2026-01-02 03:04:05'"
    engine = create_engine(mysql_like.url)
    with engine.begin() as connection:
        connection.execute(text("SET time_zone = '+00:00'"))
        connection.execute(text(f"CREATE TABLE paid (id INT PRIMARY KEY, at {kind} NULL)"))
        connection.execute(text(f"INSERT INTO paid VALUES (7, {value})"))
    engine.dispose()

    rows = _business_rows(mysql_like, "paid")

    assert [(row["message_key"], row["created_ms"]) for row in rows] == [("7", 1_767_323_045_000)]


def test_a_server_whose_certificate_another_authority_signed_is_refused(mysql: Database, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "authority")

    with pytest.raises(DatabaseUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        read_clock(f"{mysql.url}?ssl_ca={stranger.file}")


def test_the_name_in_the_certificate_of_a_server_is_checked_unless_the_url_says_otherwise(mysql: Database) -> None:
    engine = create_engine(mysql.url)
    with engine.connect() as connection:
        [(_, ca)] = connection.exec_driver_sql("SHOW VARIABLES LIKE 'ssl_ca'")
        [(_, folder)] = connection.exec_driver_sql("SHOW VARIABLES LIKE 'datadir'")
    engine.dispose()
    own = Path(folder) / ca

    with pytest.raises(DatabaseUnavailable, match=r"Hostname mismatch|IP address mismatch"):
        read_clock(f"{mysql.url}?ssl_ca={own}")
    assert read_clock(f"{mysql.url}?ssl_ca={own}&ssl_check_hostname=false") > 0


def test_a_misspelled_flag_does_not_leave_the_name_of_a_server_unchecked() -> None:
    with pytest.raises(ConfigurationError, match="ssl_check_hostname is true or false, not 'ture'"):
        DatabaseAddress.of("mysql+pymysql://u@h/d?ssl_check_hostname=ture")


def read_clock(url: str) -> int:
    with reading(DatabaseAddress.of(url)) as reader:
        return reader.now_ms()


def test_a_database_tells_its_own_clock(mysql_like: Database) -> None:
    with reading(DatabaseAddress.of(mysql_like.url)) as reader:
        reader.rows("SET SESSION timestamp = 1767323045.5")

        assert reader.now_ms() == 1_767_323_045_500


@pytest.mark.parametrize(("ahead_ms", "patience"), [(0, (60, 1)), (999, (60, 1)), (-3_600_000, (3_660, 3_600))])
def test_clocks_that_are_apart_make_a_run_as_patient(
    written: Settings, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, patience: tuple[float, float]
) -> None:
    monkeypatch.setattr("spark_reconcile.load.read_plan.time.time_ns", lambda: NOW_MS * 1_000_000)
    monkeypatch.setattr(DbApiReader, "now_ms", lambda _: NOW_MS + ahead_ms)

    plan = check_sources(written)

    grace = plan.allowing(written).grace
    assert (grace.seconds, grace.clock_skew_seconds) == patience
    assert list(plan.clocks.values()) == ([ahead_ms] if abs(ahead_ms) > 1_000 else [])


@pytest.mark.parametrize(("ahead_ms", "earlier_ms"), [(-2 * HOUR_MS - 1, 121 * MINUTE_MS), (2 * HOUR_MS, 0), (0, 0)])
def test_an_inbox_is_read_from_where_a_span_begins_by_its_own_clock(
    written: Settings, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, earlier_ms: int
) -> None:
    monkeypatch.setattr("spark_reconcile.load.read_plan.time.time_ns", lambda: NOW_MS * 1_000_000)
    monkeypatch.setattr(DbApiReader, "now_ms", lambda _: NOW_MS + ahead_ms)

    plan = check_sources(written, span=Span(since_ms=NOW_MS - HOUR_MS, until_ms=NOW_MS))

    (inbox,) = [one for read in plan.inboxes for one in read.statements]
    assert inbox.parameters[-1] == (NOW_MS - HOUR_MS - earlier_ms) * 1000


def test_two_servers_of_one_machine_are_told_apart_by_their_sockets() -> None:
    urls = [f"mysql+pymysql://u:secret@localhost/shop?unix_socket=/run/{name}.sock" for name in ("a", "b")]

    assert [str(DatabaseAddress.of(url)) for url in urls] == [
        "localhost (/run/a.sock)/shop",
        "localhost (/run/b.sock)/shop",
    ]
    assert str(DatabaseAddress.of("mysql+pymysql://u:secret@localhost:3307/shop")) == "localhost:3307/shop"


def test_conditions_are_bound_and_combine(sqlite: Database) -> None:
    engine = create_engine(sqlite.url)
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE paid (id INTEGER PRIMARY KEY, at BIGINT, status TEXT, cents INT, gone INT)")
        )
        connection.execute(
            text(
                "INSERT INTO paid VALUES (1, 0, 'PAID', 5, NULL), (2, 0, 'SENT', 50, NULL), (3, 0, 'PAID', 50, 1), "
                "(4, 0, 'OPEN', 50, NULL), (5, 0, 'x'' OR 1=1 --', 50, NULL)"
            )
        )
    engine.dispose()
    where = [
        Condition(column="status", operator=Operator.IN, values=("PAID", "SENT", "x' OR 1=1 --")),
        Condition(column="cents", operator=Operator.AT_LEAST, values=(50,)),
        Condition(column="gone", operator=Operator.IS_NULL),
    ]

    assert [row["message_key"] for row in _business_rows(sqlite, "paid", where=where)] == ["2", "5"]


def test_what_is_not_there_is_named_before_any_work(written: Settings, tmp_path: Path) -> None:
    rule = written.rules[0]
    wrong: list[tuple[Settings, type[Exception], str]] = [
        (
            replace(written, rules=[replace(rule, table="order")]),
            ConfigurationError,
            "no table order .*mean orders?",
        ),
        (replace(written, rules=[replace(rule, key_column="idd")]), ConfigurationError, "did you mean id?"),
        (replace(written, rules=[replace(rule, time_column="status")]), ConfigurationError, "times are integers"),
        (replace(written, rules=[replace(rule, table='o"; drop')]), ConfigurationError, "no table"),
        (replace(written, database_url=f"sqlite:///{tmp_path / 'none.db'}"), DatabaseUnavailable, "none.db"),
        (replace(written, database_url="mysql+pymysql://u:secret@127.0.0.1:1/x"), DatabaseUnavailable, "127.0.0.1:1/x"),
        (replace(written, database_url="postgresql://u:secret@h/x"), ConfigurationError, "mysql"),
        (replace(written, database_url="mysql://u:secret@h:port/x"), ConfigurationError, "cannot be taken apart"),
    ]

    for settings, error, message in wrong:
        with pytest.raises(error, match=message) as raised:
            check_sources(settings)
        assert "secret" not in str(raised.value)


@pytest.mark.spark
def test_a_table_that_fails_while_it_is_read_is_said_in_one_line(
    written: Settings, sqlite: Database, spark: SparkSession
) -> None:
    engine = create_engine(sqlite.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_archive SET attempts = 'many' WHERE id = 'good-3'"))
    engine.dispose()

    with pytest.raises(NotComparable, match="failed while it was read") as raised:
        run(written, session=spark, now_ms=NOW_MS)

    assert len(str(raised.value).splitlines()) == 1
    assert "many" in str(raised.value)


def test_missing_outbox_tables_name_the_command_that_makes_them(sqlite: Database, written: Settings) -> None:
    engine = create_engine(sqlite.url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outbox_archive"))
    engine.dispose()

    with pytest.raises(SchemaMissing, match="outbox db upgrade"):
        check_sources(written)


def _frame(spark: SparkSession, settings: Settings, *, pushdown: str) -> DataFrame:
    statements = msgspec.json.encode(check_sources(settings).rest[0].statements).decode()
    options = {"url": settings.database_url, "statements": statements, "snapshot": "true", "pushdown": pushdown}
    return spark.read.format("outbox_sql").options(**options).load()


def _world(count: int) -> World:
    world = World()
    world.groups()
    for number in range(count):
        world.settled(age_ms=2 * HOUR_MS - number * MINUTE_MS)
    return world


def _business_rows(database: Database, table: str, *, where: list[Condition] | None = None) -> list[dict[str, Any]]:
    from spark_reconcile import BusinessRule

    rule = BusinessRule(name="r", table=table, key_column="id", time_column="at", topic=PAID, where=where or [])
    address = DatabaseAddress.of(database.url)
    with reading(address) as reader:
        statement = business_statement(reader, rule, 0)
    return [
        row for batch in SqlReader(address, [statement], snapshot=True).read(Part((0,))) for row in batch.to_pylist()
    ]


def _log_rows(settings: Settings, log: str, *, segments: list[Any] | None = None) -> list[dict[str, Any]]:
    return _read_log(log, segments or survey(settings.broker_data, log))


def _columns(schema: str) -> list[str]:
    return [column.split()[0] for column in schema.split(", ")]


def _read_log(log: str, segments: list[Any]) -> list[dict[str, Any]]:
    return list(_rows_of(log, segments))


def _rows_of(log: str, segments: list[Any]) -> Iterator[dict[str, Any]]:
    from pyspark.sql.types import StructType

    source = BrokerLogSource({"log": log, "segments": msgspec.json.encode(segments).decode()})
    reader = source.reader(StructType())
    for part in reader.partitions():
        with closing(reader.read(part)) as batches:  # type: ignore[arg-type]
            for batch in batches:
                yield from batch.to_pylist()
