"""The TOML file and the command: every mistake is named with its cure, and exit statuses mean what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import CompletenessBound, Condition, Operator, Settings
from spark_reconcile.cli.options import given_settings
from spark_reconcile.core.settings import KeyFormat
from spark_reconcile.core.settings_file import command_settings, read_config, settings_of
from spark_reconcile.load.spark_session import spark_session
from spark_reconcile.sources.dbapi_reader import DatabaseAddress
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World

FULL = """
[database]
url = "mysql+pymysql://app:secret@db/shop"
schema = "post"
complete_since = 2026-11-01
archive_days = 30
inbox_days = 7.5
lag_seconds = 2.5

[[outboxes]]
url = "sqlite:///second.db"
complete_until = 2026-11-01

[broker]
data = "broker-data"

[[rules]]
name = "paid orders are announced"
table = "orders"
where = { status = "PAID", kind = ["a", "b"] }
key_column = "id"
time_column = "paid_at_us"
topic = "order.paid"
deliver_at_column = "remind_at"
complete_since = 2026-11-01T00:00:00+01:00
complete_until = 2026-11-02T00:00:00+01:00

[[rules]]
name = "large"
table = "shop.orders"
where = [{ column = "cents", op = ">", value = 100 }, { column = "gone", op = "is null" }]
key_column = "id"
time_column = "paid_at"
time_unit = "ms"
url = "sqlite:///other.db"
topic = "order.large"

[[inboxes]]
group = "tickets"
topics = ["order.paid"]
complete_since = 5
complete_until = 7
lag_seconds = 1

[grace]
seconds = 5
late_after_seconds = 7.5
clock_skew_seconds = 0

