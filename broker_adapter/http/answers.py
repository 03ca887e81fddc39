"""Reading an answer's body within a deadline of its own. Not what is in it, nor when a request goes again."""

from __future__ import annotations

import time
from typing import Final

import requests
from requests import exceptions as http
from urllib3 import HTTPResponse
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

READ_BYTES: Final = 256 * 1024
ANSWER_BYTES_A_SECOND_MIN: Final = 1024 * 1024
"""A broker or a network that is slower than this is given up: a read time-out alone never ends a trickle."""
ANSWER_BYTES_MAX: Final = 512 * 1024 * 1024
"""Bodies of 64 MiB, each byte of which takes six in JSON (a control character), and their headers. More is no answer
of this protocol.
"""


def read_answer(response: requests.Response, *, timeout_s: float) -> requests.Response:
    """The same response with all of its body in `content`. Its connection goes back to the pool, or is closed.

    Raises exceptions of requests: ReadTimeout, ChunkedEncodingError where it breaks off, ContentDecodingError where
    it is too long.
    """
    raw: HTTPResponse = response.raw
    whole = False
    try:
        _check_framed(response)
        response._content = _read(raw, timeout_s=timeout_s)  # noqa: SLF001  (requests has no other way in)
        response._content_consumed = True  # type: ignore[attr-defined]  # noqa: SLF001
        whole = True
        return response
    except ReadTimeoutError as error:
        raise http.ReadTimeout(error) from error
    except ProtocolError as error:
        raise http.ChunkedEncodingError(error) from error
    except HTTPError as error:
        raise http.ConnectionError(error) from error
    finally:
        if not whole:
            raw.close()
        raw.release_conn()


def _check_framed(response: requests.Response) -> None:
    """http.client takes a head that breaks off for a whole one, and a body without a length for one that ends with the
    connection: then a cut could not be told from an end.
    """
    if "content-length" not in response.headers and "transfer-encoding" not in response.headers:
        raise ProtocolError("the answer has no length: its head broke off")


def _read(raw: HTTPResponse, *, timeout_s: float) -> bytes:
    deadline_s = time.monotonic() + timeout_s
    chunks: list[bytes] = []
    size = 0
    while chunk := raw.read1(READ_BYTES, decode_content=False):
        chunks.append(chunk)
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise http.ContentDecodingError(f"the answer has more than {ANSWER_BYTES_MAX:,} bytes")
        if time.monotonic() > deadline_s + size / ANSWER_BYTES_A_SECOND_MIN:
            raise http.ReadTimeout("the answer trickles: it was not whole in time")
    return b"".join(chunks)
