"""`outbox config show` and `check` on files and variables as services read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command_line import outbox

ROOT = Path(__file__).parents[2]
GOOD = """
log_level = "warning"
[database]
url = "mysql+pymysql://app:hunter2@db/shop"
[broker]
url = "https://broker:7788?token=hunter3"
[compensator]
interval = "5s"
[[compensator.sources]]
url = "mysql+pymysql://app:hunter4@db2/shop"
"""


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTBOX_") and "__" in name]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OUTBOX_CONFIG", raising=False)


def written(folder: Path, text: str) -> str:
    """The path of a file with these settings."""
    file = folder / "outbox.toml"
    file.write_text(text)
    return str(file)


def shown(*arguments: str) -> dict[str, dict[str, Any]]:
    """The compensator's settings by name."""
    done = outbox("config", "show", "--service", "compensator", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {setting["name"]: setting for setting in json.loads(done.stdout)["compensator"]}


def test_each_setting_is_shown_with_what_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, GOOD)
    monkeypatch.setenv("OUTBOX_COMPENSATOR__INTERVAL", "7s")

    settings = shown("--config", file)
    people = outbox("config", "show", "--service", "compensator", "--config", file).stdout.splitlines()

    assert [(settings[name]["value"], settings[name]["origin"], settings[name]["source"]) for name in (
        "compensator.interval", "log_level", "compensator.batch_rows",
    )] == [
        ("7s", "environment", "OUTBOX_COMPENSATOR__INTERVAL"), ("warning", "file", file), (200, "default", None),
    ]  # fmt: skip
    assert 'compensator.interval = "7s"  (environment OUTBOX_COMPENSATOR__INTERVAL)' in people
    assert f'log_level = "warning"  (file {file})' in people
    assert "compensator.batch_rows = 200  (default)" in people


def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, GOOD)
    monkeypatch.setenv("OUTBOX_TIMING__STORE", "redis://user:hunter5@redis/?name=shop")

    done = [outbox("config", "show", "--config", file, *json_) for json_ in ([], ["--json"])]

    for text in (one.stdout + one.stderr for one in done):
        assert "hunter" not in text
        assert "db2/shop" in text


RECONCILE = """
[database]
url = "mysql+pymysql://app:hunter2@db/shop"
[broker]
url = "https://broker:7788"
data = "broker-data"
groups = ["mail"]
[reconcile.grace]
seconds = 5
[[reconcile.rules]]
name = "paid"
table = "orders"
key_column = "id"
time_column = "paid_at"
topic = "order.paid"
url = "mysql+pymysql://app:hunter3@db2/shop"
"""


def test_settings_of_reconciliation_are_shown_and_checked_beside_those_of_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, RECONCILE)
    monkeypatch.setenv("OUTBOX_RECONCILE__MASTER", "local[2]")

    done = outbox("config", "show", "--service", "reconcile", "--given", "--config", file)
    checked = outbox("config", "check", "--config", file)

    rule = (
        '{"name": "paid", "table": "orders", "key_column": "id", "time_column": "paid_at", "topic": "order.paid", '
        '"url": "mysql+pymysql://app:***@db2/shop"}'
    )
    assert done.stdout.splitlines() == [
        "# reconcile",
        f'database.url = "mysql+pymysql://app:***@db/shop"  (file {file})',
        f'broker.data = "broker-data"  (file {file})',
        f'broker.groups = ["mail"]  (file {file})',
        'reconcile.master = "local[2]"  (environment OUTBOX_RECONCILE__MASTER)',
        f"reconcile.grace.seconds = 5  (file {file})",
        f"reconcile.rules = [{rule}]  (file {file})",
    ]
    assert (checked.returncode, checked.stdout) == (0, "broker: ok\ncompensator: ok\nreconcile: ok\n")


def test_a_file_of_reconciliation_alone_is_shown_by_the_same_names(tmp_path: Path) -> None:
    file = written(tmp_path, '[database]\nurl = "sqlite:///shop.db"\n[broker]\ndata = "d"\n[grace]\nseconds = 5\n')

    done = outbox("config", "show", "--service", "reconcile", "--given", "--config", file, "--json")
    unknown = json.loads(outbox("config", "check", "--config", file, "--json").stdout)["unknown"]

    names = [setting["name"] for setting in json.loads(done.stdout)["reconcile"]]
    assert (names, unknown) == (["database.url", "broker.data", "reconcile.grace.seconds"], [])