[output]
folder = "/results"
keep_days = 90
"""
SMALL = """
[database]
url = "sqlite:///shop.db"
[broker]
data = "data"
"""


def test_a_full_file_is_read_to_the_last_key(tmp_path: Path) -> None:
    settings = _settings(tmp_path, FULL)

    first, second = settings.rules
    assert (settings.schema, settings.complete_since_ms) == ("post", 1_793_491_200_000)
    assert (settings.archive_days, settings.inbox_days, settings.keep_days) == (30, 7.5, 90)
    assert (settings.broker_data, settings.output) == (tmp_path / "broker-data", Path("/results"))
    assert list(first.where) == [
        Condition(column="status", values=("PAID",)),
        Condition(column="kind", operator=Operator.IN, values=("a", "b")),
    ]
    assert (first.deliver_at_column, first.complete_since_ms) == ("remind_at", 1_793_487_600_000)
    assert [one.operator for one in second.where] == [Operator.MORE, Operator.IS_NULL]
    assert (second.time_unit, second.urls) == ("ms", ("sqlite:///other.db",))
    assert (settings.inboxes[0].topics, settings.inboxes[0].complete_since_ms) == (("order.paid",), 5)
    assert [one.until.lag_seconds for one in settings.all_outboxes] == [2.5, None]
    assert settings.outboxes[0].until == CompletenessBound(complete_until_ms=1_793_491_200_000)
    assert first.until == CompletenessBound(complete_until_ms=1_793_487_600_000 + 24 * HOUR_MS)
    assert (second.until, settings.inboxes[0].until) == (
        CompletenessBound(),
        CompletenessBound(complete_until_ms=7, lag_seconds=1),
    )
    assert settings.grace.late_after_seconds == 7.5
    assert "secret" not in repr(settings)


def test_a_password_from_a_file_is_that_of_each_url_without_one(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@ss/word\n")
    urls = {
        "mysql+pymysql://reader@db/shop": "mysql+pymysql://reader:p%40ss%2Fword@db/shop",
        "mysql://reader@db-2:3307/shop?charset=utf8mb4": "mysql://reader:p%40ss%2Fword@db-2:3307/shop?charset=utf8mb4",
        "mysql://reader:own@db-3/shop": "mysql://reader:own@db-3/shop",
        "sqlite:///other.db": "sqlite:///other.db",
    }
    rule = {"name": "r", "table": "t", "key_column": "id", "time_column": "at", "topic": "x"}
    config = {
        "database": {"url": next(iter(urls)), "password_file": "password"},
        "broker": {"data": "broker-data"},
        "outboxes": [{"url": url} for url in list(urls)[1:]],
        "rules": [{**rule, "url": list(urls)}],
        "inboxes": [{"group": "g", "url": next(iter(urls))}, {"group": "h"}],
    }

    found = settings_of(config, folder=tmp_path)

    assert [found.database_url, *(one.url for one in found.outboxes)] == list(urls.values())
    assert list(found.rules[0].urls) == list(urls.values())
    assert [one.url for one in found.inboxes] == [next(iter(urls.values())), None]
    assert DatabaseAddress.of(found.database_url).password == "p@ss/word"
    assert "p@ss" not in repr(found)


def test_a_password_file_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    done = outbox(
        "reconcile", "run", "--url", "mysql://u@h/s", "--broker-data", str(tmp_path), "--password-file", missing
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read the password file ")


def test_a_small_file_is_enough(tmp_path: Path) -> None:
    settings = _settings(tmp_path, SMALL)

    assert settings.output == tmp_path / "reconciliation"
    assert (settings.grace.seconds, settings.rules) == (60, ())


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("[databas]\n", "there is no 'databas' in {file}; 'database' is meant?"),
        ("[gracee]\n", "there is no setting 'gracee'; 'grace' is meant?"),
        ("[output]\nfoldr='x'\n", "{file}: there is no setting 'foldr' of [output]; 'folder' is meant?"),
        ("[grace]\nsecond = 1\n", "there is no setting 'second' of [grace]; 'seconds' is meant?"),
        ("[grace]\nseconds = -1\n", "must not be negative"),
        ("[grace]\nseconds = 'x'\n", "seconds is a number"),
        ("[grace]\nseconds = nan\n", "seconds is a number"),
        ("[grace]\nslack_seconds = inf\n", "slack_seconds is a number"),
        ("[[inboxes]]\ngroup='a'\nlag_seconds=nan\n", "lag_seconds is a number"),
        ("[[rules]]\nname='r'\n", "[rules] needs table"),
        ("[[rules]]\nname='r'\ntabel='t'\n", "'table' is meant?"),
        ("[rules]\nname='r'\n", "write [[rules]]"),
        ("[[inboxes]]\ngroup='a b'\n", "consumer group 'a b'"),
        ("[[inboxes]]\ngroup='a'\ncomplete_since='soon'\n", "complete_since is a date"),
        ("[[inboxes]]\ngroup='a'\ncomplete_until='soon'\n", "complete_until is a date"),
        ("[[inboxes]]\ngroup='a'\nlag_seconds=-1\n", "lag_seconds must not be negative"),
        ("x = \n", "is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_cure(tmp_path: Path, mistake: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        _settings(tmp_path, SMALL + mistake)

    assert told.replace("{file}", str(tmp_path / "reconcile.toml")) in str(raised.value)


@pytest.mark.parametrize("days", ["archive_days = -30", "inbox_days = -1"])
def test_rows_are_kept_for_no_negative_time(tmp_path: Path, days: str) -> None:
    with pytest.raises(ConfigurationError, match="must not be negative"):
        _settings(tmp_path, SMALL.replace("[broker]", f"{days}\n[broker]"))


@pytest.mark.parametrize("days", ["0", "-1", "36501"])
def test_runs_are_kept_for_some_time(tmp_path: Path, days: str) -> None:
    with pytest.raises(ConfigurationError, match=r"keep_days is a number from above 0 to 36,500"):
        _settings(tmp_path, f"{SMALL}\n[output]\nkeep_days = {days}\n")


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("\"status = 'PAID'\"", "free SQL is not taken"),
        ("{ status = { a = 1 } }", "text, a number or a boolean"),
        ("{ status = [] }", "0 values"),
        ('[{ column = "a", op = "like", value = "x" }]', "op 'like' is not one of"),
        ('[{ column = "a", op = "is null", value = "x" }]', "1 values"),
        ('[{ colum = "a" }]', "'column' is meant?"),
        ("[1]", "a condition is a table"),
    ],
)
def test_a_wrong_condition_is_named(tmp_path: Path, where: str, told: str) -> None:
    rule = f"[[rules]]\nname='r'\ntable='t'\nkey_column='k'\ntime_column='c'\ntopic='p'\nwhere = {where}\n"

    with pytest.raises(ConfigurationError) as raised:
        _settings(tmp_path, SMALL + rule)

    assert told in str(raised.value)


def test_two_rules_of_one_name_are_refused(tmp_path: Path) -> None:
    settings = _settings(tmp_path, FULL)

    with pytest.raises(ConfigurationError, match="two rules have the name 'large'"):
        replace(settings, rules=[settings.rules[1], settings.rules[1]])


def test_without_java_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(ConfigurationError, match=r"Java 17 .* openjdk-17"), spark_session(None, log=tmp_path / "log"):
        pass


def test_importing_the_command_imports_no_spark() -> None:
    script = (
        "import sys, spark_reconcile, spark_reconcile.cli.run_command; "
        "print('pyspark' in sys.modules, 'pyarrow' in sys.modules)"
    )

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == ["False", "False"]


def test_usage_errors_exit_with_2_and_one_line(tmp_path: Path) -> None:
    ended = outbox("reconcile", "run", "--config", str(tmp_path / "none.toml"))

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: cannot read")
    assert len(ended.stderr.splitlines()) == 1


def test_a_source_that_is_down_exits_with_3(tmp_path: Path) -> None:
    ended = _outbox(
        "reconcile", "run", "--url", "mysql+pymysql://u:secret@127.0.0.1:1/x", "--broker-data", str(tmp_path)
    )

    assert (ended.returncode, ended.stdout) == (3, "")
    assert "127.0.0.1:1/x" in ended.stderr
    assert "secret" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_explain_says_what_a_verdict_means() -> None:
    ended = outbox("reconcile", "explain", "phantom")

    assert ended.returncode == 0
    assert "no_business_row" in ended.stdout
    wrong = outbox("reconcile", "explain", "phantm")
    assert (wrong.returncode, "did you mean phantom?" in wrong.stderr) == (2, True)


@pytest.mark.spark
@pytest.mark.slow
def test_the_command_prints_json_and_says_nothing_of_spark(sqlite: Database, tmp_path: Path) -> None:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=HOUR_MS)
    world.order()
    world.write(sqlite, tmp_path)
    runs = ("20270114T202959Z-00ff00", "20270114T203000Z-00ff00")
    old, kept, foreign = (tmp_path / "reconciliation" / name for name in (*runs, "2001"))
    for folder, age_hours in ((old, 13), (kept, 1), (foreign, 13)):
        (folder / "verdicts").mkdir(parents=True)
        os.utime(folder, times=(time.time() - age_hours * 3600,) * 2)
    config = tmp_path / "reconcile.toml"
    config.write_text(
        f"""
        [database]
        url = "{sqlite.url}"
        [broker]
        data = "broker"
        [grace]
        confirm_after_seconds = 0
        [output]
        keep_days = 0.5
        [[rules]]
        name = "paid"
        table = "orders"
        where = {{ status = "PAID" }}
        key_column = "id"
        time_column = "paid_at_us"
        topic = "order.paid"
        [[inboxes]]
        group = "tickets"
        """
    )

    asked = ("--config", str(config), "--json", "--now-ms", str(NOW_MS), "--repair", "--dry-run")
    ended = _outbox("reconcile", "run", *asked, timeout=600)

    assert ended.returncode == 1, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["lost"], summary["messages"], summary["balanced"]) == (1, 3, False)
    assert summary["sentence"] == "Not balanced: 1 lost."
    assert "WARN" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(r"^reconcile: [1-9]\d? %; giving verdicts on [1-9]\d* rows; .* left$", ended.stderr, re.MULTILINE)
    folder = tmp_path / "reconciliation" / summary["run_id"]
    assert (folder / "report.html").exists()
    assert (old.exists(), kept.exists(), foreign.exists()) == (False, True, True)
    planned = json.loads((folder / "repairs.jsonl").read_text())
    assert (planned["action"], planned["key"]) == ("nothing", "4")


def test_a_full_run_without_a_span_is_a_usage_error(tmp_path: Path) -> None:
    misused = outbox("reconcile", "run", "--url", f"sqlite:///{tmp_path / 'a.db'}", "--broker-data", "b", "--full")

    assert misused.returncode == 2
    assert "go with --since" in misused.stderr


def _settings(folder: Path, text: str) -> Settings:
    path = folder / "reconcile.toml"
    path.write_text(text)
    return settings_of(read_config(path), folder=folder)


def _outbox(*arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outbox", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


SHARED = """
log_level = "info"
[database]
url = "mysql+pymysql://app@db/shop"
schemas = ["shop"]
[broker]
url = "http://broker:7788"
data = "broker-data"
port = 7788
[compensator]
interval = "2s"
[reconcile]
master = "local[2]"
metrics_file = "recon.prom"
repairs_max = 5
every = "15m"
lookback = "7d"
[reconcile.grace]
seconds = 5
[reconcile.output]
folder = "results"
[[reconcile.rules]]
name = "paid"
table = "orders"
key_column = "id"
time_column = "paid_at"
topic = "order.paid"
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that services have, too, in a folder that is not the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("OUTBOX_") and "__" in name]:
        monkeypatch.delenv(name)
    path = tmp_path / "etc" / "outbox.toml"
    path.parent.mkdir()
    path.write_text(SHARED)
    return path


