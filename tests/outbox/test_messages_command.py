"""`outbox messages` and `outbox status` as people and scripts run them, on one message table and on split ones."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.engine import make_url

from compensator.assignment import LeaseOptions, open_assignment
from outbox.admin.message_admin import BATCH_ROWS, PAGE_MAX, AdminAction, MessageAdmin, MessageSelection, SchemaAdmin
from outbox.migrate import schema_upgrade
from outbox.store.bounded_counts import RETRYING_ATTEMPTS
from outbox.store.database import background_engine
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox.store.schema import RowState, message_table
from outbox_core import Message
from outbox_core.assignment.even_assignment import Resource
from outbox_core.common.errors import UsageError
from tests.fixtures.command_line import Done
from tests.fixtures.databases import Database, Server
from tests.outbox.innodb_locks import rows_locked, wait_for_lock_waits
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop, open_shop

ROOT = Path(__file__).parents[2]
HOUR_US = 3_600_000_000
LONG_LEASES = LeaseOptions(beat_ms=60_000, lease_ms=600_000)
TABLES = ["message", "message_0000", "message_0001", "message_0002"]


def add(
    shop: Shop, *ids: str, table: str | None = None, state: RowState = RowState.PENDING, age_us: int = 0, **parts: Any
) -> None:
    """Rows without a lease."""
    rows = [publish_row(Message(**{"id": one, "topic": "topic", "body": b"the secret", **parts})) for one in ids]
    store = MessageStore(dialect=shop.engine.dialect, schema=shop.database.schema, table=table)
    message = message_table(store.table.schema, store.table.name)
    with shop.engine.begin() as connection:
        store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
        changed = {"token": None, "state": state, "created_at_us": message.c.created_at_us - age_us}
        connection.execute(update(message).where(message.c.id.in_(ids)).values(changed))


def state_of(shop: Shop, table: str | None = None) -> dict[str, str]:
    """The rows of a table and their states."""
    message = message_table(shop.store.table.schema, table or shop.store.table.name)
    with shop.engine.connect() as connection:
        return {row.id: row.state for row in connection.execute(select(message.c.id, message.c.state))}


def ids_in(done: Done) -> list[str]:
    """The ids of what `list --json` printed."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


@pytest.fixture
def split_shop(mysql_shop: Shop) -> Shop:
    """A schema with the plain message table and three that messages are split over."""
    for name in TABLES[1:]:
        message_table(mysql_shop.database.schema, name).create(mysql_shop.engine)
    return mysql_shop


@pytest.fixture
def split_desks(split_shop: Shop) -> Iterator[SchemaAdmin]:
    """Returns the access to all its tables."""
    engine = background_engine(split_shop.engine)
    yield SchemaAdmin(engine, schema=split_shop.database.schema)
    engine.dispose()


def test_a_list_is_filtered_by_state_topic_key_and_age(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "old", age_us=2 * HOUR_US)
    add(sqlite_shop, "parked", state=RowState.PARKED)
    add(sqlite_shop, "other-topic", topic="other")
    add(sqlite_shop, "of-key", key="order 7")

    found = {
        filters: ids_in(sqlite_shop.command("messages", "list", "--json", *filters.split("|")))
        for filters in (
            "--older-than|1h",
            "--state|parked",
            "--topic|other",
            "--key|order 7",
            "--topic|topic|--limit|2",
        )
    }

    assert found == {
        "--older-than|1h": ["old"],
        "--state|parked": ["parked"],
        "--topic|other": ["other-topic"],
        "--key|order 7": ["of-key"],
        "--topic|topic|--limit|2": ["parked", "old"],
    }


def test_pages_of_a_list_have_every_message_once_in_every_table(split_shop: Shop) -> None:
    for number, table in enumerate(TABLES):
        add(split_shop, f"p-{number}", f"q-{number}", table=table, state=RowState.PARKED)
        add(split_shop, f"m-{number}", table=table)
    whole = ids_in(split_shop.command("messages", "list", "--json"))

    pages, after = list[list[str]](), list[str]()
    while True:
        done = split_shop.command("messages", "list", "--json", "--limit", "5", *after)
        pages.append(ids_in(done))
        if not done.stderr:
            break
        _, *after = done.stderr.split()

    assert [len(page) for page in pages] == [5, 5, 2]
    assert [one for page in pages for one in page] == whole
    assert len(set(whole)) == 12
    assert whole[:8] == sorted(whole[:8], key=lambda one: one[0] == "m")  # parked ones first


