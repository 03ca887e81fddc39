"""A source that is named twice, however it is spelled, is refused before any work: it would count twice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import InboxSource, OutboxSource, Settings
from spark_reconcile.load.read_plan import check_sources
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import PAID, REMINDER, TICKETS, World

TWICE = "are the same source: .* name it once"


@pytest.fixture
def written(sqlite: Database, tmp_path: Path) -> Settings:
    """One settled order on SQLite."""
    return _world().write(sqlite, tmp_path)


@pytest.mark.parametrize("spelling", ["same", "dotted", "linked", "hard"])
def test_a_rule_that_names_one_file_twice_is_refused(written: Settings, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "linked.db").symlink_to(tmp_path / "business.db")
    os.link(tmp_path / "business.db", tmp_path / "hard.db")
    other = {"same": "business.db", "dotted": "./business.db", "linked": "linked.db", "hard": "hard.db"}[spelling]
    urls = [written.database_url, f"sqlite:///{tmp_path}/{other}"]

    with pytest.raises(ConfigurationError, match=f"rule .*business.db and rule .*{other} {TWICE}"):
        check_sources(replace(written, rules=[replace(written.rules[0], urls=urls)]))


def test_a_file_that_is_another_one_is_no_second_name(written: Settings, tmp_path: Path) -> None:
    other = Database(name="sqlite", url=f"sqlite:///{tmp_path / 'other.db'}", schema=None)
    _world().write_tables(other)
    urls = [written.database_url, other.url]

    plan = check_sources(replace(written, rules=[replace(written.rules[0], urls=urls)]))

    assert sum(len(read.statements) for read in plan.rest) == 4


def test_an_outbox_that_is_named_twice_is_refused(written: Settings, tmp_path: Path) -> None:
    again = OutboxSource(url=f"sqlite:///{tmp_path}/./business.db")

    with pytest.raises(ConfigurationError, match=f"the outbox in .* and the outbox in .*/./business.db {TWICE}"):
        check_sources(replace(written, outboxes=[again]))


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [([], [], True), ([], [PAID], True), ([PAID], [PAID, REMINDER], True), ([PAID], [REMINDER], False)],
)
def test_an_inbox_of_one_group_is_named_once_a_topic(
    written: Settings, first: list[str], second: list[str], refused: bool
) -> None:
    inboxes = [InboxSource(group=TICKETS, topics=first), InboxSource(group=TICKETS, topics=second)]
    settings = replace(written, inboxes=inboxes)

    if refused:
        with pytest.raises(ConfigurationError, match=f"inboxes.. tickets .* {TWICE}"):
            check_sources(settings)
    else:
        assert len(check_sources(settings).inboxes[0].statements) == 2


def test_a_server_that_has_two_names_is_one_source(mysql_like: Database, tmp_path: Path) -> None:
    settings = _world().write(mysql_like, tmp_path)
    other = make_url(mysql_like.url).set(host="localhost").render_as_string(hide_password=False)
    assert other != mysql_like.url

    with pytest.raises(ConfigurationError, match=f"rule .*127.0.0.1.* and rule .*localhost.* {TWICE}"):
        check_sources(replace(settings, rules=[replace(settings.rules[0], urls=[mysql_like.url, other])]))
    with pytest.raises(ConfigurationError, match=f"the outbox in .*localhost.* {TWICE}"):
        check_sources(replace(settings, outboxes=[OutboxSource(url=other, schema=settings.schema)]))
    inboxes = [InboxSource(group=TICKETS), InboxSource(group=TICKETS, url=other)]
    with pytest.raises(ConfigurationError, match=f"inboxes.. tickets .*localhost.* {TWICE}"):
        check_sources(replace(settings, inboxes=inboxes))


def test_an_archive_folder_that_is_named_twice_or_holds_nothing_is_refused(written: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    folder.mkdir()

    with pytest.raises(ConfigurationError, match="holds no Parquet file"):
        check_sources(replace(written, archives=[folder]))
    (folder / "day.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigurationError, match=TWICE):
        check_sources(replace(written, archives=[folder, tmp_path / "." / "moved" / ".." / "moved"]))


def test_a_column_that_a_body_is_made_of_and_that_is_missing_is_named(written: Settings) -> None:
    rule = replace(written.rules[0], body={"order_id": "id", "state": "statsu"})

    with pytest.raises(ConfigurationError, match="no column statsu; did you mean status"):
        check_sources(replace(written, rules=[rule]))


def _world() -> World:
    world = World()
    world.groups()
    world.settled()
    return world