def test_a_file_of_several_services_has_all_settings_of_the_command(shared: Path, tmp_path: Path) -> None:
    given = command_settings({}, file=shared)

    assert (given.run.database_url, given.run.schema) == ("mysql+pymysql://app@db/shop", None)
    assert [rule.name for rule in given.run.rules] == ["paid"]
    assert given.run.grace.seconds == 5
    assert (given.master, given.repairs_max, given.every, given.lookback) == ("local[2]", 5, "15m", "7d")
    paths = (given.run.broker_data, given.run.output, given.metrics_file)
    assert [path and path.absolute() for path in paths] == [
        tmp_path / "broker-data", tmp_path / "results", tmp_path / "recon.prom"
    ], "of a file that services read, too, paths are those of the working directory"  # fmt: skip


def test_options_win_over_the_environment_and_that_over_the_file(
    shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_file = given_settings(shared)
    for name, text in {
        "DATABASE__URL": "sqlite:///other.db", "BROKER__DATA": "copy", "RECONCILE__GRACE__SECONDS": "6.5",
        "RECONCILE__MASTER": "local[3]", "RECONCILE__OUTPUT__KEEP_DAYS": "9", "RECONCILE__REPAIRS_MAX": "6",
        "DATABASE__COMPLETE_SINCE": "2026-11-01T00:00:00Z", "DATABASE__ARCHIVE": "false", "BROKER__GROUPS": "mail",
        "RECONCILE__ARCHIVE__PARQUET": '["old", "s3a://bucket/older"]',
        "RECONCILE__INBOXES": '[{"group": "mail"}]',
    }.items():  # fmt: skip
        monkeypatch.setenv(f"OUTBOX_{name}", text)

    of_environment = given_settings(shared)
    of_options = given_settings(
        shared, url="sqlite:///third.db", grace_seconds=7, broker_data=Path("option"), reconcile={"master": "local[4]"}
    )

    assert [given.run.grace.seconds for given in (of_file, of_environment, of_options)] == [5, 6.5, 7]
    assert [given.master for given in (of_file, of_environment, of_options)] == ["local[2]", "local[3]", "local[4]"]
    assert [given.run.broker_data.name for given in (of_file, of_environment, of_options)] == [
        "broker-data", "copy", "option",
    ]  # fmt: skip
    run = of_environment.run
    assert (run.database_url, run.keep_days, run.archive, run.groups) == ("sqlite:///other.db", 9, False, ("mail",))
    assert (run.complete_since_ms, of_environment.repairs_max) == (1_793_491_200_000, 6)
    assert run.archives == (tmp_path / "old", "s3a://bucket/older")
    assert [inbox.group for inbox in run.inboxes] == ["mail"]
    assert [rule.name for rule in run.rules] == ["paid"], "one setting hid its neighbours"
    assert of_options.run.database_url == "sqlite:///third.db"


def test_the_environment_alone_is_enough_and_its_paths_are_those_of_the_working_directory(
    shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTBOX_DATABASE__URL", "sqlite:///shop.db")
    monkeypatch.setenv("OUTBOX_BROKER__DATA", "data")
    alone = tmp_path / "etc" / "reconcile.toml"
    alone.write_text('[output]\nfolder = "beside"\n')

    assert given_settings(None).run.broker_data == tmp_path / "data"
    of_both = given_settings(alone).run
    assert (of_both.broker_data, of_both.output) == (tmp_path / "data", tmp_path / "etc" / "beside")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SHARED + "[grace]\nseconds = 1\n", "'grace' is reconciliation's: in a file of several services it stands in"),
        (SHARED + "[reconcile.gracee]\n", "there is no setting 'gracee' of [reconcile]; 'grace' is meant?"),
        (SHARED.replace("seconds = 5", "second = 5"), "no setting 'second' of [reconcile.grace]; 'seconds' is meant?"),
        (SHARED.replace("table =", "tabel ="), "no setting 'tabel' of [reconcile.rules]; 'table' is meant?"),
        (SHARED.replace("[reconcile", "[reconcil"), "there is no 'reconcil' in"),
        (SHARED.replace("repairs_max = 5", "repairs_max = 0"), "repairs_max is a whole number, and at least 1"),
        (SHARED.replace("repairs_max = 5", "repairs_max = 1.5"), "repairs_max is a whole number, and at least 1"),
        (SHARED.replace('master = "local[2]"', "master = 2"), "[reconcile]: master is a text"),
        ("reconcile = 1\n", "[reconcile] in"),
    ],
)
def test_a_mistake_in_a_file_of_several_services_is_named(shared: Path, text: str, told: str) -> None:
    shared.write_text(text)

    with pytest.raises(ConfigurationError) as raised:
        command_settings({}, file=shared)

    assert told in str(raised.value)
    assert str(shared) in str(raised.value) or "[reconcile]: " in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("RECONCILE__GRACE__SECOND", "1", "there is no setting 'second' of [reconcile.grace]; 'seconds' is meant?"),
        ("RECONCILE__GRACE__SECONDS", "hush", "it is not a number"),
        ("DATABASE__ARCHIVE", "hush", "it is neither true nor false"),
        ("DATABASE__COMPLETE_SINCE", "hush", "it is neither a date, e.g. 2026-11-01, nor epoch milliseconds"),
        ("RECONCILE__RULES", "hush", "it is not JSON"),
    ],
)
def test_a_wrong_variable_is_named_without_its_value(
    shared: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, told: str
) -> None:
    monkeypatch.setenv(f"OUTBOX_{variable}", text)

    with pytest.raises(ConfigurationError) as raised:
        command_settings({}, file=shared)

    assert str(raised.value).startswith(f"OUTBOX_{variable} in the environment: ")
    assert told in str(raised.value)
    assert "hush" not in str(raised.value)


