"""Leases in a ZooKeeper with TLS and a login: right credentials work, wrong ones are named with the cure."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from compensator.assignment import Assignment
from compensator.core.config import load
from compensator.entry.composition import wire
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_demo.ports import free_port
from tests.compensator.assignment.fleet import names
from tests.engines.bookkeeper.tls_settings import PASSWORD, USER, zookeeper_login_option, zookeeper_settings
from tests.fixtures.certificate_authority import Authority, Certificate
from tests.fixtures.fork_server import environment, fork_server
from tests.fixtures.zookeeper_server import HOST, ZooKeeper, zookeeper
from tests.outbox.shop import Shop
from tests.outbox_broker.cluster.conftest import eventually

# kazoo leaves the socket of a handshake that failed to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WRONG_PASSWORD = "not-the-password"
SOURCES = names(3)
ALL = {source.name for source in SOURCES}


@dataclass(frozen=True, slots=True)
class SecureZooKeeper:
    """A server with a port of TLS and one without, and a login on both."""

    server: ZooKeeper
    tls_port: int
    authority: Authority
    client: Certificate
    folder: Path

    def settings(self, path: str, **changes: object) -> dict[str, object]:
        """Those of [compensator] that are right for this path, but for the changes; one that is None is left out."""
        settings: dict[str, object] = {
            "lease_url": f"zookeeper://{HOST}:{self.tls_port}{path}",
            "zookeeper_user": USER,
            "zookeeper_password_file": self.password_file(PASSWORD),
            "zookeeper_tls": True,
            "zookeeper_ca_file": self.authority.file,
            "zookeeper_certificate": self.client.certificate,
            "zookeeper_key": self.client.key,
            **changes,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def password_file(self, password: str) -> Path:
        """One with this password."""
        file = self.folder / f"password-{password == PASSWORD}"
        file.write_text(password)
        return file


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureZooKeeper]:
    """The server of this file's tests."""
    folder = tmp_path_factory.mktemp("secure-zookeeper")
    authority, port = Authority(folder / "certificates"), free_port(HOST)
    settings = zookeeper_settings(authority, authority.certificate(HOST), port=port)
    option = zookeeper_login_option(folder / "login")
    with zookeeper(folder / "server", settings=settings, options=[option]) as server:
        yield SecureZooKeeper(server, port, authority, authority.certificate(HOST), folder)


@contextmanager
def assignment_of(settings: dict[str, object], folder: Path) -> Iterator[Assignment]:
    """As a compensator with these settings has it."""
    flags: dict[str, Any] = {
        "broker": {"url": "http://127.0.0.1:1"},
        "compensator": {"sources": [{"url": f"sqlite:///{folder / 'shop.db'}"}], **settings},
    }
    parts = wire(load(flags, file=None), clock=SystemClock())
    try:
        yield parts.assignment
    finally:
        parts.assignment.leave()
        parts.close()
        gc.collect()


def refusal(settings: dict[str, object], folder: Path) -> str:
    """What ends the start of a compensator, however long a slow server takes to refuse it."""
    with assignment_of(settings, folder) as assignment:

        def is_served() -> bool:
            assert not assignment.beat(SOURCES)
            return False

        with pytest.raises(ConfigurationError) as raised:
            eventually(is_served, what="a refusal")
    return str(raised.value)


def test_leases_by_tls_and_a_login_are_held_and_no_other_user_reads_them(
    secure: SecureZooKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), assignment_of(secure.settings("/right"), tmp_path) as assignment:
        eventually(lambda: assignment.beat(SOURCES) == ALL, what="all sources")
        stranger = KazooClient(hosts=secure.server.hosts)
        stranger.start(timeout=60)
        with pytest.raises(NoAuthError):
            stranger.get_children("/right/leases")
        stranger.stop()
        stranger.close()

    assert PASSWORD not in caplog.text


