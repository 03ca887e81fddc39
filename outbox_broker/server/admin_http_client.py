"""HTTP client of the command line for a running broker, with the standard library only. Not for programs."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox_core.runtime.config_files import read_secret
from outbox_core.runtime.http_broker_url import HttpBrokerUrl

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
NO_URL: Final = "a broker's URL looks like http://127.0.0.1:7788"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminHttpClient:
    """Connection settings for a broker. `ca_file` and `token_file` win over those of the URL."""

    url: str
    timeout_ms: int
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
        connection = self._connection(of_url)
        headers = {} if body is None else {"content-type": "application/json"}
        token = of_url.token if self.token_file is None else read_secret(self.token_file, what="token")
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, urlsplit(of_url.address).path.rstrip("/") + path, sent, headers)
            response = connection.getresponse()
            answer = response.read(self.answer_bytes_max + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise BrokerUnavailable(f"no broker answers at {self.shown_url}: {error}") from error
        finally:
            connection.close()
        if len(answer) > self.answer_bytes_max:
            raise BrokerRefused(f"the answer is longer than {self.answer_bytes_max:,} bytes: ask for less at once")
        return response.status, answer.decode("utf-8", "replace")

    def request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request; returns the decoded response. Raises BrokerRefused, with the broker's text, on a problem."""
        status, text = self.request(method, path, body)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise BrokerRefused(f"{self.shown_url} answered {status}, and no JSON: {text[:200]}") from error
        if not isinstance(answer, dict):
            raise BrokerRefused(f"{self.shown_url} answered {status}, and nothing of a broker's: {text[:200]}")
        if status != http.HTTPStatus.OK:
            raise BrokerRefused(str(answer.get("detail", text[:500])))
        return answer

    def _connection(self, url: HttpBrokerUrl) -> http.client.HTTPConnection:
        try:
            parts = urlsplit(url.address)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(NO_URL) from error
        if parts.scheme not in {"http", "https"} or parts.hostname is None:
            raise ConfigurationError(NO_URL)
        timeout_s = self.timeout_ms / 1000
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
        ca_file = url.ca_file if self.ca_file is None else self.ca_file
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # SSLError is one of them
            raise ConfigurationError(
                f"the certificates in {ca_file} cannot be read: {error.strerror or error}"
            ) from error
        return http.client.HTTPSConnection(parts.hostname, port, timeout=timeout_s, context=context)
