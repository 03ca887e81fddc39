"""What a group does with messages that it has aside from their topic, whose segments are gone, is judged as ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.messages.message import DeadEdit, GroupConfig, Message
from spark_reconcile import InboxSource, Settings, run, run_windows
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.sources.broker_logs import begins_whole, survey
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.message_log import damage_message, message_segments
from tests.spark_reconcile.timed_ids import timed_id
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_MS = 24 * HOUR_MS
BEGAN_MS = NOW_MS - 5 * DAY_MS
OTHER = "weather"
EDIT = DeadEdit(body=b"corrected")
WHOLE, CUT = 1 << 26, 4096
"""So many bytes of actions between two checkpoints: the action log has its beginning still, or has lost it."""
Verdict = tuple[str, str, str]


@dataclass
class Letters:
    """Orders whose messages die in the group of the tickets, and what it does with them from then on."""

    world: World
    folder: Path
    checkpoint_bytes: int
    clock: ManualClock = field(default_factory=lambda: ManualClock(BEGAN_MS))
    ids: dict[str, str] = field(default_factory=dict)
    """By the name of an order, the id that its message has now for the group."""
    published: dict[str, str] = field(default_factory=dict)
    """By the id of a message, the name of its order."""
    numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The broker at work on the folder."""
        options = EngineOptions(
            segment_bytes=4096, checkpoint_bytes=self.checkpoint_bytes, retention_ms=DAY_MS, retention_check_ms=10**15
        )
        engine = Engine.open(self.folder, clock=self.clock, options=options)
        try:
            yield engine
        finally:
            engine.close()

    def publish(self, engine: Engine, *names: str) -> None:
        """Orders, each with its message, which the outbox has sent."""
        for name in names:
            now_ms = self.clock.now_ms()
            key, message_id = str(self.world.order(age_ms=NOW_MS - now_ms)), timed_id(name, now_ms)
            self.ids[name], self.published[message_id] = message_id, name
            self.world.sent(message_id, key=key, age_ms=NOW_MS - now_ms)
            engine.publisher.publish(
                [Message(id=message_id, topic=PAID, key=key, body=message_id.encode(), created_at_ms=now_ms)]
            )

    def fail(self, engine: Engine) -> None:
        """All that the group gets dies."""
        engine.settler.nack([one.receipt for one in engine.puller.pull(PAID, TICKETS, max_messages=100)], reason="no")

    def edit(self, engine: Engine, *names: str) -> None:
        """Dead letters become others, and are ready."""
        operation = EditOperation(name=f"op-{next(self.numbers)}", by="ops", why="typo")
        edits = {self.ids[name]: EDIT for name in names}
        new_ids = {one.id: one.new_id for one in engine.dead_letters.edit(PAID, TICKETS, edits, operation=operation)}
        self.ids.update({name: new_ids[self.ids[name]] or "" for name in names})

    def redrive(self, engine: Engine, *names: str) -> None:
        """Dead letters are ready again."""
        assert engine.dead_letters.redrive(PAID, TICKETS, ids=[self.ids[name] for name in names]) == len(names)

    def settle(self, engine: Engine, *, unhandled: tuple[str, ...] = ()) -> None:
        """All that the group gets is acknowledged, and handled but for these."""
        names = {message_id: name for name, message_id in self.ids.items()}
        for one in engine.puller.pull(PAID, TICKETS, max_messages=100):
            if names[one.id] not in unhandled:
                self.world.handle(one.id, age_ms=NOW_MS - self.clock.now_ms())
            assert engine.settler.ack([one.receipt]) == ["acked"]

    def grow_old(self, engine: Engine) -> int:
        """A day of another topic goes by, and what is old is dropped; returns how many messages were moved for it."""
        before = engine.cleaner.moved_messages
        for _ in range(16):
            engine.publisher.publish(
                [Message(id=f"other-{next(self.numbers)}", topic=OTHER, body=b"." * 100) for _ in range(40)]
            )
            while found := engine.puller.pull(OTHER, MAIL, max_messages=5):
                engine.settler.ack([one.receipt for one in found])
            engine.writer.write_checkpoint_if_due()
        engine.context.messages.roll()
        engine.publisher.publish([Message(id=f"other-{next(self.numbers)}", topic=OTHER, body=b".")])
        engine.settler.ack([one.receipt for one in engine.puller.pull(OTHER, MAIL)])
        self.clock.advance(DAY_MS)
        assert engine.retention.drop_outdated() > 5
        return engine.cleaner.moved_messages - before

    def stand_still(self, engine: Engine) -> None:
        """A day on which there are actions, and what is old is not worth being moved once more."""
        moved, before = engine.cleaner.moved_messages, len(message_segments(self.folder))
        engine.publisher.publish([Message(id="other-busy", topic=OTHER, body=b".")])
        for _ in range(300):
            engine.settler.nack(
                [one.receipt for one in engine.puller.pull(OTHER, MAIL)], reason="busy", delay_ms=0, counts=False
            )
            engine.writer.write_checkpoint_if_due()
        engine.context.messages.roll()
        engine.publisher.publish([Message(id="other-last", topic=OTHER, body=b".")])
        self.clock.advance(DAY_MS)
        engine.retention.drop_outdated()
        assert (engine.cleaner.moved_messages, len(message_segments(self.folder))) == (moved, before + 1)
        assert not [one for one in actions_of(self.folder) if isinstance(one, journal.MovedAside)]

    def settings(self, database: Database, folder: Path) -> Settings:
        """Reconciles what was done."""
        return replace(
            self.world.write(database, folder), broker_data=self.folder, inboxes=[InboxSource(group=TICKETS)],
            archive_days=30, inbox_days=30,
        )  # fmt: skip

    def verdicts(self, rows: list[dict[str, Any]]) -> set[Verdict]:
        """What a run says of the orders' messages in groups, by name."""
        return {
            (self.published[row["message_id"]], row["consumer_group"], row["rule"])
            for row in rows
            if row["consumer_group"] and row["topic"] == PAID
        }


