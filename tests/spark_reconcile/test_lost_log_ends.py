"""Where the broker's logs end: a torn tail is named, and a lost end that the actions prove is never judged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.messages.message import Message
from spark_reconcile import NotComparable, Settings, run
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.load.lost_log_ends import beyond_the_end, torn_tail
from spark_reconcile.load.read_plan import check_sources
from spark_reconcile.load.source_reader import read_all
from spark_reconcile.sources import broker_logs as segments_module
from spark_reconcile.sources.broker_logs import LogSegment, survey
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import blocks_in
from tests.outbox_broker.message_log import stored_messages
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def world() -> World:
    """Four orders whose messages went all the way."""
    world = World()
    world.groups()
    for _ in range(4):
        world.settled(age_ms=2 * HOUR_MS)
    return world


@pytest.fixture
def written(world: World, sqlite: Database, tmp_path: Path) -> Settings:
    """The world on SQLite, a segment a log."""
    return world.write(sqlite, tmp_path)


def test_a_last_record_that_is_cut_short_anywhere_is_a_torn_tail_that_is_named(written: Settings) -> None:
    path, begins = _last_record(written)
    good = path.read_bytes()

    for size in range(begins + 1, len(good)):
        path.write_bytes(good[:size])
        told = torn_tail(survey(written.broker_data, "messages"))
        assert told == f"torn tail of {size - begins} bytes at {path}: read up to it"


@pytest.mark.parametrize("log", ["messages", "actions"])
def test_an_end_that_is_gone_though_it_was_durable_is_refused_also_between_two_blocks(tmp_path: Path, log: str) -> None:
    engine = Engine.open(tmp_path)
    engine.publisher.publish([Message(id="first", topic=PAID, body=b"")])
    engine.publisher.publish([Message(id="last", topic=PAID, body=b"")])
    engine.puller.pull(PAID, "g")
    engine.close()
    [path] = (tmp_path / log).glob("*.segment")
    survey(tmp_path, log)
    *_, last = blocks_in(path)
    os.truncate(path, last.position)

    with pytest.raises(NotComparable, match=f"{path} ends at {last.position} bytes, before what was durable"):
        survey(tmp_path, log)


@pytest.mark.parametrize("behind", [b"", bytes(4096)], ids=["whole", "zeros"])
def test_a_log_that_ends_with_a_record_or_with_zeros_has_no_torn_tail(written: Settings, behind: bytes) -> None:
    path, _ = _last_record(written)
    path.write_bytes(path.read_bytes() + behind)

    assert torn_tail(survey(written.broker_data, "messages")) == ""


def test_a_record_that_was_just_being_written_is_no_torn_tail(written: Settings) -> None:
    path, _ = _last_record(written)
    good = path.read_bytes()
    path.write_bytes(good[:-7])
    half = survey(written.broker_data, "messages")
    path.write_bytes(good)

    assert torn_tail(half) == ""


@pytest.mark.spark
def test_a_lost_end_that_the_actions_prove_is_refused_with_the_file_to_restore(
    spark: SparkSession, written: Settings
) -> None:
    path, _ = _last_record(written)
    path.write_bytes(path.read_bytes()[:-5])

    with pytest.raises(
        NotComparable, match=f"message 3 of {PAID} .*last one there is 2.*torn tail of .*Restore {path}"
    ):
        run(written, session=spark, now_ms=NOW_MS)

    assert not (written.output / "manifest.json").exists()


@pytest.mark.spark
def test_a_torn_tail_that_nobody_was_handed_is_read_up_to_and_told_in_the_report(
    spark: SparkSession, written: Settings
) -> None:
    path, _ = _last_record(written)
    with path.open("ab") as file:
        file.write(b"\x20\x00\x00\x00torn")

    summary = run(written, session=spark, now_ms=NOW_MS)

    told = f"torn tail of 8 bytes at {path}: read up to it"
    assert summary.balanced
    assert [one.note for one in summary.inputs if one.what == "message log"] == [told]
    assert told in (Path(summary.folder) / "report.html").read_text()


@pytest.mark.spark
def test_a_broker_that_writes_while_it_is_read_is_looked_at_again_before_it_is_refused(
    spark: SparkSession, written: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begins = _last_record(written)
    good = path.read_bytes()
    plan = check_sources(written)
    path.write_bytes(good[:begins])

    look: Callable[[Path, str], list[LogSegment]] = segments_module.survey

    def grows(folder: Path, log: str) -> list[LogSegment]:
        found = look(folder, log)
        if log == "messages":
            path.write_bytes(good)
        return found

    monkeypatch.setattr("spark_reconcile.load.source_reader.survey", grows)

    evidence = read_all(spark, written, plan, now_ms=NOW_MS, say=lambda _: None)

    evidence.release()
    assert evidence.torn["message log"] == ""


@pytest.mark.parametrize(
    ("held", "is_whole", "refused"),
    [
        ({PAID: 7}, True, False),
        ({PAID: 6}, True, True),
        ({PAID: 6}, False, True),
        ({}, True, True),
        ({}, False, False),
    ],
)
def test_what_was_dropped_of_a_log_is_no_lost_end(held: dict[str, int], is_whole: bool, refused: bool) -> None:
    counts = [_count("messages", topic, "", place) for topic, place in held.items()]
    counts += [_count("actions", PAID, "delivered mail", 7), _count("actions", PAID, "sought mail", 99)]

    assert bool(beyond_the_end(counts, is_whole=is_whole)) is refused


def _count(input_kind: str, topic: str, note: str, place: int) -> InputCount:
    return InputCount(input_kind=input_kind, topic=topic, note=note, rows=1, first_ms=1, last_ms=1, last_sequence=place)


def _last_record(settings: Settings) -> tuple[Path, int]:
    """The last segment of the message log, and where its last block begins in the file."""
    path = Path(survey(settings.broker_data, "messages")[-1].path)
    return path, stored_messages(path)[-1].block
