"""Real processes: what one held is another's soon after a kill -9, and at once after a SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from sqlalchemy import select, update

from tests.fixtures.fork_server import Program, environment, fork_server
from tests.outbox.shop import Shop

pytestmark = pytest.mark.processes

CHILD = "tests.compensator.assignment.beating_process"
SOURCES = ["a", "b", "c", "d"]
LINES_MAX = 6_000
WAIT_SECONDS = 300
TIMING = ("50", "600000")


def process(shop: Shop) -> Program:
    """One instance as a process."""
    arguments = [shop.database.url, shop.database.schema or "", ",".join(SOURCES), *TIMING]
    return fork_server().start(CHILD, *arguments, env=environment(), text=True, stdout=subprocess.PIPE)


def until_it_holds(child: Program, count: int) -> list[str]:
    """Read its beats until it holds so many sources."""
    assert child.stdout is not None
    for _ in range(LINES_MAX):
        line = child.stdout.readline()
        if not line:
            break
        held: list[str] = json.loads(line)
        if len(held) == count:
            return held
    pytest.fail(f"it never held {count} sources")


def end_lease_of(shop: Shop, source: str) -> None:
    """Let the time of the instance that holds it be over by the database's clock."""
    lease, instance = shop.tables.lease, shop.tables.instance
    holder = select(lease.c.instance).where(lease.c.source == source).scalar_subquery()
    with shop.engine.begin() as connection:
        # One statement: SQLite refuses, at once, a write behind a read before which another process has written.
        connection.execute(update(instance).where(instance.c.id == holder).values(alive_until_us=1))


def test_what_a_killed_process_held_is_anothers_when_its_lease_is_over(shop: Shop) -> None:
    with process(shop) as two:
        until_it_holds(two, 4)
        with shop.last_connections_ended(), process(shop) as one:
            shares = [until_it_holds(one, 2), until_it_holds(two, 2)]
            one.kill()
            one.wait(WAIT_SECONDS)
        end_lease_of(shop, shares[0][0])
        after = until_it_holds(two, 4)

    assert sorted([*shares[0], *shares[1]]) == SOURCES
    assert after == SOURCES


def test_what_a_stopped_process_held_is_anothers_long_before_its_lease_would_end(shop: Shop) -> None:
    with process(shop) as one, process(shop) as two:
        until_it_holds(one, 2)
        until_it_holds(two, 2)
        one.send_signal(signal.SIGTERM)
        after = until_it_holds(two, 4)
        status = one.wait(WAIT_SECONDS)

    assert after == SOURCES
    assert status == 0
