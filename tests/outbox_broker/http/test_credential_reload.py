"""SIGHUP has a running server read its certificate, key and tokens again."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509

from tests.broker_adapter.servers import ServerProcess, delay_process
from tests.fixtures.certificate_authority import Authority, Certificate
from tests.outbox_broker.polling import until

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
ROLES = '["publish", "consume", "read"]'
WAIT_MS = 60_000
PATIENT = "[broker]\nkeep_alive_ms = 600000\nrequest_head_ms_max = 120000\n"
"""What a connection may be idle, and a handshake take, on a busy machine."""


class Secured:
    """A server's files, to be changed, and what its clients see."""

    def __init__(self, folder: Path, process: ServerProcess, *, config: str) -> None:
        self.process = process
        self.authority = Authority(folder / "authority")
        self.files = self.renew()
        self.tokens = folder / "tokens.toml"
        self.allow("first")
        self._config = folder / "outbox.toml"
        self._config.write_text(config)

    def start(self) -> None:
        """Start the server with all of the files."""
        self.process.start(
            *("--tls-cert", str(self.files.certificate), "--tls-key", str(self.files.key)),
            *("--tokens", str(self.tokens), "--config", str(self._config)),
        )

    def renew(self) -> Certificate:
        """Write another certificate and key to the same files."""
        return self.authority.certificate(HOST)

    def allow(self, *tokens: str) -> None:
        """Write these tokens and no others to the file."""
        digests = [hashlib.sha256(one.encode()).hexdigest() for one in tokens]
        entries = [f'[[tokens]]\nname = "a"\nsha256 = "{one}"\nroles = {ROLES}\ntopics = ["*"]\n' for one in digests]
        self.tokens.write_text("\n".join(entries))

    def connect(self) -> http.client.HTTPSConnection:
        """A connection whose handshake is done."""
        address = urlsplit(self.process.url)
        context = ssl.create_default_context(cafile=self.authority.file)
        connection = http.client.HTTPSConnection(HOST, address.port, context=context, timeout=120)
        connection.connect()
        connection.auto_open = 0  # a connection that was closed is an error
        return connection

    def shown(self) -> bytes | None:
        """The certificate that a new connection is shown."""
        with closing(self.connect()) as connection:
            return certificate_of(connection)

    def hangup(self, event: str) -> dict[str, object]:
        """Send SIGHUP; the line of this event that the server writes then."""
        count = len(self.lines(event))
        self.process.send(signal.SIGHUP)
        until(lambda: len(self.lines(event)) > count)
        [line] = self.lines(event)[count:]
        return line

    def lines(self, event: str) -> list[dict[str, object]]:
        """The lines of this event that the server has written."""
        return [line for line in map(json.loads, list(self.process.log)) if line["event"] == event]


def certificate_of(connection: http.client.HTTPSConnection) -> bytes | None:
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock.getpeercert(binary_form=True)


def written(files: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text())