@pytest.mark.parametrize(
    "cursor", ["", "m-1", "sent:1:m-1", "parked:one:m-1", "parked:1", "parked:1:", f"parked:{9**30}:m"]
)
def test_a_cursor_that_no_page_ended_with_is_a_usage_error(sqlite_shop: Shop, cursor: str) -> None:
    done = sqlite_shop.command("messages", "list", "--after", cursor)

    assert done.returncode == 2
    assert "is no cursor of a list" in done.stderr


def test_a_console_reads_typed_pages_of_a_bounded_length(split_desks: SchemaAdmin, split_shop: Shop) -> None:
    add(split_shop, "m-1", table="message_0001", key="order 7", state=RowState.PARKED)

    page = split_desks.page(MessageSelection(topic="topic"), limit=1)
    found = split_desks.show("m-1", body_bytes_max=3)

    assert [(one.id, one.key, one.state, one.table) for one in page.messages] == [
        ("m-1", "order 7", RowState.PARKED, "message_0001")
    ]
    assert page.next_cursor is None
    assert found is not None
    assert (found[0].id, found[1].body, found[1].body_bytes) == ("m-1", b"the", 10)
    for limit in (0, PAGE_MAX + 1):
        with pytest.raises(UsageError, match="a page has 1 to 10,000 messages"):
            split_desks.page(MessageSelection(), limit=limit)


def test_a_list_has_a_line_a_message_and_its_error_below_however_narrow_the_terminal(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "0123456789abcdef" * 2, topic="a.topic.with.a.long.name", key="k" * 40, state=RowState.PARKED)
    with sqlite_shop.engine.begin() as connection:
        connection.execute(update(sqlite_shop.tables.message).values(last_error="refused: " + "because " * 20))

    shown = sqlite_shop.command("messages", "list", columns=40).stdout.splitlines()

    assert shown[0].startswith(f"{'0123456789abcdef' * 2}  a.topic.with.a.long.name  key={'k' * 40}  parked  attempts=")
    assert shown[1:] == ["    refused: " + "because " * 20]


def test_an_empty_list_says_so(sqlite_shop: Shop) -> None:
    assert sqlite_shop.command("messages", "list", "--state", "parked").stdout == "no such messages\n"


@pytest.mark.parametrize("age", ["15", "m", "-1m", "1.5h", "1w", "9999999999d"])
def test_an_age_that_is_none_is_a_usage_error(sqlite_shop: Shop, age: str) -> None:
    done = sqlite_shop.command("messages", "list", f"--older-than={age}")

    assert done.returncode == 2
    assert re.fullmatch(r"error: an age is a number and one of s, m, h, d, like 15m.*\n", done.stderr)


def test_show_says_all_but_the_body_and_what_headers_say(shop: Shop) -> None:
    add(shop, "m-1", key="order 7", headers={"authorization": "the other secret"}, deliver_at_ms=1_900_000_000_000)
    shop.execute(f"UPDATE {shop.tables.message.fullname} SET created_at_us = 1700000000123456")

    people = shop.command("messages", "show", "m-1")
    program = json.loads(shop.command("messages", "show", "m-1", "--json").stdout)

    assert people.returncode == 0
    assert re.search(r"^due for +3,\d{3}\.\d s", people.stdout, re.MULTILINE)
    assert "secret" not in people.stdout + json.dumps(program)
    for said in ("m-1", "pending", "order 7", "authorization", "2030-03-17T17:46:40.000Z", "10 bytes"):
        assert said in people.stdout
    assert re.search(r"^created +2023-11-14T22:13:20\.123Z *$", people.stdout, re.MULTILINE)
    assert program["headers"] == ["authorization"]
    assert (program["body_bytes"], program["table"], program["in_hand"]) == (10, shop.store.table.name, False)
    assert "body" not in program


def test_show_with_body_shows_it_and_the_headers(shop: Shop) -> None:
    add(shop, "m-1", headers={"a": "b"}, body="süß\n\x1b[31m[bold]".encode())
    add(shop, "m-2", body=b"\xff\x00")

    people = shop.command("messages", "show", "m-1", "--body").stdout
    program = json.loads(shop.command("messages", "show", "m-1", "--body", "--json").stdout)
    binary = json.loads(shop.command("messages", "show", "m-2", "--body", "--json").stdout)

    assert people.endswith("süß\n\\x1b[31m[bold]\n")
    assert (program["body"], program["body_is_cut"], program["headers"]) == ("süß\n\x1b[31m[bold]", False, {"a": "b"})
    assert base64.b64decode(binary["body_base64"]) == b"\xff\x00"


