"""Guarantees 2 to 4: a process killed at any step of the send journey loses nothing and invents nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sqlalchemy import select, update

from broker_adapter.embedded import EmbeddedBroker
from outbox.store.schema import RowState
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.shop import NO_SENDER, Shop

pytestmark = pytest.mark.processes

CHILD = "tests.outbox.dying_process"

POINTS = {
    # point: (rows that are left, what the broker says of each in the end; None where nothing was committed)
    "before insert": (0, None),
    "after insert": (0, None),
    "after commit": (3, "stored"),
    "before publish": (3, "stored"),
    "after publish": (3, "duplicate"),
    "before delete": (3, "duplicate"),
    "after delete": (3, "duplicate"),
    "the end": (0, "stored"),
}


def run_until_killed(point: str, shop: Shop, broker_url: str) -> None:
    """Run the dying process; anything but its death by SIGKILL is a failure of the test."""
    arguments = [point, shop.database.url, shop.database.schema or "", broker_url]
    with shop.last_connections_ended():
        done = fork_server().run(CHILD, *arguments, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr


def delivered(broker: EmbeddedBroker) -> list[str]:
    """The bodies that a consumer group of this broker gets, each as often as it gets it."""
    found = broker.pull("payments", "accounts", max_messages=100)
    return sorted(delivery.body.decode() for delivery in found)


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_while_it_publishes_loses_and_invents_nothing(
    shop: Shop, embedded: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    rows_left, outcome = POINTS[point]
    committed = outcome is not None

    run_until_killed(point, shop, f"embedded:{tmp_path / 'broker-data'}")

    assert shop.payments() == ([1] if committed else [])
    assert len(shop.rows()) == rows_left
    assert shop.scan(embedded).run().claimed == 0, "a lease was taken over before its end"
    shop.end_leases()
    report = shop.scan(embedded).run()
    assert (report.accepted, shop.rows()) == (rows_left, [])
    assert delivered(embedded) == ([f"committed {number}" for number in range(3)] if committed else [])
    assert archived_outcomes(shop) == ([outcome] * 3 if committed else [])


@pytest.mark.parametrize("point", ["scan: before publish", "scan: after publish", "scan: before settling"])
def test_a_compensator_killed_in_a_pass_loses_and_doubles_nothing(
    shop: Shop, embedded: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    box = shop.box(embedded, sender=NO_SENDER)

    @box.transactional
    def pay(session: object) -> None:
        for number in range(3):
            box.publish("payments", f"committed {number}")

    pay()
    shop.end_leases()

    run_until_killed(point, shop, f"embedded:{tmp_path / 'broker-data'}")

    assert len(shop.rows()) == 3
    assert shop.scan(embedded).run().claimed == 0, "a lease was taken over before its end"
    shop.end_leases()
    assert shop.scan(embedded).run().accepted == 3
    assert shop.rows() == []
    assert delivered(embedded) == [f"committed {number}" for number in range(3)]


@pytest.mark.parametrize("point", ["discard: before delete", "discard: after delete"])
def test_an_operator_killed_in_a_discard_has_discarded_nothing(shop: Shop, tmp_path: Path, point: str) -> None:
    ids = shop.add_due(3)
    with shop.engine.begin() as connection:
        connection.execute(update(shop.tables.message).values(state=RowState.PARKED, token=None))

    run_until_killed(point, shop, f"embedded:{tmp_path / 'broker-data'}")

    assert [(row["id"], row["state"], row["token"]) for row in shop.rows()] == [(one, "parked", None) for one in ids]
    assert archived_outcomes(shop) == []
    again = shop.command("messages", "discard", *ids, "--yes")
    assert (again.stdout, shop.rows(), archived_outcomes(shop)) == ("discard: 3 of 3\n", [], ["discarded"] * 3)


def archived_outcomes(shop: Shop) -> list[str]:
    """The broker's words on what is in the archive."""
    with shop.engine.connect() as connection:
        return list(connection.scalars(select(shop.tables.archive.c.outcome)))
