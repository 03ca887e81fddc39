"""Configuration: flags, then the environment, then the file; a misspelt name is an error that says what is meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pymysql.err import OperationalError
from sqlalchemy import Engine, event
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from compensator.assignment import LeasedAssignment, UnleasedAssignment
from compensator.assignment.assignment_factory import lease_engine
from compensator.core.config import CompensatorConfig, load
from compensator.entry.composition import Parts, wire
from compensator.work.claim_and_relay import TableScan
from compensator.work.engines import CONNECT_SECONDS_MAX, STATEMENT_SECONDS_MAX
from compensator.work.source import Source
from outbox.store.database_url import database_url
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable

WHOLE = """
log_format = "json"

[database]
url = "mysql+pymysql://app@ignored/shop"

[broker]
url = "http://broker:7788"
data = "what the broker's own process reads"
port = 7788

[console]
bind = "127.0.0.1:1"

[compensator]
interval = "2s"
idle_interval = "1m"
batch_rows = 100
lease = "90s"
rate_limit = 500
zone = "a"
stop_timeout = "10s"
archive_days = 30
inbox_days = 90.5
judged_file = "/var/lib/outbox/reconciliation/judged.json"

[[compensator.sources]]
url = "mysql+pymysql://app@db-1/"
schemas = ["outbox", "outbox_2"]
zone = "a"

