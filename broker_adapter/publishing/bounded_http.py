"""Asks one request of a server that is not trusted: nothing of the environment, a time and a size. Not for messages."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import requests
import urllib3
from requests.adapters import HTTPAdapter

from outbox_core.common.deadline_connections import set_deadlines

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
