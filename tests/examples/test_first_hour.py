"""docs/guides/first-hour.md, typed as it stands into a shell: a real MariaDB, broker and compensator, and a kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_demo.ports import free_port
from tests.examples.guide_session import Terminal, section, steps, terminal
from tests.fixtures.local_server import LocalServer

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "first-hour.md"
WITHOUT_SPARK = (2, 3, 4, 5)
SERVICES = ("%3", "%2", "%4")  # the shell's jobs: consumer, compensator, the broker that was started again


@dataclass(frozen=True, slots=True)
class Hour:
    """A first hour without its last section: the terminal, the guide with this machine's names, what was not as
    written, and the exit statuses of its services after Ctrl-C.
    """

    terminal: Terminal
    guide: str
    server: LocalServer
    amiss: list[str]
    ended: dict[str, int]


@pytest.fixture(scope="module")
def hour(mariadb_of_module: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hour]:
    """The sections that need no Spark, done, and the services ended."""
    mariadb_of_module.execute("CREATE DATABASE shop")
    guide = _for_this_machine(GUIDE.read_text(), mariadb_of_module.url)
    with terminal(tmp_path_factory.mktemp("first-hour")) as opened:
        amiss = [line for number in WITHOUT_SPARK for line in _do(opened, section(guide, number))]
        ended = {job: opened.status(f"kill -INT {job}; wait {job}") for job in SERVICES}
        yield Hour(opened, guide, mariadb_of_module, amiss, ended)


@pytest.mark.mariadb
@pytest.mark.processes
@pytest.mark.slow
def test_every_block_runs_as_written_and_prints_what_the_page_says(hour: Hour) -> None:
    bought = hour.server.execute("SELECT order_id FROM shop.ticket ORDER BY order_id")

    assert hour.amiss == [], hour.terminal.text
    assert bought == [(17,), (18,), (19,)]
    assert "Traceback" not in hour.terminal.text


@pytest.mark.mariadb
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.spark
def test_its_proof_balances_and_finds_a_payment_that_is_taken_away(hour: Hour) -> None:
    amiss = _do(hour.terminal, section(hour.guide, 6))

    hour.server.execute("DELETE FROM shop.payment WHERE order_id = 18")
    tampered = hour.terminal.status("outbox reconcile run --config reconcile.toml")

    assert amiss == [], hour.terminal.text
    assert tampered == 1
    assert "phantom                      1" in hour.terminal.text.rpartition("business rows ")[2]


@pytest.mark.mariadb
@pytest.mark.processes
@pytest.mark.slow
def test_ctrl_c_ends_each_of_its_services_in_order(hour: Hour) -> None:
    assert hour.ended == dict.fromkeys(SERVICES, 0), hour.terminal.text


def _do(opened: Terminal, text: str) -> list[str]:
    return [line for step in steps(text) for line in opened.do(step)]


def _for_this_machine(guide: str, url: str) -> str:
    """The guide with this machine's server and free ports in place of those that it names."""
    for named, here in {
        "mysql+pymysql://root@127.0.0.1": url.rstrip("/"),
        "7788": str(free_port("127.0.0.1")),
        "9100": str(free_port("127.0.0.1")),
    }.items():
        assert named in guide
        guide = guide.replace(named, here)
    return guide
