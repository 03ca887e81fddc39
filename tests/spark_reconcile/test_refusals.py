"""What cannot be judged is refused in one line with the cure, before Spark is started; and how the command ends."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from messaging.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing, StorageFailed
from spark_reconcile.config import BrokerSource, DatabaseSource, InboxSource, Rule, Settings, read_settings
from spark_reconcile.database import Place
from spark_reconcile.legs import check_sources
from tests.spark_reconcile.ledger import LEDGER, settled, write

Change = Callable[[Settings], Settings]


@pytest.fixture
def books(tmp_path: Path) -> Settings:
    """Three consistent messages, on disk."""
    return write([settled(number) for number in range(3)], folder=tmp_path, url=_url(tmp_path), schema=None)


def _rule(**changes: object) -> Change:
    return lambda one: msgspec.structs.replace(one, rules=[msgspec.structs.replace(one.rules[0], **changes)])


def _database(url: str) -> Change:
    return lambda one: msgspec.structs.replace(one, database=DatabaseSource(url=url))


def _inboxes(*groups: str) -> Change:
    return lambda one: msgspec.structs.replace(one, inboxes=[InboxSource(group=group) for group in groups])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_rule(table="payments"), ConfigurationError, "there is no table payments"),
        (_rule(key_column="order"), ConfigurationError, "it has order_id, paid_at_us, status"),
        (_rule(where={"state": "PAID"}), ConfigurationError, "no column state"),
        (_rule(time_column="status"), ConfigurationError, r"varchar\(8\); time_column must be an integer column"),
        (_rule(time_unit="min"), ConfigurationError, "time_unit is us, ms or s"),
        (_rule(table="payment; drop table x"), ConfigurationError, "is not a table's or column's name"),
        (_rule(name="it's"), ConfigurationError, "quotes"),
        (_inboxes("x' or '1'='1"), OutboxError, "consumer group"),
        (_inboxes(LEDGER, LEDGER), ConfigurationError, "twice"),
        (_database("sqlite:////nowhere/at/all.db"), DatabaseUnavailable, "check its url"),
        (_database("postgresql://localhost/shop"), ConfigurationError, "not postgresql://"),
        (_database("mysql+pymysql://root@127.0.0.1:port/shop"), ConfigurationError, "cannot be taken apart"),
        (_database("mysql+pymysql://root@127.0.0.1:1/shop"), DatabaseUnavailable, "check its url and that it runs"),
        (_database("shop.db"), ConfigurationError, "sqlite:///file.db"),
    ],
)
def test_a_source_that_cannot_be_judged_is_refused_with_the_cure(
    books: Settings, change: Change, error: type[Exception], says: str
) -> None:
    settings = change(books)

    with pytest.raises(error, match=says) as refused:
        check_sources(settings)

    assert "\n" not in str(refused.value)
    assert not Path(books.output.folder).exists()


def test_consistent_sources_pass(books: Settings) -> None:
    check_sources(books)


@pytest.mark.parametrize("table", ["outbox_message", "outbox_archive", "outbox_inbox"])
def test_a_missing_table_of_the_outbox_is_named(books: Settings, tmp_path: Path, table: str) -> None:
    with closing(sqlite3.connect(tmp_path / "b.db")) as connection:
        connection.execute(f"DROP TABLE {table}")

    with pytest.raises(SchemaMissing, match=table.removeprefix("outbox_")):
        check_sources(books)


def test_a_file_that_is_no_database_is_said_to_be_none(books: Settings, tmp_path: Path) -> None:
    (tmp_path / "b.db").write_bytes(b"not a database at all" * 100)

    with pytest.raises(DatabaseUnavailable, match=r"b\.db .*not a database"):
        check_sources(books)


def test_a_folder_that_is_not_the_brokers_is_refused(books: Settings, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(books, broker=BrokerSource(data=str(tmp_path / "elsewhere")))

    with pytest.raises(ConfigurationError, match="not a broker's data folder"):
        check_sources(settings)


def test_a_damaged_head_of_a_closed_segment_is_named(books: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "broker" / "messages"
    first = next(folder.glob("*.log"))
    (folder / f"{9_999:020d}.log").write_bytes(first.read_bytes())
    first.write_bytes(b"\0" + first.read_bytes()[1:])

    with pytest.raises(StorageFailed, match=first.name):
        check_sources(books)


def test_a_password_is_never_repeated() -> None:
    place = Place.of("mysql+pymysql://shop:s3cret@db.example:3307/shop")

    assert str(place) == "db.example:3307/shop"
    with pytest.raises(ConfigurationError) as refused:
        Place.of("oracle://shop:s3cret@db.example/shop")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[database", "is not TOML"),
        ("[broker]\ndata = 'x'", "missing required field `database`"),
        ("[database]\nurl = 'sqlite:///x.db'\n[broker]\ndata = 'x'\n[grace]\nsecond = 1", "did you mean `seconds`"),
        ("[database]\nurl = 'sqlite:///x.db'\n[broker]\ndate = 'x'", "did you mean `data`"),
        ("[database]\nurl = 5\n[broker]\ndata = 'x'", r"Expected `str`, got `int` - at `\$.database.url`"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_place_and_cure(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "reconcile.toml"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=says) as refused:
        read_settings(path)

    assert str(path) in str(refused.value)


def test_missing_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*reconcile\.toml"):
        read_settings(tmp_path / "reconcile.toml")


def test_an_unknown_key_is_usage_and_a_missing_source_is_not_comparable(books: Settings, tmp_path: Path) -> None:
    usage = _outbox(_toml(tmp_path, books, extra="[grace]\nsecond = 1"))
    (tmp_path / "b.db").unlink()
    absent = _outbox(_toml(tmp_path, books))

    assert (usage.returncode, absent.returncode) == (2, 3)
    for ended in (usage, absent):
        assert ended.stdout == ""
        assert ended.stderr.startswith("error: ")
        assert ended.stderr.count("\n") == 1


@pytest.mark.spark
def test_a_run_with_findings_ends_with_1_and_prints_the_summary_as_json(tmp_path: Path) -> None:
    stories = [settled(0), settled(1), replace(settled(2), stored=0, delivered_ms={}, acked=set())]
    settings = write(stories, folder=tmp_path, url=_url(tmp_path), schema=None)

    ended = _outbox(_toml(tmp_path, settings), "--json")

    assert ended.returncode == 1, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["lost"], summary["unexplained"], summary["balanced"]) == (2, 0, False)
    assert Path(summary["folder"], "report.html").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_a_balanced_run_ends_with_0_and_says_so_in_one_sentence(books: Settings, tmp_path: Path) -> None:
    ended = _outbox(_toml(tmp_path, books))

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Balanced: all of 3 messages and 3 business rows are explained.")


def _url(folder: Path) -> str:
    return f"sqlite:///{folder / 'b.db'}"


def _toml(folder: Path, settings: Settings, *, extra: str = "") -> Path:
    rule: Rule = settings.rules[0]
    path = folder / "reconcile.toml"
    path.write_text(f"""
master = "local[2]"
now_ms = {settings.now_ms}

[database]
url = "{settings.database.url}"

[broker]
data = "{settings.broker.data}"

[[rules]]
name = "{rule.name}"
table = "{rule.table}"
where = {{ status = "PAID" }}
key_column = "{rule.key_column}"
time_column = "{rule.time_column}"
topic = "{rule.topic}"

[[inboxes]]
group = "{LEDGER}"

[output]
folder = "{settings.output.folder}"

{extra}
""")
    return path


def _outbox(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outbox", "reconcile", "run", "--config", str(config), *more]
    environment = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
