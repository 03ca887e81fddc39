"""One request to a name server or broker in RocketMQ's remoting protocol: lengths, a JSON header, a body."""

from __future__ import annotations

import base64
import itertools
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from broker_adapter.rocketmq.signature import Credentials

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_JSON_HEADER_BYTES: Final = 0xFF_FFFF
"""The low bits of a header's length; the high ones are its encoding, which for JSON is 0."""
_UNQUOTED_NUMBER: Final = re.compile(rb"([{,])(\d+):")
_opaque = itertools.count(1)


class RemotingError(Exception):
    """A server's answer other than success."""


class _Header(msgspec.Struct):
    """The fields of an answer's header that are used."""

    code: int
    remark: str | None = None


def ask(
    address: tuple[str, int], code: int, *, login: Credentials | None, timeout_s: float,
    fields: Mapping[str, str] | None = None, body: bytes = b"",
) -> bytes:  # fmt: skip
    """Ask by a request code; the answer's body. Raises OSError, ValueError and RemotingError."""
    ext_fields = dict(fields or {})
    if login is not None:
        ext_fields |= _signed(login, ext_fields, body)
    header = {
        "code": code,
        "language": "PYTHON",
        "version": 0,
        "opaque": next(_opaque),
        "flag": 0,
        "extFields": ext_fields,
    }
    head = msgspec.json.encode(header)
    with socket.create_connection(address, timeout_s) as connection, connection.makefile("rb") as answer:
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
        length, head_length = struct.unpack(">ii", _exactly(answer, 8))
        if not 4 <= length <= ANSWER_BYTES_MAX:
            raise RemotingError(f"an answer of {length} bytes: this is no port of a name server or broker")
        content = _exactly(answer, length - 4)
    head_length &= _JSON_HEADER_BYTES
    answer_header = msgspec.json.decode(content[:head_length], type=_Header)
    if answer_header.code != 0:
        raise RemotingError(f"{(answer_header.remark or '').partition(chr(10))[0]} (code {answer_header.code})")
    return content[head_length:]


def decoded(body: bytes) -> Any:
    """JSON as RocketMQ writes it, with numbers for names that are not quoted."""
    return msgspec.json.decode(_UNQUOTED_NUMBER.sub(rb'\1"\2":', body))


def _signed(login: Credentials, fields: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """The signature is of the values of all fields in the order of their names, and of the body."""
    values = {**fields, "AccessKey": login.access_key}
    signed = "".join(values[name] for name in sorted(values)).encode() + body
    signature = base64.b64encode(login.signature(signed)).decode()
    return {"AccessKey": login.access_key, "Signature": signature}


def _exactly(answer: Any, count: int) -> bytes:
    content: bytes = answer.read(count)
    if len(content) != count:
        raise RemotingError("the connection ended before the answer did")
    return content