def test_show_cuts_a_long_body_and_says_so(shop: Shop) -> None:
    add(shop, "m-1", body="ü".encode() * 100_000)
    add(shop, "m-2", body=b"x" + "ü".encode() * 100_000)

    whole, cut_inside = [
        json.loads(shop.command("messages", "show", name, "--body", "--json").stdout) for name in ("m-1", "m-2")
    ]
    people = shop.command("messages", "show", "m-1", "--body").stdout

    assert (len(whole["body"]), len(cut_inside["body"])) == (32_768, 32_768)
    assert whole["body_is_cut"]
    assert people.endswith("[the first 65,536 of 200,000 bytes]\n")


def test_show_finds_what_is_sent_in_the_archive_and_says_when_it_knows_nothing(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    add(sqlite_shop, "m-1")
    sqlite_shop.scan(broker).run()

    sent = sqlite_shop.command("messages", "show", "m-1")
    as_json = sqlite_shop.command("messages", "show", "m-1", "--json")
    unknown = sqlite_shop.command("messages", "show", "m-2")

    assert (sent.returncode, unknown.returncode) == (1, 1)
    assert re.fullmatch(r"m-1 was sent to topic at \S+Z: stored\n", sent.stdout)
    assert json.loads(as_json.stdout)["state"] == "sent"
    assert unknown.stderr == "no message m-2 waits here, and the archive knows none\n"


def test_what_a_message_holds_cannot_steer_the_terminal(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "m-1", key="\x1b]0;owned\x07[red]", state=RowState.PARKED)
    nasty = "[link=x]refused\x1b[2J\r\u202eevil"
    with sqlite_shop.engine.begin() as connection:
        connection.execute(update(sqlite_shop.tables.message).values(last_error=nasty))

    for done in (sqlite_shop.command("messages", "list"), sqlite_shop.command("messages", "show", "m-1")):
        assert done.returncode == 0
        assert not set(done.stdout) & {"\x1b", "\x07", "\r", "\u202e"}
        assert r"\x1b]0;owned\x07[red]" in done.stdout
        assert r"[link=x]refused\x1b[2J\r\u202eevil" in done.stdout


def test_an_id_that_other_code_has_written_cannot_steer_the_terminal(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "m-1")
    with sqlite_shop.engine.begin() as connection:
        connection.execute(update(sqlite_shop.tables.message).values(id="\x1b]0;owned\x07"))

    listed = sqlite_shop.command("messages", "list")

    assert listed.returncode == 0
    assert not set(listed.stdout) & {"\x1b", "\x07"}
    assert listed.stdout.startswith(r"\x1b]0;owned\x07  topic")


def test_all_that_the_filters_leave_is_changed_in_every_table_of_the_schema(split_shop: Shop) -> None:
    for number, table in enumerate(TABLES):
        add(split_shop, f"p-{number}", f"q-{number}", table=table, state=RowState.PARKED)
        add(split_shop, f"other-{number}", table=table, state=RowState.PARKED, topic="other")

    listed = ids_in(split_shop.command("messages", "list", "--topic", "topic", "--json"))
    trial = split_shop.command("messages", "discard", "--all", "--topic", "topic", "--dry-run")
    before = [state_of(split_shop, table) for table in TABLES]
    done = split_shop.command("messages", "discard", "--all", "--topic", "topic", "--yes")
    retried = split_shop.command("messages", "retry", "--all", "--yes", "--json")

    assert sorted(listed) == sorted(f"{one}-{number}" for number in range(4) for one in "pq")
    assert (trial.returncode, trial.stdout) == (0, "would discard: 8 of 8\n")
    assert all(len(rows) == 3 for rows in before)
    assert (done.returncode, done.stdout) == (0, "discard: 8 of 8\n")
    assert json.loads(retried.stdout) == {"action": "retry", "asked": 4, "changed": 4}
    assert [state_of(split_shop, table) for table in TABLES] == [{f"other-{n}": "pending"} for n in range(4)]


def test_ids_are_found_in_whatever_table_they_are(split_shop: Shop) -> None:
    for number, table in enumerate(TABLES):
        add(split_shop, f"m-{number}", table=table)

    parked = split_shop.command("messages", "park", "m-0", "m-2", "m-3", "unknown")
    shown = json.loads(split_shop.command("messages", "show", "m-2", "--json").stdout)

    assert (parked.returncode, parked.stdout) == (1, "park: 3 of 4\n")
    assert (shown["table"], shown["state"]) == ("message_0001", "parked")
    assert state_of(split_shop, "message_0000") == {"m-1": "pending"}


def test_a_trial_by_ids_counts_those_alone_that_would_be_changed(split_shop: Shop) -> None:
    add(split_shop, "parked", table="message_0000", state=RowState.PARKED)
    add(split_shop, "pending", table="message_0001")

    trial = split_shop.command("messages", "discard", "parked", "pending", "unknown", "--dry-run")
    as_json = split_shop.command("messages", "park", "parked", "pending", "--dry-run", "--json")
    whole = split_shop.command("messages", "retry", "parked", "pending", "--dry-run")
    done = split_shop.command("messages", "discard", "parked", "pending", "unknown", "--yes")

    assert (trial.returncode, trial.stdout) == (1, "would discard: 1 of 3\n")
    assert json.loads(as_json.stdout) == {"action": "park", "asked": 2, "changed": 0, "would_change": 1}
    assert as_json.returncode == 1
    assert (whole.returncode, whole.stdout) == (0, "would retry: 2 of 2\n")
    assert (done.returncode, done.stdout) == (1, "discard: 1 of 3\n")


def test_many_are_changed_by_primary_key_in_small_transactions(split_shop: Shop, split_desks: SchemaAdmin) -> None:
    ids = [f"m-{number:04d}" for number in range(2 * BATCH_ROWS + 1)]
    add(split_shop, *ids, table="message_0001", state=RowState.PARKED)
    places = split_desks.find(MessageSelection(state=RowState.PARKED), action=AdminAction.DISCARD, rows_max=1_000)
    tried: list[int] = []

    changed = []
    for more in split_desks.change(AdminAction.DISCARD, places, after_batch=tried.append):
        changed.append(more)
        left = len(state_of(split_shop, "message_0001"))  # seen by another connection: each batch is committed
        assert left == len(ids) - sum(changed)

    assert changed == tried == [BATCH_ROWS, BATCH_ROWS, 1]
    add(split_shop, "x", "y", table="message_0000")
    add(split_shop, "z", table="message_0001")
    bounded = split_desks.find(MessageSelection(), action=AdminAction.PARK, rows_max=2)
    assert {name: ids for name, ids in bounded.items() if ids} == {"message_0000": ["x", "y"]}


def test_a_change_of_all_is_bounded_and_says_that_there_may_be_more(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "m-1", "m-2", "m-3")

    done = sqlite_shop.command("messages", "park", "--all", "--limit", "2", "--yes")

    assert (done.returncode, done.stdout) == (0, "park: 2 of 2\n")
    assert done.stderr == "there may be more than these 2; run it again for the rest\n"
    assert sorted(state_of(sqlite_shop).values()) == ["parked", "parked", "pending"]


def test_what_somebody_is_just_sending_is_not_among_all(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "free", "in-hand")
    with sqlite_shop.engine.begin() as connection:
        row = sqlite_shop.tables.message.c.id == "in-hand"
        leased = update(sqlite_shop.tables.message).where(row).values(token="x" * 32, due_at_us=2**62)
        connection.execute(leased)

    done = sqlite_shop.command("messages", "park", "--all", "--yes")
    shown = sqlite_shop.command("messages", "show", "in-hand")

    assert done.stdout == "park: 1 of 1\n"
    assert state_of(sqlite_shop) == {"free": "parked", "in-hand": "pending"}
    assert "pending, in hand" in shown.stdout


def test_a_parked_row_is_sent_after_retry(shop: Shop, broker: RecordingBroker) -> None:
    add(shop, "m-1")
    broker.rejects["m-1"] = "not today"
    shop.scan(broker).run()
    broker.rejects.clear()

    done = shop.command("messages", "retry", "m-1", "unknown")
    report = shop.scan(broker).run()

    assert (done.returncode, done.stdout, report.accepted) == (1, "retry: 1 of 2\n", 1)
    assert broker.ids == ["m-1"]


def test_what_an_operator_parked_is_not_sent_and_may_be_deleted(shop: Shop, broker: RecordingBroker) -> None:
    add(shop, "m-1")

    parked, again = (shop.command("messages", "park", "m-1") for _ in range(2))
    claimed = shop.scan(broker).run().claimed
    listed = shop.command("messages", "list", "--state", "parked", "--json")
    discarded = shop.command("messages", "discard", "m-1", "--yes")

    assert (parked.stdout, again.stdout, claimed) == ("park: 1 of 1\n", "park: 0 of 1\n", 0)
    assert json.loads(listed.stdout)["last_error"] == "parked by an operator"
    assert "secret" not in listed.stdout
    assert (discarded.returncode, discarded.stdout) == (0, "discard: 1 of 1\n")
    assert state_of(shop) == {}


def outcomes(shop: Shop) -> dict[str, list[str]]:
    """The outcomes in the archive, by id."""
    archive = shop.tables.archive
    found: dict[str, list[str]] = {}
    with shop.engine.connect() as connection:
        for row_id, outcome in connection.execute(select(archive.c.id, archive.c.outcome)):
            found.setdefault(row_id, []).append(outcome)
    return found


def test_what_is_discarded_goes_to_the_archive_and_show_says_so(shop: Shop) -> None:
    add(shop, "m-1", "m-2", key="order 7", state=RowState.PARKED)

    discarded = shop.command("messages", "discard", "m-1", "unknown", "--yes")
    text = shop.command("messages", "show", "m-1")
    as_json = json.loads(shop.command("messages", "show", "m-1", "--json").stdout)

    assert (discarded.returncode, discarded.stdout) == (1, "discard: 1 of 2\n")
    assert state_of(shop) == {"m-2": "parked"}
    assert outcomes(shop) == {"m-1": ["discarded"]}
    assert re.fullmatch(r"m-1 for topic was discarded by an operator at \S+Z\n", text.stdout)
    assert (text.returncode, as_json["state"], as_json["message_key"]) == (1, "discarded", "order 7")
    assert as_json["body_sha256"] == hashlib.sha256(b"the secret").hexdigest()


def test_what_is_discarded_of_every_table_goes_to_one_archive(split_shop: Shop) -> None:
    for number, table in enumerate(TABLES):
        add(split_shop, f"m-{number}", table=table, state=RowState.PARKED)

    done = split_shop.command("messages", "discard", "--all", "--yes")

    assert done.stdout == "discard: 4 of 4\n"
    assert outcomes(split_shop) == {f"m-{number}": ["discarded"] for number in range(4)}


def test_each_message_is_sent_or_discarded_once_however_many_decide_about_it_at_once(
    shop: Shop, broker: RecordingBroker
) -> None:
    ids = [f"m-{number:03d}" for number in range(120)]
    add(shop, *ids, state=RowState.PARKED)
    engine = shop.background_engine()
    admin = MessageAdmin(dialect=shop.engine.dialect, schema=shop.database.schema)
    together = threading.Barrier(3)

    def decide(action: AdminAction) -> int:
        together.wait()
        changed = 0
        for begin in range(0, len(ids), 4):
            with engine.begin() as connection:
                changed += admin.change(connection, action, ids[begin : begin + 4])
        return changed

    with ThreadPoolExecutor(3) as threads:
        first, second, retried = threads.map(decide, [AdminAction.DISCARD, AdminAction.DISCARD, AdminAction.RETRY])
    shop.scan(broker).run()

    sent = {one for one, found in outcomes(shop).items() if found == ["stored"]}
    discarded = {one for one, found in outcomes(shop).items() if found == ["discarded"]}
    assert sent | discarded == set(ids)
    assert sorted(broker.ids) == sorted(sent)
    assert (first + second, retried) == (len(discarded), len(sent))
    assert shop.rows() == []


def test_a_discard_that_waited_for_a_retry_leaves_the_message_to_its_sender(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    add(mysql_shop, "m-1", state=RowState.PARKED)
    engine = mysql_shop.background_engine()
    admin = MessageAdmin(dialect=mysql_shop.engine.dialect, schema=mysql_shop.database.schema)

    def discard() -> int:
        with engine.begin() as connection:
            return admin.discard(connection, ["m-1"])

    with ThreadPoolExecutor(1) as threads, engine.begin() as connection:
        assert admin.retry(connection, ["m-1"]) == 1
        waiting = threads.submit(discard)
        wait_for_lock_waits(mysql_shop)
        connection.commit()
        assert waiting.result() == 0
    mysql_shop.scan(broker).run()

    assert outcomes(mysql_shop) == {"m-1": ["stored"]}


def test_what_might_still_be_sent_is_never_deleted(shop: Shop) -> None:
    add(shop, "m-1")

    refused = shop.command("messages", "discard", "m-1", "--yes")

    assert (refused.returncode, refused.stdout) == (1, "discard: 0 of 1\n")
    assert "`outbox messages park` sets a pending one aside first" in refused.stderr
    assert state_of(shop) == {"m-1": "pending"}


def test_what_somebody_is_just_sending_stays_theirs(shop: Shop) -> None:
    shop.add_due(1, due_for_us=-HOUR_US)
    before = shop.rows()

    done = [shop.command("messages", action, "m-0000") for action in ("retry", "park")]

    assert [one.stdout for one in done] == ["retry: 0 of 1\n", "park: 0 of 1\n"]
    assert shop.rows() == before


@pytest.mark.parametrize("action", AdminAction)
def test_a_change_locks_the_rows_that_it_names_and_no_producer_waits_for_it(
    fresh_mysql_shop: Shop, action: AdminAction
) -> None:
    shop = fresh_mysql_shop  # what is read and locked is counted
    ids = shop.add_due(1_000)
    with shop.engine.begin() as connection:
        if action is not AdminAction.PARK:
            connection.execute(update(shop.tables.message).values(state=RowState.PARKED))
    background = shop.background_engine()
    admin = MessageAdmin(dialect=shop.engine.dialect, schema=shop.database.schema)

    with background.connect() as connection, background.connect() as producer:
        changed = admin.change(connection, action, [*ids[100:300], "m-0150x", "zzzz"])
        locked = rows_locked(shop, connection)
        for name in ("0000", "m-0150y", "zzzz-last"):
            fresh = publish_row(Message(id=name, topic="topic", body=b""))
            shop.store.insert(producer, [fresh], token="e" * 32, lease_us=HOUR_US)
        producer.rollback()
        connection.rollback()

    assert changed == 200
    assert 200 <= locked <= 420  # the row's own lock, and the index's where the row moves in it


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["retry"], "name either ids, or --all"),
        (["retry", "m-1", "--all"], "name either ids, or --all"),
        (["retry", "m-1", "--topic", "topic"], "name either ids, or --all"),
        (["discard", "--all", "--state", "pending", "--yes"], "`discard` is for parked messages"),
        (["park", "--all", "--state", "parked", "--yes"], "`park` is for pending messages"),
        (["retry", "--all", "--older-than", "999999999d", "--yes"], "an age is at most 100,000d"),
        (["discard", "m-1"], "say --yes"),
        (["discard", "--all"], "say --yes"),
        (["retry", "--all"], "say --yes"),
        (["park", "--all", "--state", "pending"], "say --yes"),
    ],
)
def test_what_is_not_said_clearly_changes_nothing(sqlite_shop: Shop, arguments: list[str], says: str) -> None:
    add(sqlite_shop, "m-1", state=RowState.PARKED)
    add(sqlite_shop, "m-2")

    done = sqlite_shop.command("messages", *arguments)

    assert done.returncode == 2
    assert re.fullmatch(rf"error: .*{re.escape(says)}.*\n", done.stderr)
    assert state_of(sqlite_shop) == {"m-1": "parked", "m-2": "pending"}