def test_the_report_is_of_the_folder_that_the_environment_or_the_file_names(
    shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTBOX_CONFIG", str(shared))
    of_file = outbox("reconcile", "report")
    monkeypatch.setenv("OUTBOX_RECONCILE__OUTPUT__FOLDER", "elsewhere")
    of_environment = outbox("reconcile", "report")
    of_option = outbox("reconcile", "report", "--output", "option")

    folders = [
        next(name for name in ("results", "elsewhere", "option") if f"{name} is no folder of results" in done.stderr)
        for done in (of_file, of_environment, of_option)
    ]
    assert folders == ["results", "elsewhere", "option"]


def test_the_settings_say_that_there_is_no_archive_and_how_a_key_is_written() -> None:
    rule = {"name": "r", "table": "t", "key_column": "id", "time_column": "at", "topic": "t", "key_format": "uuid"}
    tables = {"database": {"url": "sqlite:///a.db", "archive": False}, "broker": {"data": "data"}, "rules": [rule]}

    settings = settings_of(tables)

    assert not settings.archive
    assert settings.rules[0].key_format is KeyFormat.UUID
    for wrong in ({"database": {"url": "sqlite:///a.db", "archive": "no"}}, {"rules": [{**rule, "key_format": "x"}]}):
        with pytest.raises(ConfigurationError, match=r"archive is true or false|key_format is one of hex, uuid"):
            settings_of({**tables, **wrong})