def _found(*folders: Path) -> list[dict[str, Any]]:
    tables = [folder / "verdicts" for folder in folders]
    return [row for table in tables if table.exists() for row in pq.read_table(table).to_pylist()]


EDITED = ("edited", "edited-lost", "edited-twice", "edited-late")


def _work(letters: Letters, *, restarts: bool, moves: int, stands_still: bool = False) -> None:
    """Messages die, are dropped from their topic, and then come to all the ends that there are."""
    with letters.engine() as engine:
        for group in (TICKETS, MAIL):
            engine.admin.declare_group(PAID, group, GroupConfig(max_attempts=1))
        engine.admin.declare_group(OTHER, MAIL, GroupConfig())
        letters.publish(engine, "fine")
        letters.settle(engine)
        letters.publish(engine, "lost", "done", "stays", "discarded", "waits", *EDITED)
        engine.settler.ack([one.receipt for one in engine.puller.pull(PAID, MAIL, max_messages=100)])
        letters.fail(engine)
        letters.edit(engine, "edited", "edited-lost", "edited-twice")  # and "edited-late" when it was moved
        letters.fail(engine)
        letters.clock.advance(MINUTE_MS)
        for _ in range(moves):
            assert letters.grow_old(engine) == 9
        if stands_still:
            letters.stand_still(engine)
        if not restarts:
            _end(letters, engine)
    if restarts:
        with letters.engine() as engine:
            _end(letters, engine)
    assert not begins_whole(survey(letters.folder, "messages"))
    assert begins_whole(survey(letters.folder, "actions")) is (letters.checkpoint_bytes == WHOLE)


def _end(letters: Letters, engine: Engine) -> None:
    letters.edit(engine, "edited-twice", "edited-late")
    letters.redrive(engine, "lost", "done", "edited", "edited-lost")
    letters.settle(engine, unhandled=("lost", "edited-lost"))
    engine.dead_letters.discard(PAID, TICKETS, ids=[letters.ids["discarded"]], by="ops", why="wrong")
    letters.redrive(engine, "waits")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("checkpoint_bytes", "restarts", "moves", "stands_still"),
    [(WHOLE, True, 1, False), (CUT, False, 1, False), (CUT, True, 2, False), (CUT, False, 1, True)],
    ids=["all actions are there", "those before it are not", "nor its first move", "nor its only move"],
)  # fmt: skip
def test_what_becomes_of_a_moved_message_is_judged_and_a_loss_of_it_is_found(
    spark: SparkSession,
    sqlite: Database,
    tmp_path: Path,
    checkpoint_bytes: int,
    restarts: bool,
    moves: int,
    stands_still: bool,
) -> None:
    letters = Letters(World(), tmp_path / "engine", checkpoint_bytes)
    _work(letters, restarts=restarts, moves=moves, stands_still=stands_still)

    summary = run(letters.settings(sqlite, tmp_path), session=spark, now_ms=NOW_MS, pause=no_wait)

    rows = _found(Path(summary.folder))
    assert {row["message_id"] for row in rows if row["topic"] == PAID} == set(letters.published)
    is_whole = checkpoint_bytes == WHOLE
    assert letters.verdicts(rows) == {
        ("lost", TICKETS, "acknowledged_not_handled"), ("edited-lost", TICKETS, "acknowledged_not_handled"),
        ("done", TICKETS, "done"), ("edited", TICKETS, "edited" if is_whole else "done"),
        ("edited-twice", TICKETS, "edited"), ("edited-late", TICKETS, "edited"), ("waits", TICKETS, "not_redelivered"),
        ("discarded", TICKETS, "discarded"),
        ("stays", TICKETS, "dead" if is_whole else "action_log_out_of_reach"),
        ("fine", TICKETS, "message_out_of_reach"),
    }  # fmt: skip
    findings = {
        (letters.published[row["message_id"]], row["confirmed"]) for row in rows if row["severity"] == "finding"
    }
    assert findings == {("lost", True), ("edited-lost", True)}