[[compensator.sources]]
url = "mysql+pymysql://app@db-2:3307/"
schemas = ["outbox"]
zone = "b"
broker = "http://other:7788"
rate_limit = 50.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with everything in it."""
    path = tmp_path / "outbox.toml"
    path.write_text(WHOLE)
    return path


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE__URL", "BROKER__URL", "COMPENSATOR__INTERVAL", "CONFIG"):
        monkeypatch.delenv(f"OUTBOX_{name}", raising=False)


def compensator(flags: dict[str, object] | None = None, file: Path | None = None) -> CompensatorConfig:
    """What these flags of [compensator] and this file come to."""
    return load({"compensator": flags or {}}, file=file)


def test_a_file_says_everything(file: Path) -> None:
    config = compensator(file=file)

    chosen = config.compensator
    assert (chosen.interval, chosen.idle_interval, chosen.lease, chosen.stop_timeout) == (2_000, 60_000, 90_000, 10_000)
    assert (chosen.batch_rows, chosen.rate_limit, chosen.zone) == (100, 500, "a")
    assert (chosen.archive_days, chosen.inbox_days) == (30, 90.5)
    assert chosen.judged_file == Path("/var/lib/outbox/reconciliation/judged.json")
    assert config.log_format == "json"
    assert [(source.url, source.schemas, source.zone) for source in config.source_tables()] == [
        ("mysql+pymysql://app@db-1/", ["outbox", "outbox_2"], "a"),
        ("mysql+pymysql://app@db-2:3307/", ["outbox"], "b"),
    ]


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_file = compensator(file=file).compensator.interval
    monkeypatch.setenv("OUTBOX_COMPENSATOR__INTERVAL", "3s")
    of_environment = compensator(file=file).compensator
    of_flag = compensator({"interval": "4s", "zone": None}, file).compensator

    assert (of_file, of_environment.interval, of_flag.interval) == (2_000, 3_000, 4_000)
    assert (of_environment.batch_rows, of_flag.zone) == (100, "a"), "one setting hid its neighbours"


def test_databases_of_flags_stand_for_those_of_the_file(file: Path) -> None:
    config = compensator({"sources": [{"url": "sqlite:///a.db"}, {"url": "sqlite:///b.db"}]}, file)

    assert [source.url for source in config.source_tables()] == ["sqlite:///a.db", "sqlite:///b.db"]


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DATABASE__URL", "sqlite:///shop.db")
    monkeypatch.setenv("OUTBOX_BROKER__URL", "http://127.0.0.1:1")
    monkeypatch.setenv("OUTBOX_BROKER__PORT", "7788")
    monkeypatch.setenv("OUTBOX_COMPENSATOR__ARCHIVE", "false")

    config = compensator()

    assert [source.url for source in config.source_tables()] == ["sqlite:///shop.db"]
    assert (config.broker.url, config.compensator.archive) == ("http://127.0.0.1:1", False)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[compensator]\nintervall = '5s'", "'interval' is meant"),
        ("[compensator]\nbatch_row = 5", "'batch_rows' is meant"),
        ("[[compensator.sources]]\nurl = 'sqlite:///x'\nscheme = ['a']", "'schemas' is meant"),
        ("[[compensator.sources]]\nschemas = ['a']", r"'url' of \[compensator.sources.0\] is needed"),
        ("[compensater]\ninterval = '5s'", "'compensator' is meant"),
        ("[compensator]\ninterval = 5", '"5s"'),
        ("[compensator]\ninterval = 'soon'", '"5s"'),
        ("[compensator]\nlease = '5ms'", "at least 1,000 ms"),
        ("[compensator]\ninterval = '0s'", "at least 1 ms"),
        ("[compensator]\nworkers = 13", "less than or equal to 12"),
        ("[compensator]\nrate_limit = inf", "'rate_limit' of .* finite number"),
        ("[compensator]\narchive_days = inf", "'archive_days' of .* finite number"),
        ("[[compensator.sources]]\nurl = 'sqlite:///x'\nrate_limit = inf", "'rate_limit' of .* finite number"),
        ("compensator = 1", "must be a table"),
        ("[compensator", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_the_cure(tmp_path: Path, toml: str, says: str) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text(toml)

    with pytest.raises(ConfigurationError, match=says):
        compensator(file=path)


def test_a_misspelt_name_in_the_environment_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_COMPENSATOR__LEESE", "60s")

    with pytest.raises(ConfigurationError, match="'lease' is meant"):
        compensator()


def test_errors_repeat_no_values_since_they_may_be_secrets(tmp_path: Path) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text("[[compensator.sources]]\nurl = 'mysql://u:hush@h/d'\nrate_limit = 'hush'")

    with pytest.raises(ConfigurationError) as raised:
        compensator(file=path)

    assert "hush" not in str(raised.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the configuration"):
        compensator(file=tmp_path / "none.toml")


# -- put together ----------------------------------------------------------------------------------------------------


def wired(config: CompensatorConfig) -> Parts:
    """Put together and closed again: nothing of this does I/O."""
    parts = wire(config, clock=SystemClock())
    parts.close()
    return parts


def test_each_schema_of_each_instance_is_a_source_with_its_zone_and_broker(file: Path) -> None:
    parts = wired(compensator(file=file))

    assert [(one.name, one.source_name.zone, one.broker) for one in parts.sources] == [
        ("db-1:3306/outbox", "a", "http://broker:7788"),
        ("db-1:3306/outbox_2", "a", "http://broker:7788"),
        ("db-2:3307/outbox", "b", "http://other:7788"),
    ]
    assert set(parts.gates.states) == {"http://broker:7788", "http://other:7788"}


class NoConnections:
    """Refuses each connection before it is opened, and notes with what arguments it would have been, and for whom: the
    engines of an instance have a dialect each.
    """

    def __init__(self) -> None:
        self.dialects: list[Dialect] = []
        self.arguments: list[dict[str, object]] = []

    def refuse(self, dialect: Dialect, _record: object, _args: object, arguments: dict[str, object]) -> None:
        self.dialects.append(dialect)
        self.arguments.append(arguments)
        raise OperationalError(2003, "refused by the test")

    def look_and_claim(self, source: Source) -> list[Dialect]:
        """Have a source look and claim; returns for whom it would have connected."""
        before = len(self.dialects)
        with pytest.raises(DatabaseUnavailable):
            source.poll()
        with pytest.raises(DatabaseUnavailable):
            source.batches.claim([TableScan("message")], rows_max=1)
        assert len(self.dialects) == before + 2
        return self.dialects[before:]


@pytest.fixture
def no_connections() -> Iterator[NoConnections]:
    """For as long as the test runs, for all engines."""
    refusing = NoConnections()
    event.listen(Engine, "do_connect", refusing.refuse)
    yield refusing
    event.remove(Engine, "do_connect", refusing.refuse)


def test_schemas_of_one_instance_share_its_connections(file: Path, no_connections: NoConnections) -> None:
    sources = wired(compensator(file=file)).sources

    first, second, other = (no_connections.look_and_claim(source) for source in sources)

    assert all(one is another for one, another in zip(first, second, strict=True))
    assert all(one is not another for one, another in zip(first, other, strict=True))
    assert first[0] is not first[1], "a look opens a transaction"


def test_several_sources_are_shared_by_leases_and_one_is_not_unless_told(file: Path) -> None:
    several = wired(compensator(file=file))
    one = {"sources": [{"url": "mysql+pymysql://app@db/shop"}]}
    alone, told = wired(compensator(one, file)), wired(compensator({**one, "leases": True}, file))
    told_not = wired(compensator({"leases": False}, file))

    kinds = [type(parts.assignment) for parts in (several, alone, told, told_not)]
    assert kinds == [LeasedAssignment, UnleasedAssignment, LeasedAssignment, UnleasedAssignment]


def test_a_source_that_is_named_twice_is_an_error() -> None:
    config = load(
        {
            "broker": {"url": "http://b"},
            "compensator": {"sources": [{"url": "mysql+pymysql://u@h/a"}, {"url": "mysql+pymysql://v@h/a"}]},
        },
        file=None,
    )

    with pytest.raises(ConfigurationError, match="named twice"):
        wired(config)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "no database is named"),
        ({"database": {"url": "sqlite:///x.db"}}, "no broker is named"),
        ({"database": {"url": "what"}, "broker": {"url": "http://b"}}, "not a database URL"),
        (
            {"database": {"url": "sqlite:///x.db"}, "broker": {"url": "http://b", "token_file": "/none"}},
            "cannot read the token file",
        ),
    ],
)
def test_what_is_missing_is_said_with_the_cure(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        wired(load(flags, file=None))


def test_passwords_come_from_a_file_and_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush\n")

    url = database_url("mysql+pymysql://app@db/shop", password_file=tmp_path / "password")

    assert url.password == "hush"
    assert "hush" not in str(url)


def test_a_dead_server_costs_a_bounded_time(no_connections: NoConnections) -> None:
    config = load({"database": {"url": "mysql+pymysql://u@h/d"}, "broker": {"url": "http://b"}}, file=None)

    [source] = wired(config).sources

    no_connections.look_and_claim(source)
    look, claim = no_connections.arguments
    assert claim["connect_timeout"] == look["connect_timeout"] == CONNECT_SECONDS_MAX
    for name in ("read_timeout", "write_timeout"):
        assert look[name] == claim[name] == STATEMENT_SECONDS_MAX


def test_no_connect_of_a_beat_outlasts_a_lease(no_connections: NoConnections) -> None:
    engine = lease_engine("mysql+pymysql://u@h/d", wait_ms_max=2_000)

    with pytest.raises(DBAPIError):
        engine.connect()

    (arguments,) = no_connections.arguments
    assert {name: arguments[name] for name in ("connect_timeout", "read_timeout", "write_timeout")} == {
        "connect_timeout": 3, "read_timeout": 3, "write_timeout": 3,
    }  # fmt: skip


def test_an_async_url_is_served_by_the_synchronous_driver(no_connections: NoConnections) -> None:
    config = load({"database": {"url": "mysql+asyncmy://u@h/d"}, "broker": {"url": "http://b"}}, file=None)

    [source] = wired(config).sources

    assert {(one.name, one.driver) for one in no_connections.look_and_claim(source)} == {("mysql", "pymysql")}
