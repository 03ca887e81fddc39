"""`outbox reconcile repair apply`: a plan that a dry run wrote is done later, where all of it is still as it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import create_engine, make_url, text
from typer.testing import CliRunner, Result

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import BusinessRule, Settings
from spark_reconcile.cli.run_command import app
from spark_reconcile.core.settings import KeyFormat
from spark_reconcile.repair.apply import apply_repairs
from spark_reconcile.repair.plan import RepairAction, Suspect, plan_repairs
from spark_reconcile.repair.plan_file import read_plan, still_to_do
from tests.fixtures.databases import Database
from tests.outbox_broker.message_log import message_segments
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, REMINDER, World, outbox_rows, write_log

FAR_US = (NOW_MS + 365 * 24 * 3_600_000) * 1000
BODY = {"order_id": "id", "status": "status"}


def test_a_plan_is_done_later_and_only_once(database: Database, tmp_path: Path) -> None:
    _, plan = _planned(database, tmp_path)

    shown = _apply(tmp_path, plan, "--dry-run")
    before = outbox_rows(database)
    done = _apply(tmp_path, plan, "--yes")
    after = outbox_rows(database)
    again = _apply(tmp_path, plan, "--yes")

    assert (shown.exit_code, done.exit_code, again.exit_code) == (0, 0, 0)
    assert "1 make due" in shown.stderr
    assert "1 write again" in shown.stderr
    assert sorted(before) == ["unsent"]
    assert "repaired 2 of 2" in done.stderr
    assert sorted(after) == ["lost", "unsent"]
    assert max(row["due_at_us"] for row in after.values()) < FAR_US
    assert hashlib.sha256(bytes(after["lost"]["body"])).hexdigest() == after["lost"]["body_sha256"]
    assert "repaired" not in again.stderr.replace("repaired 0 of 1", "")
    assert outbox_rows(database) == after


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE orders SET status = 'OPEN'", "another hash"),
        ("DELETE FROM outbox_archive", "neither an outbox nor an archive"),
        ("UPDATE outbox_message SET state = 'parked'", "decide about it by hand"),
        ("DELETE FROM outbox_message", "neither an outbox nor an archive"),
    ],
)  # fmt: skip
def test_what_changed_since_is_named_and_left(sqlite: Database, tmp_path: Path, change: str, told: str) -> None:
    settings, plan = _planned(sqlite, tmp_path)
    _execute(sqlite, change)

    held = still_to_do(settings, read_plan(plan), repairs_max=10)

    (left,) = [one for one in held if one.action is RepairAction.NOTHING]
    assert left.reason.startswith("it is not as it was planned any more: ")
    assert told in left.reason
    assert left.message_id == ("unsent" if "outbox_message" in change else "lost")


def test_what_the_broker_has_stored_since_is_not_written_again(sqlite: Database, tmp_path: Path) -> None:
    settings, plan = _planned(sqlite, tmp_path)
    world = World()
    world.store("lost", key="1")
    write_log(tmp_path / "broker" / "messages", world.stored, 10)

    done = _apply(tmp_path, plan, "--yes")

    lost = next(one for one in still_to_do(settings, read_plan(plan), repairs_max=10) if one.message_id == "lost")
    assert (lost.action, lost.reason) == (RepairAction.NOTHING, "the broker has stored it since it was planned")
    assert "repaired 1 of 1" in done.stderr
    assert sorted(outbox_rows(sqlite)) == ["unsent"]


def test_of_one_id_on_two_topics_only_the_lost_message_is_written_again(sqlite: Database, tmp_path: Path) -> None:
    settings, lost = _lost_on(sqlite, tmp_path, topics=[PAID], stored_on=REMINDER)

    repairs = plan_repairs(settings, lost, repairs_max=10)
    plan = tmp_path / "repairs.jsonl"
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in repairs))
    done = apply_repairs(still_to_do(settings, read_plan(plan), repairs_max=10))

    assert [one.name for one in done] == [one.name for one in lost]
    assert [(row["id"], row["topic"]) for row in outbox_rows(sqlite).values()] == [("lost", PAID)]


def test_a_plan_names_the_database_of_what_it_repairs_and_none_where_nothing_is_found(
    sqlite: Database, tmp_path: Path
) -> None:
    settings, lost = _lost_on(sqlite, tmp_path, topics=[PAID])

    unfound = Suspect(message_id="nowhere", topic=PAID, key="1", rule="not_in_broker")
    lost_one, unfound_one = [one.as_dict() for one in plan_repairs(settings, [*lost, unfound], repairs_max=10)]

    assert (lost_one["action"], unfound_one["action"]) == (RepairAction.WRITE_AGAIN, RepairAction.NOTHING)
    assert lost_one["place"].endswith(str(make_url(sqlite.url).database))
    assert unfound_one["place"] is None


def test_two_lost_messages_of_one_id_are_written_again_one_after_the_other(sqlite: Database, tmp_path: Path) -> None:
    settings, lost = _lost_on(sqlite, tmp_path, topics=[PAID, REMINDER])
    plan = tmp_path / "repairs.jsonl"
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in plan_repairs(settings, lost, repairs_max=10)))

    first = apply_repairs(still_to_do(settings, read_plan(plan), repairs_max=10))
    written = [row["topic"] for row in outbox_rows(sqlite).values()]
    _execute(sqlite, "DELETE FROM outbox_message")
    world = World()
    world.store("lost", key="1")
    write_log(tmp_path / "broker" / "messages", world.stored, 10)
    second = apply_repairs(still_to_do(settings, read_plan(plan), repairs_max=10))

    assert ([one.name for one in first], written) == ([(PAID, "lost")], [PAID]), "its table has one row of an id"
    assert [one.name for one in second] == [(REMINDER, "lost")]


def test_what_was_sent_before_the_brokers_log_begins_is_not_written_again(sqlite: Database, tmp_path: Path) -> None:
    settings, lost = _lost_on(sqlite, tmp_path, topics=[PAID])
    plan = tmp_path / "repairs.jsonl"
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in plan_repairs(settings, lost, repairs_max=10)))
    begun_ms = NOW_MS - 24 * HOUR_MS

    def held(sent_ms: int, deliver_at_ms: int | None = None, *, first_offset: int = 4_096) -> list[RepairAction]:
        write_log(tmp_path / "broker" / "messages", [], 10, first_offset=first_offset)
        due = "NULL" if deliver_at_ms is None else deliver_at_ms
        _execute(sqlite, f"UPDATE outbox_archive SET sent_at_us = {sent_ms * 1000}, deliver_at_ms = {due}")
        return [one.action for one in still_to_do(settings, read_plan(plan), repairs_max=10)]

    assert held(begun_ms - 1) == [RepairAction.NOTHING], "it may have been stored since, and dropped"
    assert held(begun_ms) == [RepairAction.WRITE_AGAIN]
    assert held(begun_ms - 1, begun_ms) == [RepairAction.WRITE_AGAIN], "it would be in the log since it was due"
    assert held(begun_ms - 1, first_offset=0) == [RepairAction.WRITE_AGAIN], "nothing of the log was dropped"


def test_the_row_of_a_lost_message_is_found_by_its_key_as_the_business_writes_it(
    sqlite: Database, tmp_path: Path
) -> None:
    reference = UUID(int=7)
    body = json.dumps({"note": "n"}, separators=(",", ":"))
    world = World()
    world.sent("lost", key=str(reference), topic=PAID)
    world.archive[-1]["body_sha256"] = hashlib.sha256(body.encode()).hexdigest()
    settings = world.write(sqlite, tmp_path)
    _execute(sqlite, "CREATE TABLE ref (id BLOB, note TEXT, at BIGINT)")
    _execute(sqlite, f"INSERT INTO ref VALUES (x'{reference.hex}', 'n', 0)")
    rule = BusinessRule(
        name="ref", table="ref", key_column="id", key_format=KeyFormat.UUID, time_column="at", topic=PAID,
        body={"note": "note"},
    )  # fmt: skip

    lost = Suspect(message_id="lost", topic=PAID, key=str(reference), rule="not_in_broker")
    (repair,) = plan_repairs(replace(settings, rules=[rule]), [lost], repairs_max=10)

    assert repair.action is RepairAction.WRITE_AGAIN


def test_nothing_is_done_without_a_word_of_its_user_or_above_the_bound(sqlite: Database, tmp_path: Path) -> None:
    _, plan = _planned(sqlite, tmp_path)
    before = outbox_rows(sqlite)

    unasked = _apply(tmp_path, plan)
    bounded = _apply(tmp_path, plan, "--yes", "--repairs-max", "1")

    assert isinstance(unasked.exception, ConfigurationError)
    assert "--yes" in str(unasked.exception)
    assert "2 messages would be repaired, more than 1" in str(bounded.exception)
    assert outbox_rows(sqlite) == before


def test_a_damaged_log_ends_it_before_anything_is_changed(sqlite: Database, tmp_path: Path) -> None:
    _, plan = _planned(sqlite, tmp_path)
    before = outbox_rows(sqlite)
    (segment,) = message_segments(tmp_path / "broker")
    whole = bytearray(segment.read_bytes())
    whole[-1] ^= 1
    segment.write_bytes(whole)

    ended = _apply(tmp_path, plan, "--yes")

    assert ended.exit_code == 3
    assert str(segment) in " ".join(ended.stderr.split())
    assert outbox_rows(sqlite) == before


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("not a plan\n", "line 1, is no line of a plan"),
        ('{"repair_id": "a", "message_id": "b", "topic": "t", "action": "drop it"}\n', "line 1, is no line of a plan"),
        (2 * '{"repair_id": "a", "message_id": "b", "topic": "t", "action": "make due"}\n', "names b 2 times"),
        (f'{{"repair_id": "{"a" * 70_000}"}}', "too long at line 1"),
        (None, "name the repairs.jsonl"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, lines: str | None, told: str) -> None:
    path = tmp_path / "repairs.jsonl"
    if lines is not None:
        path.write_text(lines)

    with pytest.raises(ConfigurationError, match=told):
        read_plan(path)


def test_lines_that_name_what_nobody_can_repair_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "repairs.jsonl"
    path.write_text(2 * '{"repair_id": "a", "message_id": "", "topic": "t", "action": "nothing", "key": "7"}\n')

    assert read_plan(path) == []


def _planned(database: Database, folder: Path) -> tuple[Settings, Path]:
    """One message unsent, one lost, as their settings and the plan for them have it."""
    world = World()
    world.groups()
    for _ in range(3):
        world.settled()
    order = world.order()
    world.unsent("unsent", key=str(order))
    world.outbox[-1].update(due_at_us=FAR_US, token=None)
    order = world.order()
    lost = world.sent("lost", key=str(order))
    made = json.dumps({"order_id": order, "status": "PAID"}, separators=(",", ":")).encode()
    world.archive[-1]["body_sha256"] = hashlib.sha256(made).hexdigest()
    settings = world.write(database, folder)
    settings = replace(settings, rules=[replace(rule, body=BODY) for rule in settings.rules])
    suspects = [
        Suspect(message_id="unsent", topic=PAID, key=None, rule="not_sent"),
        Suspect(message_id=lost, topic=PAID, key=str(order), rule="not_in_broker"),
    ]
    plan = folder / "repairs.jsonl"
    repairs = plan_repairs(settings, suspects, repairs_max=10)
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in repairs))
    schema = f'schema = "{database.schema}"\n' if database.schema else ""
    (folder / "reconcile.toml").write_text(
        f'[database]\nurl = "{database.url}"\n{schema}[broker]\ndata = "broker"\n[[rules]]\nname = "paid"\n'
        f'table = "orders"\nwhere = {{ status = "PAID" }}\nkey_column = "id"\ntime_column = "paid_at_us"\n'
        f'topic = "{PAID}"\nbody = {{ order_id = "id", status = "status" }}\n'
    )
    return settings, plan


def _lost_on(
    database: Database, folder: Path, *, topics: Sequence[str], stored_on: str | None = None
) -> tuple[Settings, list[Suspect]]:
    """Messages of one id, key and body that the archive has: those on `topics` are lost, another is in the broker."""
    world = World()
    world.groups()
    order = world.order()
    made = json.dumps({"order_id": order, "status": "PAID"}, separators=(",", ":")).encode()
    for number, topic in enumerate([*topics, *([stored_on] if stored_on else [])]):
        world.sent("lost", key=str(order), topic=topic)
        world.archive[-1].update(body_sha256=hashlib.sha256(made).hexdigest())
        world.archive[-1]["sent_at_us"] += number
    if stored_on:
        world.store("lost", key=str(order), topic=stored_on, body=made.decode())
    settings = world.write(database, folder)
    settings = replace(settings, rules=[replace(rule, body=BODY) for rule in settings.rules])
    lost = [Suspect(message_id="lost", topic=topic, key=str(order), rule="not_in_broker") for topic in topics]
    return settings, lost


def _apply(folder: Path, plan: Path, *options: str) -> Result:
    command = ["repair", "apply", str(plan), "--config", str(folder / "reconcile.toml"), *options]
    return CliRunner().invoke(app, command)


def _execute(database: Database, statement: str) -> None:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()
