"""The password of Redis changes under a compensator that runs: what it says, what goes out meanwhile, what cures it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from compensator.service.health import HealthCheck
from compensator.service.service import CompensatorService
from compensator.service.timer_worker import TimerWorker
from outbox_broker.delay_service.cli import app
from outbox_core import SystemClock
from outbox_core.common.errors import NotAuthenticated
from outbox_core.messages.connect import connect_timing
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, wait_until
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import SLOTS, SOON, held, publish, source_over
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

OLD, NEW = "the-old-secret", "the-new-secret"
SOON_DUE = timedelta(milliseconds=300)
COUNT = 10


class PasswordsOfServer:
    """Changes the password of the default user, or of a user of an ACL, over a connection that stays."""

    def __init__(self, admin: redis.Redis, *, user: str | None) -> None:
        self._admin = admin
        self.user = user

    def set(self, password: str) -> None:
        """Set the password, and end all other connections, as a restart of the server would."""
        if self.user is None:
            self._admin.config_set("requirepass", password)
        else:
            rights = ["on", "resetpass", f">{password}", "~*", "&*", "+@all"]
            self._admin.execute_command("ACL", "SETUSER", self.user, *rights)
        for kind in ("normal", "pubsub"):
            self._admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


@pytest.fixture
def protected() -> Iterator[RedisServer]:
    """A Redis with a password."""
    with redis_server(appendfsync="no", requirepass=OLD) as running:
        yield running


@pytest.fixture(params=[None, "app"], ids=["requirepass", "acl"])
def passwords(protected: RedisServer, request: pytest.FixtureRequest) -> Iterator[PasswordsOfServer]:
    """Those of one user of it."""
    lasting = redis.Redis(host=HOST, port=protected.port, password=OLD, protocol=2, single_connection_client=True)
    with closing(lasting):
        found = PasswordsOfServer(lasting, user=request.param)
        found.set(OLD)
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file with the password that the compensator is given."""
    path = tmp_path / "password"
    path.write_text(f"{OLD}\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("cure", ["file", "set back"])
def test_rows_go_out_while_the_password_is_wrong_and_timers_fire_again_once_it_is_right(
    sqlite_shop: Shop,
    prompt: PromptBroker,
    protected: RedisServer,
    passwords: PasswordsOfServer,
    file: Path,
    serve: Serve,
    metrics: WatchedMetrics,
    caplog: pytest.LogCaptureFixture,
    cure: str,
) -> None:
    url = store_url(protected, passwords, file)
    with source_over(sqlite_shop, prompt) as source, closing(connect_timing(url)) as store:
        worker = TimerWorker(source, connect_timing(url), options=SOON, metrics=metrics, clock=SystemClock())
        service = serve(sqlite_shop, prompt, timers=[worker], timers_report_ms=50)
        service.start()
        assert wait_until(lambda: all(one.complete for one in store.figures()))
        later = publish(sqlite_shop, prompt, url, count=COUNT)
        assert wait_until(lambda: held(store) == (COUNT, 0))

        passwords.set(NEW)
        found: list[HealthCheck] = []

        def is_refused() -> bool:
            found.append(timers(service))
            return "WRONGPASS" in found[-1].observed

        assert wait_until(is_refused)
        seen = found[-1]
        status = CliRunner().invoke(app, ["status", "--store", url])
        soon = publish(sqlite_shop, prompt, url, count=COUNT, delay=SOON_DUE)
        prompt.wait_for(lambda broker: len(broker.stored) >= COUNT)
        with pytest.raises(NotAuthenticated):
            store.figures()

        if cure == "file":
            file.write_text(f"{NEW}\n")
        else:
            passwords.set(OLD)
        assert wait_until(lambda: timers(service).status == "ok")
        assert wait_until(lambda: held(store) == (COUNT, 0))
        between = publish(sqlite_shop, prompt, url, count=COUNT, delay=SOON_DUE)
        prompt.wait_for(lambda broker: len(broker.stored) >= 2 * COUNT)
        assert wait_until(lambda: len(sqlite_shop.rows()) == COUNT)
        assert service.stop()

    refused = str(status.exception)
    shown = [seen.observed, refused, *(str(vars(one)) for one in caplog.records)]
    assert seen.status == "warn"
    assert "?password_file=" in seen.observed
    assert isinstance(status.exception, NotAuthenticated)
    assert "WRONGPASS" in refused
    assert "?password_file=" in refused
    assert [one for one in shown if OLD in one or NEW in one] == []
    assert {"timers_held", "timers_not_added"} <= {one.getMessage().split()[0] for one in caplog.records}
    assert sorted(prompt.ids) == sorted(one.id for one in [*soon, *between])
    assert prompt.duplicates == []
    assert sorted(row["id"] for row in sqlite_shop.rows()) == sorted(one.id for one in later)


def test_a_password_file_that_is_away_or_empty_for_a_moment_breaks_no_connection(
    protected: RedisServer, passwords: PasswordsOfServer, file: Path
) -> None:
    with closing(connect_timing(store_url(protected, passwords, file))) as store:
        assert held(store) == (0, 0)
        file.write_text("")
        passwords.set(OLD)  # ends the connections
        assert held(store) == (0, 0)
        file.unlink()
        passwords.set(OLD)
        assert held(store) == (0, 0)


def store_url(server: RedisServer, passwords: PasswordsOfServer, file: Path) -> str:
    login = f"{passwords.user}@" if passwords.user else ""
    return f"redis://{login}{HOST}:{server.port}/?name=shop&slots={SLOTS}&timeout_ms=2000&password_file={file}"


def timers(service: CompensatorService) -> HealthCheck:
    """What /readyz says of timers."""
    return next(one for one in service.health().checks if one.name == "timers")