def at_a_terminal(shop: Shop, *arguments: str, types: str) -> tuple[int, str]:
    """The command with a person at its terminal; the status, and all that the terminal showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({"PYTHONPATH": str(ROOT), "COLUMNS": "120", "TERM": "xterm"})
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "outbox", *arguments, "--url", shop.database.url])
    os.write(terminal, types.encode())
    seen = b""
    try:
        while more := os.read(terminal, 4096):
            seen += more
    except OSError:  # the terminal's end
        pass
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), seen.decode()


@pytest.mark.processes
def test_people_are_asked_before_and_see_progress(sqlite_shop: Shop) -> None:
    add(sqlite_shop, *[f"m-{number}" for number in range(300)], state=RowState.PARKED)

    refused = at_a_terminal(sqlite_shop, "messages", "discard", "--all", types="n\n")
    left = len(state_of(sqlite_shop))
    agreed = at_a_terminal(sqlite_shop, "messages", "discard", "--all", types="y\n")

    assert refused[0] == 2
    assert "Delete 300 message(s)? They will never be sent." in refused[1]
    assert left == 300
    assert agreed[0] == 0
    assert "discard ━" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", agreed[1])
    assert state_of(sqlite_shop) == {}


def test_a_change_of_many_tells_a_program_how_far_it_is(sqlite_shop: Shop) -> None:
    add(sqlite_shop, *[f"m-{number:04d}" for number in range(3 * BATCH_ROWS)], state=RowState.PARKED)

    done = sqlite_shop.command("messages", "retry", "--all", "--yes", "--progress", "json", "--json")

    objects = [json.loads(line) for line in done.stderr.splitlines()]
    assert json.loads(done.stdout)["changed"] == 3 * BATCH_ROWS
    assert {(one["operation"], one["total"]) for one in objects} == {("retry", 3 * BATCH_ROWS)}
    assert (objects[0]["done"], objects[-1]["done"]) == (BATCH_ROWS, 3 * BATCH_ROWS)
    assert objects[-1]["left_ms"] == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that a shell began in its background ignores the signal, and so would the command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_between_two_batches_and_says_how_far_it_came(
    sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(sqlite_shop, *[f"m-{number:04d}" for number in range(3 * BATCH_ROWS)], state=RowState.PARKED)
    discard = MessageAdmin.discard
    batches = 0

    def interrupted(admin: MessageAdmin, connection: Any, ids: Any) -> int:
        nonlocal batches
        batches += 1
        changed = discard(admin, connection, ids)
        if batches == 2:
            signal.raise_signal(signal.SIGINT)
        return changed

    monkeypatch.setattr(MessageAdmin, "discard", interrupted)

    done = sqlite_shop.command("messages", "discard", "--all", "--yes")

    assert done.returncode == 130
    assert done.stdout == f"discard: {BATCH_ROWS} of {3 * BATCH_ROWS}\n"
    assert len(state_of(sqlite_shop)) == 2 * BATCH_ROWS  # the second batch was rolled back


def test_a_discarded_message_holds_up_its_ordered_key_no_more(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER, ordered={"orders"})
    for name in ("first", "second"):
        with box.begin() as connection:
            box.publish("orders", "", key="7", message_id=name, session=connection)
    shop.end_leases()
    broker.rejects["first"] = "never"
    shop.scan(broker).run()
    parked = state_of(shop)["first"]

    done = shop.command("messages", "discard", "first", "--yes")
    shop.end_leases()
    shop.scan(broker).run()

    assert (parked, done.returncode) == ("parked", 0)
    assert broker.ids == ["second"]
    with shop.engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(shop.tables.order_queue)) == 0


def test_status_sums_all_tables_and_names_those_with_something_in_them(split_shop: Shop) -> None:
    add(split_shop, "m-1", "m-2", table="message_0000")
    add(split_shop, "m-3", table="message_0002", state=RowState.PARKED)

    program = split_shop.command("status", "--json")
    people = split_shop.command("status")

    figures = json.loads(program.stdout)
    assert (program.returncode, people.returncode) == (1, 1)
    assert (figures["pending"], figures["due"], figures["parked"], figures["ok"]) == (2, 2, 1, False)
    assert figures["oldest_due_age_us"] == figures["tables"]["message_0000"]["oldest_due_age_us"] >= HOUR_US
    assert sorted(figures["tables"]) == TABLES
    assert figures["tables"]["message_0002"]["parked"] == 1
    assert "message_0000" in people.stdout
    assert "message_0001" not in people.stdout
    assert f"tables: {len(TABLES)} at revision none" in people.stdout


def test_status_shows_who_shares_the_sources_and_which_are_nobodys(shop: Shop) -> None:
    without = json.loads(shop.command("status", "--json").stdout)
    ours, theirs = [
        open_assignment(shop.database.url, schema=shop.database.schema, zone=zone, options=LONG_LEASES)
        for zone in ("zone-a", None)
    ]
    sources = [Resource(f"source-{number}") for number in range(5)]
    ours.beat(sources)
    alone = shop.command("status")
    theirs.beat(sources)
    ours.beat(sources)
    theirs.beat(sources)
    shared = json.loads(shop.command("status", "--json").stdout)["compensators"]
    with shop.engine.begin() as connection:
        mine = shop.tables.instance.c.id == ours.instance
        connection.execute(update(shop.tables.instance).where(mine).values(alive_until_us=1))
    dead = shop.command("status")
    for one in (ours, theirs):
        one.leave()

    assert without["compensators"] is None
    assert ours.instance in alone.stdout
    assert [(one["id"], one["zone"], one["sources"]) for one in shared["instances"]] == [
        (ours.instance, "zone-a", 3), (theirs.instance, None, 2),
    ]  # fmt: skip
    assert (shared["unserved"], ours.instance in dead.stdout) == ([], False)
    assert re.search(r"sources without a live compensator: 3 \(source-\d, source-\d, source-\d\)", dead.stdout)


def test_status_knows_tables_from_before_leases(sqlite_shop: Shop) -> None:
    sqlite_shop.execute("DROP TABLE outbox_compensator_lease")

    done = sqlite_shop.command("status")

    assert (done.returncode, "outbox db upgrade" in done.stdout) == (1, True)


def test_status_says_by_its_exit_status_whether_all_is_well(sqlite_shop: Shop) -> None:
    old = sqlite_shop.command("status")
    with sqlite_shop.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE outbox_alembic_version (version_num VARCHAR(32))")
        connection.exec_driver_sql(f"INSERT INTO outbox_alembic_version VALUES ('{schema_upgrade.head()}')")

    well = sqlite_shop.command("status")
    add(sqlite_shop, "m-1")
    overdue = sqlite_shop.command("status", "--overdue-seconds", "60")
    allowed = sqlite_shop.command("status", "--overdue-seconds", "7200")
    add(sqlite_shop, "m-2", state=RowState.PARKED)
    parked = sqlite_shop.command("status", "--overdue-seconds", "7200")

    assert [done.returncode for done in (old, well, overdue, allowed, parked)] == [1, 0, 1, 0, 1]
    reasons = [
        [line for line in done.stdout.splitlines() if line.startswith("not ok: ")]
        for done in (old, well, overdue, allowed, parked)
    ]
    assert [len(lines) for lines in reasons] == [1, 0, 1, 0, 1]
    assert reasons[0] == [f"not ok: the tables are at revision none, not {schema_upgrade.head()}: outbox db upgrade"]
    assert re.fullmatch(
        r"not ok: the oldest message waits for 3,\d{3}\.\d s since it was committed or due, more than 60 s: .*",
        reasons[2][0],
    )
    assert reasons[4] == ["not ok: 1 parked, which nothing sends: outbox messages list --state parked"]
    assert "outbox_message" in well.stdout


def test_without_tables_the_cure_is_named(sqlite_shop: Shop) -> None:
    sqlite_shop.execute("DROP TABLE outbox_message")

    for arguments in (["status"], ["messages", "list"], ["messages", "retry", "m-1"]):
        done = sqlite_shop.command(*arguments)
        assert done.returncode == 2
        assert re.fullmatch(r"error: the outbox tables are missing .*outbox db upgrade --url URL.*\n", done.stderr)


def test_a_command_without_subcommands_is_used_without_one(sqlite_shop: Shop) -> None:
    usage = sqlite_shop.command("status", "--help").stdout.splitlines()[0]

    assert usage == "Usage: outbox status [OPTIONS]"


def test_a_password_is_read_from_its_file_and_never_shown(
    mariadb: Database, shared_mariadb: Server, tmp_path: Path
) -> None:
    user = f"reader_{mariadb.schema}"[:32]
    shared_mariadb.execute(f"CREATE USER '{user}'@'%' IDENTIFIED BY 'hunter2'", f"GRANT ALL ON *.* TO '{user}'@'%'")
    (tmp_path / "right").write_text("hunter2\n")
    (tmp_path / "wrong").write_text("hunter3\n")
    url = make_url(mariadb.url).set(username=user).render_as_string(hide_password=False)
    try:
        with open_shop(mariadb) as shop:
            other = Shop(replace(mariadb, url=url), shop.engine)
            found = {
                name: [
                    other.command(*command, "--password-file", str(tmp_path / name))
                    for command in (["messages", "list"], ["messages", "retry", "--all", "--yes"], ["db", "current"])
                ]
                for name in ("right", "wrong", "missing")
            }
    finally:
        shared_mariadb.execute(f"DROP USER '{user}'@'%'")

    assert [done.stderr for done in found["right"]] == ["", "", ""]
    assert all("refused the user or its password" in done.stderr for done in found["wrong"])
    assert all("grants" not in done.stderr and done.returncode == 2 for done in found["wrong"])
    assert all("cannot read the password file" in done.stderr for done in found["missing"])
    assert "hunter" not in str(found)


def test_a_user_who_may_only_read_is_told_which_grants_are_missing(mariadb: Database, shared_mariadb: Server) -> None:
    user = f"reader_{mariadb.schema}"[:32]
    shared_mariadb.execute(f"CREATE USER '{user}'@'%' IDENTIFIED BY 'r'", f"GRANT SELECT ON *.* TO '{user}'@'%'")
    url = make_url(mariadb.url).set(username=user, password="r").render_as_string(hide_password=False)
    try:
        with open_shop(mariadb) as shop:
            add(shop, "m-1", state=RowState.PARKED)
            other = Shop(replace(mariadb, url=url), shop.engine)
            read = other.command("messages", "list")
            written = other.command("messages", "retry", "m-1")
    finally:
        shared_mariadb.execute(f"DROP USER '{user}'@'%'")

    assert (read.returncode, written.returncode) == (0, 2)
    assert "lacks a privilege" in written.stderr
    assert "SELECT, INSERT, UPDATE, DELETE" in written.stderr
    assert "password" not in written.stderr


def test_status_warns_of_rows_that_were_refused_for_a_minute_and_are_not_due(
    shop: Shop, broker: RecordingBroker
) -> None:
    add(shop, "m-1", topic="without-a-queue")
    broker.defers["m-1"] = "no queue"
    shop.command("db", "upgrade")
    for _ in range(RETRYING_ATTEMPTS - 2):  # the producer's own is the first
        shop.scan(broker).run()
        shop.end_delays()
    shop.scan(broker).run()
    message = shop.tables.message
    with shop.engine.begin() as connection:  # its delay is a second, which the command may take
        connection.execute(update(message).values(due_at_us=message.c.due_at_us + HOUR_US))

    warned, people = json.loads(shop.command("status", "--json").stdout), shop.command("status")
    with shop.engine.begin() as connection:
        connection.execute(update(message).values(attempts=RETRYING_ATTEMPTS - 1))
    before = json.loads(shop.command("status", "--json").stdout)

    assert (warned["due"], warned["pending"], warned["retrying"], warned["ok"]) == (0, 1, 1, False)
    assert "retrying" in people.stdout
    assert any("outbox messages list" in line for line in people.stdout.splitlines() if "1 retrying" in line)
    assert people.returncode == 1
    assert before["retrying"] == 0
