"""A compensator on a broker and a delay service that ask for tokens and have certificates of a private authority."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from outbox.store.row import publish_row
from outbox_core import Message, SystemClock, connect
from tests.broker_adapter.servers import ServerProcess
from tests.fixtures.certificate_authority import Authority
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.shop import Shop

pytestmark = pytest.mark.processes

HOUR_MS = 3_600_000

Secured = Callable[..., str]


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """Starts a server with a certificate and a token; returns the URL by which clients reach it, files included."""
    authority = Authority(tmp_path / "authority")
    certificate = authority.certificate("127.0.0.1")
    with ExitStack() as stack:

        def start(name: str, *command: str) -> str:
            tokens, token_file = tmp_path / f"{name}.toml", tmp_path / f"{name}.token"
            token_file.write_text(f"the token of {name}\n")
            digest = hashlib.sha256(f"the token of {name}".encode()).hexdigest()
            roles = '["publish", "consume", "read"]'
            tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nroles = {roles}\ntopics = ["*"]\n')
            process = ServerProcess(tmp_path / name, command=command)
            stack.callback(process.kill)
            process.start(
                *("--tokens", str(tokens), "--tls-cert", str(certificate.certificate)),
                *("--tls-key", str(certificate.key)),
            )
            return f"{process.url}?token_file={quote(str(token_file))}&ca_file={quote(str(authority.file))}"

        yield start


def test_a_url_with_files_reaches_a_secured_broker_and_a_secured_delay_service(
    sqlite_shop: Shop, secured: Secured
) -> None:
    target = secured("broker", "broker", "serve")
    delay = secured("delay", "delay", "serve", "--target", target)
    later_ms = SystemClock().now_ms() + HOUR_MS
    messages = [
        Message(id="now", topic="t", body=b""), Message(id="later", topic="t", body=b"", deliver_at_ms=later_ms),
    ]  # fmt: skip
    with sqlite_shop.engine.begin() as connection:
        sqlite_shop.store.insert(
            connection, [publish_row(one) for one in messages], token="d" * 32, lease_us=-1_000_000
        )

    done = fork_server().run(
        "outbox", "compensator", "once", "--url", sqlite_shop.database.url,
        "--broker", f"{target}&delay={quote(delay, safe='')}", env=environment(COLUMNS="200"),
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("batches 1, claimed 2, accepted 2")
    found = fork_server().run("outbox", "broker", "schedule", "show", "later", "--url", delay, env=environment())
    assert (found.returncode, found.stdout.split("\t")[1:]) == (0, ["t", "later\n"]), found.stderr
    with ExitStack() as stack:
        brokers = [connect(url) for url in (target, delay)]
        for broker in brokers:
            stack.callback(broker.close)
        assert [one.id for one in brokers[0].pull("t", "g", wait_ms=30_000)] == ["now"]
        assert brokers[1].admin.figures("t")["scheduled"] == 1
