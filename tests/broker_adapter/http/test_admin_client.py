"""The client of operators' commands asks the broker of its URL alone, as who the token says, and within its bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from tests.fixtures.slow_http_server import TRICKLES, slow_http_server

TIMEOUT_MS = 60_000


class Recorder(BaseHTTPRequestHandler):
    """Answers /moved with a redirection, /moved/long with one of 1,000 bytes, /long with as many, all else with {}; and
    notes what it was asked.
    """

    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["authorization"]))
        body = b"x" * 1_000 if self.path.endswith("/long") else b"{}"
        self.send_response(307 if self.path.startswith("/moved") else 200)
        self.send_header("Location", "http://[")  # no URL at all: nobody is to read it
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Does nothing."""


@pytest.fixture
def asked() -> list[tuple[str, str | None]]:
    """The paths that the server was asked for, with their authorization."""
    return []


@pytest.fixture
def address(asked: list[tuple[str, str | None]]) -> Iterator[str]:
    """Host and port of a server."""
    handler = type("OwnRecorder", (Recorder,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_token_is_sent_and_not_the_login_of_the_url_or_of_a_netrc(
    address: str, asked: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    url = f"http://user:password@{address}/base"

    AdminClient(url, timeout_ms=TIMEOUT_MS, token_file=tmp_path / "token").request("GET", "/v1/topics")
    AdminClient(url, timeout_ms=TIMEOUT_MS).request("GET", "/v1/topics")

    assert asked == [("/base/v1/topics", "Bearer s3cret"), ("/base/v1/topics", None)]


def test_no_proxy_of_the_environment_is_asked(
    address: str, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert AdminClient(f"http://{address}", timeout_ms=TIMEOUT_MS).request("GET", "/livez") == (200, b"{}")
    assert asked == [("/livez", None)]


def test_a_redirection_is_an_answer_and_not_followed(address: str, asked: list[tuple[str, str | None]]) -> None:
    status, _ = AdminClient(f"http://{address}", timeout_ms=TIMEOUT_MS).request("GET", "/moved")

    assert status == 307
    assert asked == [("/moved", None)]


def test_a_redirection_has_the_bound_of_any_answer(address: str) -> None:
    client = AdminClient(f"http://{address}", timeout_ms=TIMEOUT_MS, answer_bytes_max=999)

    with pytest.raises(BrokerRefused, match="longer than 999 bytes"):
        client.request("GET", "/moved/long")


@pytest.mark.parametrize("token", ["s3cret\nsecond", "s3cr€t"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    address: str, asked: list[tuple[str, str | None]], tmp_path: Path, token: str
) -> None:
    (tmp_path / "token").write_text(token)
    client = AdminClient(f"http://{address}", timeout_ms=TIMEOUT_MS, token_file=tmp_path / "token")

    with pytest.raises(ConfigurationError, match=r"^a token is printable ASCII, and not empty$"):
        client.request("GET", "/v1/topics")
    assert asked == []


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_host_that_is_no_name_does_not_answer(host: str) -> None:
    with pytest.raises(BrokerUnavailable, match=f"no broker answers at http://{host}"):
        AdminClient(f"http://{host}", timeout_ms=TIMEOUT_MS).request("GET", "/livez")


@pytest.mark.parametrize(("bytes_max", "is_refused"), [(999, True), (1_000, False)])
def test_an_answer_beyond_its_bound_is_refused(address: str, bytes_max: int, is_refused: bool) -> None:
    client = AdminClient(f"http://{address}", timeout_ms=TIMEOUT_MS, answer_bytes_max=bytes_max)

    if is_refused:
        with pytest.raises(BrokerRefused, match="longer than 999 bytes"):
            client.request("GET", "/long")
    else:
        assert client.request("GET", "/long") == (200, b"x" * 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("part", TRICKLES)
def test_an_answer_that_trickles_is_given_up_though_every_byte_comes_in_time(part: str) -> None:
    with slow_http_server(part) as server, pytest.raises(BrokerUnavailable, match="no broker answers"):
        AdminClient(server.url, timeout_ms=1_000).request("GET", "/v1/topics")
