"""The client of operators' commands for a running broker: one request at a time, answers as they are printed."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from broker_adapter.publishing.admin_http import AnswerTooLong, ask
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox_core.runtime.config_files import read_secret
from outbox_core.runtime.http_broker_url import HttpBrokerUrl, check_token

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
NO_URL: Final = "a broker's URL looks like http://127.0.0.1:7788"
_WRAPPED_MAX: Final = 8
_REASON_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminClient:
    """Connection settings for a broker. `ca_file` and `token_file` win over those of the URL."""

    url: str
    timeout_ms: int
    """For all of a request, to the last byte of the response, and a second for each MiB of it."""
    ca_file: Path | None = None
    token_file: Path | None = None
    answer_bytes_max: int = ANSWER_BYTES_MAX

    @property
    def shown_url(self) -> str:
        """The URL without user, password and query, for messages."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Send a request; returns status and text of the response. Raises BrokerUnavailable if there is none.

        Raises BrokerRefused if the response is too long.
        """
        of_url = HttpBrokerUrl.parse(self.url)
        target = _without_login(of_url.address) + path
        ca_file = of_url.ca_file if self.ca_file is None else str(self.ca_file)
        if ca_file is not None and target.startswith("https:"):
            _check_certificates(ca_file)
        token = of_url.token if self.token_file is None else read_secret(self.token_file, what="token")
        check_token(token)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        try:
            response = ask(
                method,
                target,
                timeout_s=self.timeout_ms / 1000,
                answer_bytes_max=self.answer_bytes_max,
                paying_bytes_max=self.answer_bytes_max,  # what a slow network brings steadily is no trickle
                headers=headers,
                json=body,
                ca_file=ca_file,
            )
        except AnswerTooLong as error:
            raise BrokerRefused(f"{error}: ask for less at once") from error
        except requests.RequestException as error:
            raise BrokerUnavailable(f"no broker answers at {self.shown_url}: {_reason(error)}") from error
        return response.status_code, response.content.decode("utf-8", "replace")

    def request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request; returns the decoded response. Raises BrokerRefused, with the broker's text, on a problem."""
        status, text = self.request(method, path, body)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise BrokerRefused(f"{self.shown_url} answered {status}, and no JSON: {text[:200]}") from error
        if not isinstance(answer, dict):
            raise BrokerRefused(f"{self.shown_url} answered {status}, and nothing of a broker's: {text[:200]}")
        if status != HTTPStatus.OK:
            raise BrokerRefused(str(answer.get("detail", text[:500])))
        return answer


def _without_login(url: str) -> str:
    """Returns the URL that paths are added to; requests would send a user and a password of it in the token's place.

    Raises ConfigurationError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(NO_URL) from error
    if parts.scheme not in {"http", "https"} or parts.hostname is None:
        raise ConfigurationError(NO_URL)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _check_certificates(ca_file: str) -> None:
    """Raise ConfigurationError that says what is wrong with the file; requests says it as of the server's."""
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one of them
        raise ConfigurationError(f"the certificates in {ca_file} cannot be read: {error.strerror or error}") from error


def _reason(error: BaseException) -> str:
    """Returns the innermost reason: requests and urllib3 wrap it thrice, in texts with object addresses in them."""
    reason = error
    for _ in range(_WRAPPED_MAX):
        inner = getattr(reason, "reason", None) or next(
            (argument for argument in reversed(reason.args) if isinstance(argument, BaseException)), None
        )
        if not isinstance(inner, BaseException):
            break
        reason = inner
    system = reason.__cause__ or reason.__context__ or reason
    if isinstance(system, OSError) and system.strerror:
        return system.strerror
    return f"{type(reason).__name__}: {reason}"[:_REASON_CHARS_MAX]