def test_a_login_works_without_tls_on_the_port_without_it(secure: SecureZooKeeper, tmp_path: Path) -> None:
    settings = secure.settings(
        "/plain", lease_url=f"zookeeper://{secure.server.hosts}/plain", zookeeper_tls=None, zookeeper_ca_file=None,
        zookeeper_certificate=None, zookeeper_key=None,
    )  # fmt: skip
    with assignment_of(settings, tmp_path) as assignment:
        eventually(lambda: assignment.beat(SOURCES) == ALL, what="all sources")


def test_a_wrong_password_ends_the_start_with_the_cure_and_is_in_no_log(
    secure: SecureZooKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = secure.settings("/wrong", zookeeper_password_file=secure.password_file(WRONG_PASSWORD))

    with caplog.at_level(logging.DEBUG):
        error = refusal(wrong, tmp_path)

    assert "does not accept the login: check zookeeper_user and zookeeper_password_file" in error
    assert WRONG_PASSWORD not in caplog.text + error


def test_a_compensator_without_the_login_of_those_before_it_is_refused(secure: SecureZooKeeper, tmp_path: Path) -> None:
    with assignment_of(secure.settings("/owned"), tmp_path) as assignment:
        eventually(lambda: assignment.beat(SOURCES) == ALL, what="all sources")
        error = refusal(secure.settings("/owned", zookeeper_user=None, zookeeper_password_file=None), tmp_path)

    assert "does not allow this user: set zookeeper_user and its password file" in error


@pytest.mark.slow
def test_mistakes_of_tls_are_told_apart(secure: SecureZooKeeper, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    errors = {
        "ca": refusal(secure.settings("/tls", zookeeper_ca_file=other.file), tmp_path),
        "certificate": refusal(secure.settings("/tls", zookeeper_certificate=None, zookeeper_key=None), tmp_path),
    }

    assert "not trusted: name its CA in zookeeper_ca_file" in errors["ca"]
    assert "demands a certificate that it trusts: set zookeeper_certificate and zookeeper_key" in errors["certificate"]


def says(assignment: Assignment, hint: str) -> bool:
    """Whether the problem of one more beat has this hint; a server that is slow to answer is another problem."""
    assignment.beat(SOURCES)
    return hint in (assignment.problem or "")


@pytest.mark.slow
def test_who_asks_the_wrong_one_of_two_ports_goes_on_trying_and_says_what_may_be_wrong(
    secure: SecureZooKeeper, tmp_path: Path
) -> None:
    without = secure.settings(
        "/none", zookeeper_tls=None, zookeeper_ca_file=None, zookeeper_certificate=None, zookeeper_key=None
    )
    other = secure.settings("/none", lease_url=f"zookeeper://{secure.server.hosts}/none")
    for settings, hint in (
        (without, "if its port is one of TLS, set zookeeper_tls"),
        (other, "if its port has no TLS, name that of its secureClientPort"),
    ):
        with assignment_of(settings, tmp_path) as assignment:
            assert assignment.beat(SOURCES) == frozenset()
            eventually(partial(says, assignment, hint), what=hint)


@pytest.mark.processes
def test_the_command_ends_at_a_wrong_password_and_prints_the_cure(
    sqlite_shop: Shop, secure: SecureZooKeeper, tmp_path: Path
) -> None:
    wrong = secure.settings("/command", zookeeper_password_file=secure.password_file(WRONG_PASSWORD))
    variables = {f"OUTBOX_COMPENSATOR__{name.upper()}": str(value) for name, value in wrong.items()}

    done = fork_server().run(
        "outbox", "compensator", "run", "--url", sqlite_shop.database.url, "--broker", f"embedded:{tmp_path / 'data'}",
        env=environment(COLUMNS="300", **variables),
    )  # fmt: skip

    assert done.returncode != 0
    assert "does not accept the login: check zookeeper_user and zookeeper_password_file" in done.stderr
    assert WRONG_PASSWORD not in done.stderr
