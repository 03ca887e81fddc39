"""Guarantees 2 to 4: a process killed at any step of the send journey loses nothing and invents nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox import SenderLimits
from tests.outbox.shop import NO_SENDER, Payment, Shop

CHILD = Path(__file__).with_name("dying_process.py")
ROOT = Path(__file__).parents[2]
CHILD_SECONDS_MAX = 60

POINTS = {
    # point: (the transaction committed, rows are left, the broker has them already)
    "before insert": (False, 0, False),
    "after insert": (False, 0, False),
    "after commit": (True, 3, False),
    "before publish": (True, 3, False),
    "after publish": (True, 3, True),
    "before delete": (True, 3, True),
    "after delete": (True, 3, True),
    "the end": (True, 0, True),
}


def run_until_killed(point: str, shop: Shop, broker_url: str) -> None:
    """Run the dying process; anything but its death by SIGKILL is a failure of the test."""
    arguments = [point, shop.database.url, shop.database.schema or "", broker_url]
    done = subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=CHILD_SECONDS_MAX, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


def delivered(broker: EmbeddedBroker) -> list[str]:
    """The bodies that a consumer group of this broker gets, each as often as it gets it."""
    found = broker.pull("payments", "accounts", max_messages=100)
    return sorted(delivery.body.decode() for delivery in found)


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_while_it_publishes_loses_and_invents_nothing(
    shop: Shop, embedded: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    committed, rows_left, broker_had_them = POINTS[point]

    run_until_killed(point, shop, f"embedded:{tmp_path / 'broker-data'}")

    assert shop.payments() == ([1] if committed else [])
    assert len(shop.rows()) == rows_left
    assert shop.scan(embedded).run().claimed == 0, "a lease was taken over before its end"
    shop.end_leases()
    report = shop.scan(embedded).run()
    assert (report.accepted, shop.rows()) == (rows_left, [])
    assert delivered(embedded) == ([f"committed {number}" for number in range(3)] if committed else [])
    outcomes = {"duplicate"} if broker_had_them else {"stored"}
    assert archived_outcomes(shop) == (outcomes if rows_left else archived_outcomes(shop) & {"stored"})


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


def archived_outcomes(shop: Shop) -> set[str]:
    """The broker's words on what is in the archive."""
    with shop.engine.connect() as connection:
        return set(connection.scalars(shop.tables.archive.select().with_only_columns(shop.tables.archive.c.outcome)))
