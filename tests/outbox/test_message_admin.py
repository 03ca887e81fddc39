"""What an operator may do with rows: take parked ones up, set pending ones aside, delete what will never be sent."""

from __future__ import annotations

import json
import subprocess

import pytest
from sqlalchemy import update

from outbox.admin.message_admin import AdminAction, MessageAdmin, MessageSelection
from outbox.store.database import background_engine
from outbox.store.row import publish_row
from outbox.store.schema import RowState
from outbox_core import Message
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.innodb_locks import rows_locked
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

HOUR_US = 3_600_000_000


@pytest.fixture
def mysql_shop(fresh_mysql_shop: Shop) -> Shop:
    """What is read and locked is counted here."""
    return fresh_mysql_shop


def add(shop: Shop, name: str, *, lease_us: int = -HOUR_US) -> None:
    """A pending row; without a lease that still runs, unless one is given."""
    row = publish_row(Message(id=name, topic="topic", body=b"the secret"))
    with shop.engine.begin() as connection:
        shop.store.insert(connection, [row], token="d" * 32, lease_us=lease_us)


def admin(shop: Shop) -> MessageAdmin:
    """The operator's statements on this database."""
    return MessageAdmin(dialect=shop.engine.dialect, schema=shop.database.schema)


def test_a_parked_row_is_sent_after_retry(shop: Shop, broker: RecordingBroker) -> None:
    add(shop, "m-1")
    broker.rejects["m-1"] = "not today"
    shop.scan(broker).run()
    broker.rejects.clear()

    with shop.engine.begin() as connection:
        changed = admin(shop).retry(connection, ["m-1", "unknown"])
    report = shop.scan(broker).run()

    assert (changed, report.accepted) == (1, 1)
    assert broker.ids == ["m-1"]


def test_a_row_set_aside_is_not_sent_and_may_be_deleted(shop: Shop, broker: RecordingBroker) -> None:
    add(shop, "m-1")

    with shop.engine.begin() as connection:
        parked = admin(shop).park(connection, ["m-1"])
        parked_again = admin(shop).park(connection, ["m-1"])
    claimed = shop.scan(broker).run().claimed
    with shop.engine.begin() as connection:
        discarded = admin(shop).discard(connection, ["m-1"])

    assert (parked, parked_again, claimed, discarded) == (1, 0, 0, 1)
    assert shop.rows() == []


def test_what_might_still_be_sent_is_never_deleted(shop: Shop) -> None:
    add(shop, "m-1")

    with shop.engine.begin() as connection:
        discarded = admin(shop).discard(connection, ["m-1"])

    assert discarded == 0
    assert len(shop.rows()) == 1


def test_a_row_that_somebody_is_just_sending_stays_theirs(shop: Shop) -> None:
    add(shop, "m-1", lease_us=HOUR_US)
    before = shop.rows()

    with shop.engine.begin() as connection:
        changed = [admin(shop).retry(connection, ["m-1"]), admin(shop).park(connection, ["m-1"])]

    assert changed == [0, 0]
    assert shop.rows() == before


def test_lists_are_bounded_filtered_and_show_no_bodies(shop: Shop) -> None:
    for number in range(5):
        add(shop, f"m-{number}")
    with shop.engine.begin() as connection:
        admin(shop).park(connection, ["m-0"])
        all_but_two = admin(shop).rows(connection, MessageSelection(), limit=3)
        parked = admin(shop).rows(connection, MessageSelection(state=RowState.PARKED), limit=100)
        pending = admin(shop).rows(connection, MessageSelection(state=RowState.PENDING), limit=100)

    assert len(all_but_two) == 3
    assert [row["id"] for row in parked] == ["m-0"]
    assert [row["id"] for row in pending] == ["m-1", "m-2", "m-3", "m-4"]
    assert "secret" not in str([*all_but_two, *parked, *pending])
    assert all(-HOUR_US - 60_000_000 <= row["due_in_us"] <= -HOUR_US for row in pending)


def messages(shop: Shop, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`outbox messages` as people run it."""
    command = ["messages", *arguments, "--url", shop.database.url]
    return fork_server().run("outbox", *command, env=environment(COLUMNS="200"))


@pytest.mark.processes
def test_the_command_parks_lists_retries_and_discards(sqlite_shop: Shop) -> None:
    add(sqlite_shop, "m-1")

    parked = messages(sqlite_shop, "park", "m-1")
    listed = messages(sqlite_shop, "list", "--state", "parked", "--json")
    retried = messages(sqlite_shop, "retry", "m-1", "unknown")
    refused = messages(sqlite_shop, "discard", "m-1", "--yes")

    assert (parked.returncode, parked.stdout.strip()) == (0, "park: 1 of 1")
    assert json.loads(listed.stdout)["last_error"] == "parked by an operator"
    assert "secret" not in listed.stdout
    assert (retried.returncode, retried.stdout.strip()) == (1, "retry: 1 of 2")
    assert (refused.returncode, refused.stdout.strip()) == (1, "discard: 0 of 1")
    assert "`outbox messages park` sets a pending one aside first" in refused.stderr
    assert len(sqlite_shop.rows()) == 1


@pytest.mark.parametrize("action", AdminAction)
def test_a_change_locks_the_rows_that_it_names_and_no_producer_waits_for_it(
    mysql_shop: Shop, action: AdminAction
) -> None:
    rows = [publish_row(Message(id=f"m-{number:04d}", topic="topic", body=b"")) for number in range(1_000)]
    with mysql_shop.engine.begin() as connection:
        mysql_shop.store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
        if action is not AdminAction.PARK:
            connection.execute(update(mysql_shop.tables.message).values(state=RowState.PARKED))
    background = background_engine(mysql_shop.engine)

    with background.connect() as connection, background.connect() as producer:
        named = [row.id for row in rows[100:300]]
        changed = admin(mysql_shop).change(connection, action, [*named, "m-0150x", "zzzz"])
        locked = rows_locked(mysql_shop, connection)
        for name in ("0000", "m-0150y", "zzzz-last"):
            fresh = publish_row(Message(id=name, topic="topic", body=b""))
            mysql_shop.store.insert(producer, [fresh], token="e" * 32, lease_us=HOUR_US)
        producer.rollback()
        connection.rollback()
    background.dispose()

    assert changed == 200
    assert 200 <= locked <= 420  # the row's own lock, and the index's where the row moves in it
