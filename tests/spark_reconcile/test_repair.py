"""Repairs: shown first, only what was confirmed, only as it was found, and nothing else is touched."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from outbox.store.order_table import order_key
from outbox.store.row import CANCEL_TOPIC
from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Settings
from spark_reconcile.cli.repair_command import repair
from spark_reconcile.cli.run_command import app
from spark_reconcile.repair.apply import apply_repairs
from spark_reconcile.repair.plan import (
    RepairAction,
    Suspect,
    hour_folders,
    plan_repairs,
    unconfirmed_count,
    unpublished_rows,
)
from spark_reconcile.repair.plan_file import read_plan, still_to_do
from spark_reconcile.results.window_store import Window, WindowStore
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, SETTINGS, World, outbox_rows

HOUR_US = 3_600_000_000
FAR_US = (NOW_MS + 365 * 24 * 3_600_000) * 1000


def test_unsent_rows_become_due_and_rows_that_somebody_holds_are_left_alone(database: Database, tmp_path: Path) -> None:
    world = World()
    world.groups()
    for name, token in (("mine", None), ("held", "abc")):
        world.unsent(name, key="1")
        world.outbox[-1].update(due_at_us=FAR_US, token=token)
    world.unsent("other", key="1")
    world.outbox[-1].update(due_at_us=FAR_US, token=None)
    world.unsent("parked", key="1", state="parked")
    world.outbox[-1].update(token=None)
    settings = world.write(database, tmp_path)
    suspects = [_suspect(name, "not_sent") for name in ("mine", "held", "parked", "gone")]

    repairs = plan_repairs(settings, suspects, repairs_max=10)
    before = outbox_rows(database)
    done = apply_repairs(repairs)

    assert [one.action for one in repairs] == [
        RepairAction.MAKE_DUE,
        RepairAction.MAKE_DUE,
        RepairAction.NOTHING,
        RepairAction.NOTHING,
    ]
    assert [one.message_id for one in done] == ["mine"]
    after = outbox_rows(database)
    assert after["mine"]["due_at_us"] < FAR_US
    assert {**after["mine"], "due_at_us": FAR_US} == before["mine"]
    assert {name: row for name, row in after.items() if name != "mine"} == {
        name: row for name, row in before.items() if name != "mine"
    }
    assert apply_repairs(repairs) == [], "twice is once"


def test_a_scheduled_message_that_its_table_holds_until_it_is_due_stays_where_a_cancel_finds_it(
    sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    due_ms = {"held until it is due": FAR_US // 1000, "sender died": FAR_US // 1000 + 1, "was due": 5_000}
    for name, deliver_at_ms in due_ms.items():
        world.unsent(name, key="1")
        due_us = 5_000_000 if name == "was due" else FAR_US
        world.outbox[-1].update(due_at_us=due_us, deliver_at_ms=deliver_at_ms, token=None)
    settings = world.write(sqlite, tmp_path)

    repairs = plan_repairs(settings, [_suspect(name, "not_sent") for name in due_ms], repairs_max=10)
    done = apply_repairs(repairs)

    assert [one.action for one in repairs] == [RepairAction.NOTHING, RepairAction.MAKE_DUE, RepairAction.MAKE_DUE]
    assert "until it is due" in repairs[0].reason
    assert [one.message_id for one in done] == ["sender died"]
    assert outbox_rows(sqlite)["held until it is due"]["due_at_us"] == FAR_US


def test_what_a_repair_left_as_it_was_is_counted_by_why_and_leaves_nothing_to_do(
    database: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    for name, token in (("mine", None), ("due", None), ("held", "abc"), ("sent since", None)):
        world.unsent(name, key="1")
        world.outbox[-1].update(due_at_us=HOUR_US if name == "due" else FAR_US, token=token)
    settings = world.write(database, tmp_path)
    repairs = plan_repairs(settings, [_suspect(row["id"], "not_sent") for row in world.outbox], repairs_max=10)
    plan, config = tmp_path / "repairs.jsonl", tmp_path / "reconcile.toml"
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in repairs))
    config.write_text(SETTINGS.format(url=database.url).replace("[broker]", f'schema = "{settings.schema}"\n[broker]'))
    world.outbox.pop()
    world.write_tables(database)

    repaired = CliRunner().invoke(app, ["repair", "apply", str(plan), "--config", str(config), "--yes"])

    assert repaired.exit_code == 0, repaired.exception
    told = " ".join(repaired.stderr.split())
    assert "repaired 1 of 3; the compensator sends them now" in told
    assert "left as they are: 1 due already: the compensator sends them without a repair" in told
    assert "left as they are: 1 held by a sender" in told


def test_a_lost_message_is_written_again_with_the_very_body_it_had(database: Database, tmp_path: Path) -> None:
    settings, order, lost = _lost(database, tmp_path, body={"order_id": "id", "status": "status"})

    (planned,) = plan_repairs(settings, [_suspect(lost, "not_in_broker", key=str(order))], repairs_max=10)
    assert outbox_rows(database) == {}, "planning changes nothing"
    done = apply_repairs([planned])

    assert done == [planned]
    row = outbox_rows(database)[lost]
    assert bytes(row["body"]) == json.dumps({"order_id": order, "status": "PAID"}, separators=(",", ":")).encode()
    assert hashlib.sha256(bytes(row["body"])).hexdigest() == row["body_sha256"]
    assert (row["state"], row["kind"], row["attempts"], row["topic"], row["message_key"]) == (
        "pending", "publish", 0, PAID, str(order),
    )  # fmt: skip
    assert apply_repairs([planned]) == [], "an id that waits already is left alone"


@pytest.mark.parametrize(
    ("body", "told"), [({}, "no bodies"), ({"order": "id"}, "another hash")], ids=["no recipe", "another body"]
)
def test_what_cannot_be_made_again_is_named_and_left(
    sqlite: Database, tmp_path: Path, body: dict[str, str], told: str
) -> None:
    settings, order, lost = _lost(sqlite, tmp_path, body=body)

    (planned,) = plan_repairs(settings, [_suspect(lost, "not_in_broker", key=str(order))], repairs_max=10)

    assert planned.action is RepairAction.NOTHING
    assert told in planned.reason
    assert apply_repairs([planned]) == []
    assert outbox_rows(sqlite) == {}


def test_a_cancel_that_the_broker_forgot_is_sent_again_as_long_as_its_message_is_not_due(
    database: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    for name, due_ms in (("far", FAR_US // 1000), ("past", 1_000), ("other", None)):
        world.sent(name, key=None, topic="newsletter", deliver_at_ms=due_ms)
        world.sent_cancel(f"cancel of {name}", name, "canceled")
    world.sent_cancel("of nobody knows what", "gone", "canceled")
    settings = world.write(database, tmp_path)
    keys = {"cancel of far": "far", "cancel of past": "past", "cancel of other": "far", "of nobody knows what": None}
    suspects = [_suspect(name, "cancel_not_noted", key=key) for name, key in keys.items()]

    repairs = plan_repairs(settings, suspects, repairs_max=10)
    plan = tmp_path / "repairs.jsonl"
    plan.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in repairs))
    later = still_to_do(settings, read_plan(plan), repairs_max=10)
    done = apply_repairs(later)

    assert [(one.action, one.reason.split(":")[0]) for one in repairs] == [
        (RepairAction.CANCEL_AGAIN, "the broker took it, and has no note of it; its message is not due yet"),
        (RepairAction.NOTHING, "its message was due, so no cancel can hold it back any more"),
        (RepairAction.NOTHING, "the broker's log does not tell which message it cancels"),
        (RepairAction.NOTHING, "the broker's log does not tell which message it cancels"),
    ]
    assert later == done == repairs[:1]
    ((name, row),) = outbox_rows(database).items()
    assert (name, row["kind"], bytes(row["body"]), row["topic"]) == ("cancel of far", "cancel", b"far", CANCEL_TOPIC)
    assert (row["state"], row["message_key"], row["headers"], row["attempts"]) == ("pending", None, None, 0)
    assert apply_repairs(later) == [], "twice is once"


def test_too_many_repairs_are_a_missing_source_and_refused(sqlite: Database, tmp_path: Path) -> None:
    settings, _, lost = _lost(sqlite, tmp_path, body={})
    suspects = [_suspect(lost, "not_in_broker"), _suspect("b", "not_sent")]

    with pytest.raises(ConfigurationError, match="2 messages would be repaired, more than 1: nothing is done"):
        plan_repairs(settings, suspects, repairs_max=1)
    assert [one.message_id for one in plan_repairs(settings, suspects, repairs_max=2)] == [lost, "b"]


def test_nothing_is_changed_by_a_dry_run_or_without_yes_and_the_plan_is_written(
    sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, order, lost = _lost(sqlite, tmp_path, body={"order_id": "id", "status": "status"})
    suspects = [_suspect(lost, "not_in_broker", key=str(order))]
    monkeypatch.setattr("spark_reconcile.cli.repair_command.confirmed_suspects", lambda *_, **__: suspects)
    common: dict[str, Any] = {"tables": [], "repairs_max": 10, "folder": tmp_path}

    assert repair(settings, **common, yes=False, dry_run=True) == []
    with pytest.raises(ConfigurationError, match="--yes"):
        repair(settings, **common, yes=False, dry_run=False)
    assert outbox_rows(sqlite) == {}
    done = repair(settings, **common, yes=True, dry_run=False)

    assert [one.message_id for one in done] == [lost]
    (line,) = (tmp_path / "repairs.jsonl").read_text().splitlines()
    assert json.loads(line)["action"] == "write again"
    assert "PAID" not in line, "no body"


def test_a_message_of_an_ordered_key_is_not_written_again_out_of_its_order(database: Database, tmp_path: Path) -> None:
    settings, order, lost = _lost(database, tmp_path, body={"order_id": "id", "status": "status"})
    table = f"{database.schema}.order_head" if database.schema else "outbox_order_head"
    engine = create_engine(database.url)
    with engine.begin() as connection:
        number = {"name": order_key(PAID, str(order))}
        connection.execute(text(f"INSERT INTO {table} (order_key, seq) VALUES (:name, 1)"), number)
    engine.dispose()

    (planned,) = plan_repairs(settings, [_suspect(lost, "not_in_broker", key=str(order))], repairs_max=10)

    assert (planned.action, "ordered" in planned.reason) == (RepairAction.NOTHING, True)
    assert apply_repairs([planned]) == []
    assert outbox_rows(database) == {}


def test_rows_without_a_message_are_named_and_suspects_that_nobody_confirmed_are_counted(
    sqlite: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, order, lost = _lost(sqlite, tmp_path, body={"order_id": "id", "status": "status"})
    message = {"scope": "message", "topic": PAID, "message_key": str(order), "rule": "not_in_broker"}
    _shown_window(
        settings,
        verdicts=[
            {**message, "message_id": lost, "confirmed": True},
            *({**message, "message_id": f"m{number}", "confirmed": False} for number in range(3)),
        ],
        business_verdicts=[
            {"topic": PAID, "message_key": "41", "rule": "no_message", "at_ms": 2, "confirmed": True},
            {"topic": PAID, "message_key": "42", "rule": "too_few_messages", "at_ms": 1, "confirmed": True},
            {"topic": PAID, "message_key": "43", "rule": "announced", "at_ms": 3, "confirmed": False},
        ],
    )

    tables = hour_folders(settings.output, since_ms=0, until_ms=NOW_MS)
    repair(settings, tables, repairs_max=10, yes=False, dry_run=True, folder=tmp_path)

    plan = [json.loads(line) for line in (tmp_path / "repairs.jsonl").read_text().splitlines()]
    assert [(one["action"], one["message_id"], one["key"]) for one in plan] == [
        ("write again", lost, None), ("nothing", "", "42"), ("nothing", "", "41"),
    ]  # fmt: skip
    assert len({one["repair_id"] for one in plan}) == 3
    assert "headers are not archived" in plan[0]["reason"]
    assert "publish it from the row" in plan[1]["reason"]
    told = " ".join(capsys.readouterr().err.split())
    assert "3 suspects are not confirmed, so nothing is planned for them: more than 100,000" in told


def test_a_key_of_a_business_is_shown_as_it_is_and_is_no_markup_nor_a_control_code(
    sqlite: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, _, _ = _lost(sqlite, tmp_path, body={})
    row = {"topic": "[bold]t", "rule": "no_message", "at_ms": 1, "confirmed": True}
    _shown_window(settings, business_verdicts=[{**row, "message_key": "[/x]"}, {**row, "message_key": "\x1b[8m"}])

    tables = hour_folders(settings.output, since_ms=0, until_ms=NOW_MS)
    repair(settings, tables, repairs_max=10, yes=False, dry_run=True, folder=tmp_path)

    told = capsys.readouterr().err
    assert "key [/x]" in told
    assert r"key \x1b[8m" in told
    assert "[bold]t" in told


def test_the_hours_of_a_repair_are_those_that_overlap_its_span(tmp_path: Path) -> None:
    starts = [number * HOUR_MS for number in range(1, 6)]
    for start_ms in starts:
        _publish_window(tmp_path, start_ms)

    spans = {
        "within an hour": (2 * HOUR_MS + 1, 2 * HOUR_MS + 2),
        "up to the beginning of an hour": (2 * HOUR_MS, 3 * HOUR_MS),
        "a moment of the next hour": (2 * HOUR_MS, 3 * HOUR_MS + 1),
        "from the last moment of an hour": (3 * HOUR_MS - 1, 3 * HOUR_MS),
        "from the end of an hour": (3 * HOUR_MS, 4 * HOUR_MS),
        "all": (0, 9 * HOUR_MS),
        "before": (0, HOUR_MS),
        "after": (6 * HOUR_MS, 7 * HOUR_MS),
    }
    found = {
        name: [int(one.parent.name) // HOUR_MS for one in hour_folders(tmp_path, since_ms=since_ms, until_ms=until_ms)]
        for name, (since_ms, until_ms) in spans.items()
    }

    assert found == {
        "within an hour": [2],
        "up to the beginning of an hour": [2],
        "a moment of the next hour": [2, 3],
        "from the last moment of an hour": [2],
        "from the end of an hour": [3],
        "all": [1, 2, 3, 4, 5],
        "before": [],
        "after": [],
    }


@pytest.mark.slow
def test_of_very_many_rows_without_a_message_only_the_first_are_held_in_memory(tmp_path: Path) -> None:
    rows, most = 150_000, 3
    _publish_window(
        tmp_path,
        HOUR_MS,
        verdicts=pa.table(
            {
                "message_id": [f"m{number}" for number in range(rows)],
                "scope": ["message"] * rows,
                "rule": ["not_sent"] * rows,
                "confirmed": [False] * rows,
            }
        ),
        business_verdicts=pa.table(
            {
                "topic": [PAID] * rows,
                "message_key": [f"k{number:06}" for number in range(rows)],
                "rule": ["no_message"] * rows,
                "at_ms": range(rows, 0, -1),
            }
        ),
    )
    folders = hour_folders(tmp_path, since_ms=0, until_ms=9 * HOUR_MS)
    unpublished_rows(folders, rows_max=1)  # imports

    tracemalloc.start()
    found, unconfirmed = unpublished_rows(folders, rows_max=most), unconfirmed_count(folders)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [one.key for one in found] == [f"k{rows - 1 - number:06}" for number in range(most)]
    assert unconfirmed == rows
    assert peak_bytes < 100 * rows, "a dictionary of each row takes more"


def _shown_window(settings: Settings, **tables: list[dict[str, Any]]) -> None:
    """A window of the output folder with these tables."""
    found = {name: pa.Table.from_pylist(rows) for name, rows in tables.items()}
    _publish_window(settings.output, NOW_MS - NOW_MS % HOUR_MS - HOUR_MS, **found)


def _publish_window(output: Path, start_ms: int, **tables: pa.Table) -> None:
    """A window of an output folder."""
    store = WindowStore(output)
    stage = store.staging()
    for name, table in tables.items():
        (stage / str(start_ms) / name).mkdir(parents=True)
        pq.write_table(table, stage / str(start_ms) / name / "part.parquet")
    store.publish({start_ms: Window(fingerprint="f", version="v", judged_at_ms=NOW_MS, open=False, result={})})


def _lost(database: Database, folder: Path, *, body: dict[str, str]) -> tuple[Settings, int, str]:
    """An order whose message the archive has and the broker has not."""
    world = World()
    world.groups()
    order = world.order()
    lost = world.sent("lost", key=str(order))
    made = json.dumps({"order_id": order, "status": "PAID"}, separators=(",", ":")).encode()
    world.archive[-1]["body_sha256"] = hashlib.sha256(made).hexdigest()
    settings = world.write(database, folder)
    rules = [replace(rule, body=body) for rule in settings.rules]
    return replace(settings, rules=rules), order, lost


def _suspect(name: str, rule: str, key: str | None = "1") -> Suspect:
    return Suspect(message_id=name, topic=PAID, key=key, rule=rule)
