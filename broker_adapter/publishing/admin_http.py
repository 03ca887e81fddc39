"""Asks an engine's admin API over HTTP, with the login and the certificates of the broker's URL. Not for messages.

ask() sends one request to a server that is not trusted: nothing of the environment, a time and a size.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from outbox_core.common.deadline_connections import set_deadlines
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback

_PART_BYTES: Final = 64 * 1024


class AnswerTooLong(requests.RequestException):
    """An answer has more bytes than it may have."""


def ask(
    method: str,
    url: str,
    *,
    timeout_s: float,
    answer_bytes_max: int,
    headers: Mapping[str, str],
    json: Mapping[str, Any] | None = None,
    login: tuple[str, str] | None = None,
    ca_file: str | None = None,
    certificate: tuple[str, str] | None = None,
    paying_bytes_max: int = 0,
) -> requests.Response:
    """One request by a connection of its own; `timeout_s` is for all of it, to the last byte of the answer. Up to
    `paying_bytes_max` bytes of that put the end off, see DeadlineSocket.

    A redirection is an answer as any other, whatever address it names. Raises requests.RequestException: Timeout where
    the answer was not whole in time, AnswerTooLong.
    """
    with _Session() as session:
        session.trust_env = False  # or ~/.netrc goes before the token, and the login to the environment's proxy
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter(answer_bytes_max, paying_bytes_max=paying_bytes_max))
        try:
            return session.request(
                method,
                url,
                json=json,
                headers={"accept-encoding": "identity", **headers},  # so that the bound is one of what arrives
                auth=login,
                cert=certificate,
                verify=ca_file or True,
                timeout=timeout_s,
                allow_redirects=False,
            )
        except (urllib3.exceptions.HTTPError, UnicodeError) as error:  # as of a host that is no name ("a..b")
            raise requests.exceptions.InvalidURL(error) from error


class _Session(requests.Session):
    """Sees no redirections: requests reads the address of one, followed or not, and fails of what is none."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:  # noqa: ARG002 - requests' name
        return None


class _Adapter(HTTPAdapter):
    """Reads an answer whole, within its bound, before it hands it out."""

    def __init__(self, answer_bytes_max: int, *, paying_bytes_max: int) -> None:
        self._answer_bytes_max = answer_bytes_max
        self._paying_bytes_max = paying_bytes_max
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        set_deadlines(self.poolmanager, paying_bytes_max=self._paying_bytes_max)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        bounds = {"timeout": urllib3.Timeout(total=options["timeout"]), "stream": True}
        response = super().send(request, *arguments, **{**options, **bounds})
        try:
            response.raw = io.BytesIO(self._content(response))
        except urllib3.exceptions.TimeoutError as error:
            raise requests.ReadTimeout(error, request=request) from error
        except urllib3.exceptions.HTTPError as error:
            raise requests.ConnectionError(error, request=request) from error
        return response

    def _content(self, response: requests.Response) -> bytes:
        content = bytearray()
        try:
            for part in response.raw.stream(_PART_BYTES, decode_content=True):
                content += part
                if len(content) > self._answer_bytes_max:
                    raise AnswerTooLong(f"the answer is longer than {self._answer_bytes_max:,} bytes")
        finally:
            response.raw.close()
        return bytes(content)


TIMEOUT_S_MIN: Final = 0.001
REDIRECTIONS_MAX: Final = 5
WAITED_SECONDS_MIN: Final = 1.0
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
SILENT_SECONDS: Final = 60
"""For so long a server that did not answer in time is not read from: each publish of a new topic would wait for it."""


class AdminHttp:
    """Thread-safe; each request has a connection of its own."""

    def __init__(
        self,
        url: str,
        *,
        login: tuple[str, str] | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        certificate: tuple[str, str] | None = None,
        needs_tls: bool = False,
    ) -> None:
        """`url`: what all paths begin with; `token`: a bearer token; `certificate`: files of it and of its key;
        `needs_tls`: no redirection takes the login to another machine without TLS, since the broker gets it by TLS.
        """
        self._url = url
        self._login = None if login is None else (_as_latin_1(login[0]), _as_latin_1(login[1]))
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._ca_file = ca_file
        self._certificate = certificate
        self._needs_tls = needs_tls
        self._silent_until = 0.0

    def get(self, path: str, *, timeout_s: float) -> requests.Response:
        """Read. Raises what ask() does, and Timeout at once where the server did not answer lately."""
        if time.monotonic() < self._silent_until:
            raise requests.Timeout(f"{self._url} did not answer within the last {SILENT_SECONDS} s")
        try:
            return self.ask("GET", path, timeout_s=timeout_s)
        except requests.Timeout:
            if timeout_s >= WAITED_SECONDS_MIN:  # less is no fault of the server's
                self._silent_until = time.monotonic() + SILENT_SECONDS
            raise

    def ask(self, method: str, path: str, *, timeout_s: float) -> requests.Response:
        """Any request; `timeout_s` is for all of it, with its redirections. Raises requests.RequestException: an
        HTTPError where the server refuses it.

        A server of a cluster redirects to that which has the topic, which wants the login, too: requests would drop it.
        """
        url, deadline_s = f"{self._url}/{path}", time.monotonic() + timeout_s
        for _ in range(REDIRECTIONS_MAX):
            answer = self._ask(method, url, timeout_s=deadline_s - time.monotonic())
            if not answer.is_redirect:
                answer.raise_for_status()
                return answer
            url = _redirected(url, answer.headers["location"], needs_tls=self._needs_tls)
        raise requests.TooManyRedirects(f"{self._url}/{path} was redirected more than {REDIRECTIONS_MAX} times")

    def _ask(self, method: str, url: str, *, timeout_s: float) -> requests.Response:
        return ask(
            method,
            url,
            timeout_s=max(timeout_s, TIMEOUT_S_MIN),
            answer_bytes_max=ANSWER_BYTES_MAX,
            headers=self._headers,
            login=self._login,
            ca_file=self._ca_file,
            certificate=self._certificate,
        )


def admin_url(text: str, *, option: str, port: int) -> str:
    """The URL of an admin API that an option names, without a slash at its end. Raises ConfigurationError; `port`: of
    the example in it.
    """
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        raise ConfigurationError(f"{option} in the broker's URL is like http://HOST:{port}, without a login")
    return text.rstrip("/")


def check_login_encrypted(url: str, *, option: str) -> None:
    """Raise ConfigurationError if a login that goes to the broker by TLS would go to the admin API in clear, beyond
    this machine.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigurationError(
            f"{option} in the broker's URL would send in clear the login that the broker gets by TLS: give the "
            f"https:// address of its TLS port, or leave {option} out"
        )


def _redirected(url: str, location: str, *, needs_tls: bool) -> str:
    """The address that a server redirects to; never one without TLS from one with it, nor, if the login needs TLS, one
    on another machine: that would show the login.
    """
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
    except ValueError as error:
        raise requests.exceptions.InvalidURL(f"{url} redirects to what is no address: {error}") from error
    must_be_encrypted = urlsplit(url).scheme == "https" or (needs_tls and not is_loopback(parts.hostname or ""))
    if must_be_encrypted and parts.scheme != "https":
        raise requests.exceptions.InvalidURL(f"{url} redirects to {target}, which is without TLS")
    return target


def description_of(error: requests.RequestException) -> str:
    """The error's words; of one that names how long it waited, which differs each time, words that do not."""
    return "no answer in time" if isinstance(error, requests.Timeout) else str(error)


def _as_latin_1(text: str) -> str:
    """Returns the text that requests, which sends Latin-1, sends as UTF-8, which servers read."""
    return text.encode().decode("latin-1")
