"""Under the pytest plugin nothing is sent to a live broker unless a test asks for it."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from outbox_core import connect
from tests.broker_adapter.servers import served
from tests.fixtures.databases import Database
from tests.house.test_rules import modules
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import open_shop
from tests.outbox_testing.guide import write_files
from tests.outbox_testing.test_plugin import run_pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "testing.md"
NAMED = "http://127.0.0.1:7788"
TOPICS = ["payment.completed", "ticket.issued", "trip.reminder"]
ASKS = """
from shop import pay

def test_of_the_service(outbox_sends):
    pay(71)
"""
ASKS_NOT = ASKS.replace("outbox_sends", "published")
KNOWS_NOTHING = ASKS.replace("outbox_sends", "")
IN_MEMORY = """
from outbox import Outbox
from shop import Payment, engine, sessions

def test_a_broker_in_memory(outbox_broker):
    with Outbox(engine, broker=outbox_broker) as box, sessions.begin() as session:
        session.add(Payment(order_id=72))
        box.publish("topic", "body", session=session)
    box.close()
    assert [one.body for one in outbox_broker.pull("topic", "group")] == [b"body"]
"""
SETTING = "[pytest]\noutbox_sends = true\n"
DEFAULT_PORTS = "7788|7789|3306|33060|6379|5672|4222|6222|9092|2181|6650|9876|8080|8081|9100"
ADDRESS = re.compile(rf"(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1\]):(?:{DEFAULT_PORTS})\b")
REPLACED = {
    "tests/examples/test_fragments.py",  # what a document says, replaced before it runs
    "tests/outbox_testing/guide.py",
    "tests/outbox_testing/test_nothing_is_sent.py",
    "tests/deploy/test_units.py",  # what a file of ours says, read and not run
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("test", "configuration", "sent"),
    [
        pytest.param(None, "", 0, id="the-guide"),
        pytest.param(ASKS_NOT, "", 0, id="a-test-that-captures"),
        pytest.param(KNOWS_NOTHING, "", 0, id="a-test-that-knows-of-no-fixture"),
        pytest.param(ASKS, "", 1, id="a-test-that-asks"),
        pytest.param(KNOWS_NOTHING, SETTING, 1, id="a-suite-that-asks"),
        pytest.param(IN_MEMORY, "", 0, id="a-broker-in-memory"),
    ],
)
def test_a_live_broker_gets_what_a_test_asks_to_send_and_nothing_else(
    tmp_path: Path, test: str | None, configuration: str, sent: int
) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    with served(tmp_path / "data") as server, closing(connect(server.url)) as broker:
        for path in write_files(GUIDE, folder, broker_url=server.url):
            if test is not None and path.name.startswith("test_"):
                path.unlink()
        if test is not None:
            (folder / "test_one.py").write_text(test)
        (folder / "pytest.ini").write_text(configuration or "[pytest]\n")

        done = run_pytest(folder)
        found = [one for topic in TOPICS for one in broker.pull(topic, "group", max_messages=100)]

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found) == sent


STATES = """
from sqlalchemy import text
from shop import engine, pay

def test_of_the_service():
    pay(71)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT state FROM outbox_message")) == "held"
"""


@pytest.mark.processes
def test_a_compensator_sends_nothing_of_what_a_test_has_committed(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    for path in write_files(GUIDE, folder, broker_url=NAMED):
        if path.name.startswith("test_"):
            path.unlink()
    (folder / "test_one.py").write_text(STATES)
    (folder / "pytest.ini").write_text("[pytest]\n")

    done = run_pytest(folder, verbosity="-v")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "what this process commits is held and never sent" in done.stdout
    shop = Database(name="sqlite", url=f"sqlite:///{folder / 'shop.db'}", schema=None)
    with open_shop(shop, has_tables=True) as opened:
        opened.end_leases()
        assert opened.row_topics() == ["payment.completed"]
        assert opened.scan(RecordingBroker()).run().claimed == 0
        assert opened.row_topics() == ["payment.completed"]


def test_no_test_of_ours_names_a_default_port() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in modules("tests")
        if str(path.relative_to(ROOT)) not in REPLACED
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ADDRESS.search(line)
    ]

    assert named == []
    assert ADDRESS.search(NAMED)


def test_a_guides_broker_is_one_that_is_not_there(tmp_path: Path) -> None:
    write_files(GUIDE, tmp_path)

    assert not [path for path in tmp_path.iterdir() if ADDRESS.search(path.read_text())]
    assert "broker=" in (tmp_path / "shop.py").read_text()