@pytest.mark.spark
def test_a_run_by_the_hour_finds_the_same_in_the_hour_of_the_message(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    letters = Letters(World(), tmp_path / "engine", CUT)
    _work(letters, restarts=False, moves=1)
    settings = letters.settings(sqlite, tmp_path)

    run_windows(settings, since_ms=BEGAN_MS, until_ms=BEGAN_MS + HOUR_MS, session=spark, now_ms=NOW_MS, pause=no_wait)

    store = WindowStore(settings.output)
    rows = _found(*(store.folder(start) for start in store.windows))
    found = letters.verdicts(rows)
    assert {name for name, _, rule in found if rule == "acknowledged_not_handled"} == {"lost", "edited-lost"}
    assert {name for name, _, rule in found if rule in {"done", "edited"}} == {
        "done", "edited", "edited-twice", "edited-late",
    }  # fmt: skip
    assert {row["rule"] for row in rows if row["severity"] == "finding"} == {"acknowledged_not_handled"}


PURGED = "trip.reminder"


@pytest.mark.spark
def test_nothing_is_owed_to_a_group_that_has_left_what_was_moved_for_it(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    letters = Letters(World(), tmp_path / "engine", WHOLE)
    groups = [(PAID, "back"), (PAID, "to-end"), (PAID, "deleted"), (PAID, "anew"), (PURGED, "purged")]
    with letters.engine() as engine:
        engine.admin.declare_group(OTHER, MAIL, GroupConfig())
        for topic, group in groups:
            engine.admin.declare_group(topic, group, GroupConfig(max_attempts=1))
        for topic in (PAID, PURGED):
            engine.publisher.publish(
                [Message(id=f"{name}-{topic}", topic=topic, body=b"x") for name in ("off", "dead")]
            )
        for topic, group in groups:
            off, dead = engine.puller.pull(topic, group, max_messages=2)
            engine.settler.nack([off.receipt], delay_ms=100 * DAY_MS, counts=False)
            engine.settler.nack([dead.receipt])
        assert letters.grow_old(engine) == 4
        engine.admin.seek(PAID, "back", to_offset=0)
        [again] = engine.puller.pull(PAID, "back", max_messages=10)
        engine.settler.ack([again.receipt])
        engine.admin.seek(PAID, "to-end", to_offset=2)
        for group in ("deleted", "anew"):
            engine.deletion.delete_group(PAID, group)
        engine.admin.declare_group(PAID, "anew", GroupConfig())
        engine.purger.purge_topic(PURGED)
    assert not begins_whole(survey(letters.folder, "messages"))
    settings = replace(letters.settings(sqlite, tmp_path), inboxes=[])

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    rows = [row for row in _found(Path(summary.folder)) if row["consumer_group"] and row["topic"] != OTHER]
    assert {(row["consumer_group"], row["message_id"].partition("-")[0], row["rule"]) for row in rows} == {
        ("back", "off", "done"), ("back", "dead", "dead"), ("to-end", "off", "skipped"), ("to-end", "dead", "dead"),
        ("deleted", "off", "group_deleted"), ("deleted", "dead", "group_deleted"), ("anew", "off", "skipped"),
        ("anew", "dead", "skipped"), ("purged", "off", "skipped"), ("purged", "dead", "dead"),
    }  # fmt: skip


@pytest.mark.spark
def test_nothing_is_judged_where_a_moved_message_is_damaged(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    letters = Letters(World(), tmp_path / "engine", WHOLE)
    with letters.engine() as engine:
        engine.admin.declare_group(PAID, TICKETS, GroupConfig(max_attempts=1))
        engine.admin.declare_group(OTHER, MAIL, GroupConfig())
        letters.publish(engine, "first", "second")
        letters.fail(engine)
        assert letters.grow_old(engine) == 2
    damage_message(letters.folder, letters.ids["second"])

    with pytest.raises(NotComparable, match=r"damaged.*the message aside at offset.*Restore the segment"):
        run(letters.settings(sqlite, tmp_path), session=spark, now_ms=NOW_MS, pause=no_wait)
