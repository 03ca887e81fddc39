"""An engine's admin API whose servers redirect to each other: the login goes with a request, but never in the clear."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import requests

from broker_adapter.publishing.admin_http import ANSWER_BYTES_MAX, AdminHttp, AnswerTooLong
from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.pulsar.client_settings import URL_OPTIONS, ClientSettings
from broker_adapter.pulsar.durability_inspection import AdminApi
from outbox_broker.http.server import Tls
from tests.broker_adapter.http.test_tls import certificate
from tests.fixtures.slow_http_server import TRICKLES, slow_http_server

HOST: Final = "127.0.0.1"
WAIT_SECONDS: Final = 60


class AdminServer(ThreadingHTTPServer):
    """Wants a login, and answers how it was asked, or redirects. `seen`: the logins that it was given."""

    def __init__(
        self,
        login: str,
        *,
        redirects_to: str | None = None,
        tls: Tls | None = None,
        body_bytes: int = 0,
        pause_s: float = 0,
    ) -> None:
        """`body_bytes`: how long its answers are at least; `pause_s`: behind each request."""
        super().__init__((HOST, 0), _Handler)
        self.pause_s = pause_s
        self.ended = threading.Event()
        self.body_bytes = body_bytes
        self.login = login
        self.redirects_to = redirects_to
        self.seen: list[str | None] = []
        self.url = f"http://{HOST}:{self.server_port}"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.certificate, tls.key)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://{HOST}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: AdminServer

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _answer(self) -> None:
        self.server.seen.append(self.headers["Authorization"])
        self.server.ended.wait(self.server.pause_s)
        location = self.server.redirects_to
        status = 401 if self.server.seen[-1] != self.server.login else 200 if location is None else 307
        body = f"{self.command} {self.path}".encode().ljust(self.server.body_bytes)
        self.send_response(status)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # a client that reads no more of it
            self.wfile.write(body)


Serve = Callable[..., AdminServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers."""
    with ExitStack() as stack:

        def started(login: str, **options: Any) -> AdminServer:
            server = stack.enter_context(AdminServer(login, **options))
            threading.Thread(target=server.serve_forever).start()
            stack.callback(server.shutdown)
            stack.callback(server.ended.set)
            return server

        yield started


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("is_token", [True, False], ids=["token", "password"])
def test_the_login_goes_to_the_server_that_another_one_redirects_to(serve: Serve, method: str, is_token: bool) -> None:
    wanted = "Bearer s3cret" if is_token else f"Basic {base64.b64encode('app:wörd'.encode()).decode()}"
    owner = serve(wanted)
    first = serve(wanted, redirects_to=f"{owner.url}/admin/t?authoritative=true")
    api = AdminHttp(
        f"{first.url}/admin", token="s3cret" if is_token else None, login=None if is_token else ("app", "wörd")
    )

    assert api.ask(method, "t", timeout_s=WAIT_SECONDS).text == f"{method} /admin/t?authoritative=true"


def test_nothing_of_the_environment_comes_between(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text(f"machine {HOST} login other password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    proxy, server = serve("Bearer s3cret"), serve("Bearer s3cret")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)

    AdminHttp(f"{server.url}/admin", token="s3cret").get("t", timeout_s=WAIT_SECONDS)

    assert (server.seen, proxy.seen) == (["Bearer s3cret"], [])


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_not_waited_for_again_and_again() -> None:
    with socket.create_server((HOST, 0)) as silent:
        api = AdminHttp(f"http://{HOST}:{silent.getsockname()[1]}")

        for timeout_s in (1, WAIT_SECONDS, WAIT_SECONDS):
            with pytest.raises(requests.Timeout):
                api.get("t", timeout_s=timeout_s)

        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_servers_that_redirect_without_end_are_given_up(serve: Serve) -> None:
    server = serve("Bearer s3cret", redirects_to="/admin/t")

    with pytest.raises(requests.TooManyRedirects):
        AdminHttp(f"{server.url}/admin", token="s3cret").get("t", timeout_s=WAIT_SECONDS)


@pytest.mark.slow
def test_no_login_goes_from_a_server_with_tls_to_one_without(serve: Serve, tmp_path: Path) -> None:
    tls = certificate(tmp_path, address=HOST)
    plain = serve("Bearer s3cret")
    first = serve("Bearer s3cret", redirects_to=f"{plain.url}/admin/t", tls=tls)

    with pytest.raises(requests.RequestException, match="without TLS"):
        AdminHttp(f"{first.url}/admin", token="s3cret", ca_file=str(tls.certificate)).get("t", timeout_s=WAIT_SECONDS)

    assert plain.seen == []


def test_a_login_that_the_broker_gets_by_tls_goes_no_further_than_this_machine_without(serve: Serve) -> None:
    first = serve("Bearer s3cret", redirects_to="http://admin.invalid/admin/v2/brokers/version")
    url = BrokerUrl.parse(f"pulsar+ssl://h?admin={first.url}", port=6651, options=URL_OPTIONS)
    api = AdminApi(ClientSettings.of(url, timeout_ms=WAIT_SECONDS * 1_000, token="s3cret"))

    with pytest.raises(requests.RequestException, match="without TLS"):
        api.version(timeout_s=WAIT_SECONDS)


def test_a_login_that_needs_tls_goes_from_server_to_server_of_this_machine(serve: Serve) -> None:
    owner = serve("Bearer s3cret")
    first = serve("Bearer s3cret", redirects_to=f"{owner.url}/admin/t")

    AdminHttp(f"{first.url}/admin", token="s3cret", needs_tls=True).get("t", timeout_s=WAIT_SECONDS)

    assert owner.seen == ["Bearer s3cret"]


@pytest.mark.slow
@pytest.mark.parametrize("part", TRICKLES)
def test_an_answer_that_trickles_is_given_up_and_its_server_not_asked_again_at_once(part: str) -> None:
    with slow_http_server(part) as server:
        api = AdminHttp(server.url)

        for timeout_s in (1, WAIT_SECONDS):
            with pytest.raises(requests.Timeout):
                api.get("t", timeout_s=timeout_s)

    assert len(server.asked) <= 1


@pytest.mark.parametrize("location", ["http://[", "http://a..b/", "mailto:x", "//h:port/"])
def test_a_redirection_to_what_is_no_address_is_an_error_of_the_request(serve: Serve, location: str) -> None:
    server = serve("Bearer s3cret", redirects_to=location)

    with pytest.raises(requests.RequestException):
        AdminHttp(f"{server.url}/admin", token="s3cret").get("t", timeout_s=WAIT_SECONDS)

    assert server.seen == ["Bearer s3cret"]


@pytest.mark.parametrize("redirects_to", [None, "/admin/t"], ids=["answer", "redirection"])
def test_an_answer_has_its_bound_a_redirection_too(serve: Serve, redirects_to: str | None) -> None:
    server = serve("Bearer s3cret", redirects_to=redirects_to, body_bytes=ANSWER_BYTES_MAX + 1)

    with pytest.raises(AnswerTooLong, match="longer than"):
        AdminHttp(f"{server.url}/admin", token="s3cret").get("t", timeout_s=WAIT_SECONDS)

    assert server.seen == ["Bearer s3cret"]


@pytest.mark.slow
def test_redirections_share_the_time_of_their_request(serve: Serve) -> None:
    server = serve("Bearer s3cret", redirects_to="/admin/t", pause_s=1.5)

    with pytest.raises(requests.Timeout):
        AdminHttp(f"{server.url}/admin", token="s3cret").get("t", timeout_s=2.5)

    assert len(server.seen) <= 2
