"""Asks an engine's admin API over HTTP, with the login and the certificates of the broker's URL."""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import urljoin, urlsplit

import requests

from broker_adapter.publishing.bounded_http import ask
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback

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