def send(connection: http.client.HTTPSConnection, token: str, path: str, **body: object) -> None:
    """Send a request with this token, and a body if there is one."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)


def answer(connection: http.client.HTTPSConnection) -> tuple[int, str]:
    """The status and the body that come back."""
    response = connection.getresponse()
    return response.status, response.read().decode()


def status(connection: http.client.HTTPSConnection, token: str) -> int:
    """The status of a request with this token."""
    send(connection, token, "/v1/scheduled")
    return answer(connection)[0]


@contextmanager
def serving(kind: str, folder: Path, *, config: str = PATIENT) -> Iterator[Secured]:
    """A server with TLS and tokens that runs."""
    data = folder / "data"
    kinds = {"broker": ServerProcess(data), "delay service": delay_process(data, target_url="http://127.0.0.1:1")}
    server = Secured(folder, kinds[kind], config=config)
    try:
        server.start()
        yield server
    finally:
        server.process.kill()


@pytest.fixture(params=["broker", "delay service"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Secured]:
    """A server that reads its files again when a signal asks for it."""
    with serving(request.param, tmp_path) as server:
        yield server


@pytest.fixture(params=["broker", "delay service"])
def looking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Secured]:
    """A server that looks at its files by itself."""
    with serving(request.param, tmp_path, config=PATIENT + "credentials_interval_ms = 100\n") as server:
        yield server


def test_a_renewed_certificate_is_shown_to_new_connections_and_open_ones_go_on(secured: Secured) -> None:
    first = written(secured.files)
    with closing(secured.connect()) as connection:
        assert certificate_of(connection) == first
        secured.renew()
        second = written(secured.files)

        line = secured.hangup("credentials_reloaded")

        assert secured.shown() == second != first
        assert status(connection, "first") == 200
        send(connection, "first", "/metrics")
        metrics = answer(connection)[1]
        [expiry] = re.findall(r"^broker_certificate_expiry_timestamp_seconds (.*)$", metrics, re.MULTILINE)
    ends_at = x509.load_der_x509_certificate(second).not_valid_after_utc
    assert float(expiry) == ends_at.timestamp()
    assert (line["level"], line["certificate_ends"]) == ("info", ends_at.isoformat())
    assert (line["tokens"], line["tokens_changed"]) == (1, False)


def test_a_removed_token_is_refused_on_a_connection_that_is_open_and_a_new_one_works(secured: Secured) -> None:
    with closing(secured.connect()) as connection:
        assert (status(connection, "first"), status(connection, "second")) == (200, 401)
        secured.allow("second")

        line = secured.hangup("credentials_reloaded")

        assert (status(connection, "first"), status(connection, "second")) == (401, 200)
        assert line["tokens_changed"] is True


@pytest.mark.parametrize("secured", ["broker"], indirect=True)
def test_a_removed_token_that_waits_for_messages_gets_none(secured: Secured) -> None:
    with closing(secured.connect()) as consumer, closing(secured.connect()) as other:

        def is_waiting() -> bool:
            send(other, "first", "/metrics")
            return "broker_http_waiting_pulls 1.0" in answer(other)[1]

        send(consumer, "first", "/v1/topics/t/groups/g/pull", wait_ms=WAIT_MS)
        until(is_waiting)
        secured.allow("second")

        secured.hangup("credentials_reloaded")
        send(other, "second", "/v1/publish", messages=[{"topic": "t", "id": "m", "body": ""}])

        assert answer(other)[0] == 200
        assert (answer(consumer), status(consumer, "first")) == ((200, '{"deliveries":[]}'), 401)


def test_an_unusable_file_changes_nothing_and_the_log_names_it(secured: Secured, tmp_path: Path) -> None:
    first, files = written(secured.files), secured.files
    key, tokens = files.key.read_bytes(), secured.tokens.read_bytes()

    def refused() -> str:
        line = secured.hangup("reload_refused")
        assert line["level"] == "error"
        assert "send SIGHUP again" in str(line["cure"])
        assert "Traceback" not in str(line)
        return str(line["error"])

    with closing(secured.connect()) as connection:
        secured.renew()
        secured.allow("second")
        files.key.write_bytes(key)
        of_another = refused()
        files.certificate.write_text("torn")
        torn = refused()
        files.certificate.unlink()
        missing = refused()
        secured.renew()
        secured.tokens.write_text("[[tokens]]\n")
        without_fields = refused()

        assert secured.shown() == first
        assert (status(connection, "first"), status(connection, "second")) == (200, 401)
        secured.tokens.write_bytes(tokens)
        secured.hangup("credentials_reloaded")
        assert secured.shown() == written(files) != first
    assert f"{files.key} is not that of the certificate" in of_another
    assert f"{files.certificate} is no certificate" in torn
    assert f"no file {files.certificate}" in missing
    assert str(secured.tokens) in without_fields


def test_files_that_have_changed_are_read_without_a_signal_where_the_server_looks_at_them(looking: Secured) -> None:
    first = written(looking.files)

    looking.tokens.write_text("[[tokens]]\n")
    until(lambda: len(looking.lines("reload_refused")) > 0)
    with closing(looking.connect()) as connection:
        still_known = status(connection, "first")
        looking.renew()
        looking.allow("second")
        until(lambda: looking.shown() == written(looking.files) and status(connection, "second") == 200)

        assert (still_known, status(connection, "first")) == (200, 401)
    assert first != written(looking.files)


def test_an_expired_certificate_is_a_warning(secured: Secured) -> None:
    secured.authority.certificate(HOST, expired=True)

    line = secured.hangup("certificate_expired")

    assert (line["level"], line["cure"]) == ("warning", "renew it, and send SIGHUP")


def test_a_server_without_certificate_and_tokens_goes_on(server_process: ServerProcess) -> None:
    server_process.start()
    server_process.send(signal.SIGHUP)
    until(lambda: any("nothing_to_reload" in line for line in list(server_process.log)))

    with closing(http.client.HTTPConnection(HOST, urlsplit(server_process.url).port, timeout=120)) as connection:
        connection.request("GET", "/v1/topics")
        assert connection.getresponse().status == 200
    assert server_process.end(signal.SIGTERM) == 0