def test_only_what_was_given_is_shown_if_wanted(tmp_path: Path) -> None:
    settings = shown("--given", "--config", written(tmp_path, "[compensator]\nworkers = 3\n"))

    assert list(settings) == ["compensator.workers"]


def test_a_needed_setting_without_a_value_is_missing() -> None:
    done = outbox("config", "show", "--service", "broker")

    assert "broker.data = -  (missing)" in done.stdout.splitlines()


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").glob("*/outbox.toml")), ids=lambda path: path.parent.name)
def test_the_files_that_we_deploy_have_no_unknown_name(file: Path) -> None:
    done = outbox("config", "check", "--config", str(file), "--json")

    assert json.loads(done.stdout)["unknown"] == []


def test_settings_that_a_service_can_start_with_are_fine(tmp_path: Path) -> None:
    done = outbox("config", "check", "--config", written(tmp_path, GOOD))

    assert (done.returncode, done.stdout, done.stderr) == (0, "compensator: ok\n", "")


def test_without_settings_nothing_is_wrong() -> None:
    done = outbox("config", "check")

    assert (done.returncode, done.stdout) == (0, "no service has a setting in the file or the environment\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            GOOD.replace("interval", "intervall"),
            "there is no setting 'intervall' of [compensator]; 'interval' is meant?",
        ),
        (GOOD.replace("[broker]\nurl", "[broker]\nurll"), "there is no setting 'urll' of [broker]; 'url' is meant?"),
        (GOOD.replace("[broker]", "[brokers]"), "there is no 'brokers' in"),
        (GOOD + "[consol]\nport = 1\n", "there is no table or key 'consol'"),
        (GOOD.replace('"5s"', '"5 parsecs"'), "the setting 'interval' of [compensator] is wrong"),
        ("[compensator]\nworkers = 2\n", "no database is named"),
        (
            RECONCILE.replace("seconds = 5", "secnds = 5"),
            "there is no setting 'secnds' of [reconcile.grace]; 'seconds' is meant?",
        ),
        (RECONCILE.replace("table =", "tabel ="), "no setting 'tabel' of [reconcile.rules]; 'table' is meant?"),
        (RECONCILE.replace("seconds = 5", "seconds = -5"), "[grace]: its seconds must not be negative"),
        ("[reconcile.grace]\nseconds = 1\n", "name a file with --config, or at least --url and --broker-data"),
        ('[reconcile]\nevery = "soon"\n' + RECONCILE, "'soon' is no length of time"),
        (
            GOOD.replace('url = "https', 'token_file = "/no/such"\nurl = "https'),
            "/no/such, the setting broker.token_file, is no file",
        ),
        ('[broker]\ndata = "d"\nhost = "0.0.0.0"\n', "0.0.0.0 can be reached by others"),
        ("[broker]\nport = 7788\n", "the setting 'data' of [broker] is needed"),
        (
            '[cluster]\nstore = "bookkeeper://zk/d"\nledgers_ca_file = "pyproject.toml"\n',
            "is for TLS: set ledgers_tls too",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(ROOT)

    done = outbox("config", "check", "--config", written(tmp_path, text))

    assert done.returncode == 2
    assert (done.stdout + done.stderr).count(says) == 1
    assert "hunter" not in done.stdout + done.stderr


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "[compensator]\nworkers = 0\nbatch_rows = -1\n")
    monkeypatch.setenv("OUTBOX_COMPENSATER__WORKERS", "2")
    monkeypatch.setenv("OUTBOX_DATABASE__URLS", "sqlite:///x.db")

    found = json.loads(outbox("config", "check", "--config", file, "--json").stdout)

    assert not found["ok"]
    assert len(found["services"]["compensator"]) == 2
    assert found["unknown"] == [
        "OUTBOX_COMPENSATER__WORKERS in the environment: there is no table 'compensater'; 'compensator' is meant?",
        "OUTBOX_DATABASE__URLS in the environment: there is no setting 'urls' of [database]; 'url' is meant?",
    ]


def test_an_unknown_service_is_a_usage_error() -> None:
    done = outbox("config", "show", "--service", "brokers")

    assert (done.returncode, done.stderr) == (
        2, "error: there is no service 'brokers'; services are broker, compensator, delay, operator, reconcile\n"
    )  # fmt: skip
