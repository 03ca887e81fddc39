"""JSON and MessagePack: content negotiation, decoding and encoding. The shapes are in the protocol package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from outbox_broker.http.responses import Problem, of_decoding
from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    JSON_TYPE,
    MSGPACK_TYPE,
)

Shape = TypeVar("Shape")


class Codec(StrEnum):
    """The format of a body; the value is its media type."""

    JSON = JSON_TYPE
    MSGPACK = MSGPACK_TYPE


_NAMES: Final = {
    JSON_TYPE: Codec.JSON,
    MSGPACK_TYPE: Codec.MSGPACK,
    "application/x-msgpack": Codec.MSGPACK,
    "application/vnd.msgpack": Codec.MSGPACK,
}
_ANY: Final = frozenset({"*/*", "application/*"})
_json: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()
_encode_json, _encode_msgpack = _json.encode, _msgpack.encode
_FIXMAP: Final = 0x80
_FIXARRAY: Final = 0x90
_FIXSTR_MAX: Final = 31
_STR8_MAX: Final = 255
_ARRAY_32: Final = b"\xdd"
LONG_BYTES: Final = 512 * 1024
"""A list of more bytes is encoded, and of MessagePack decoded, entry by entry."""


def request_codec(content_type: str | None) -> Codec:
    """Returns the format of the request's body. Raises Problem for all but JSON and MessagePack, and if it is missing.

    It is required: a web page can make a browser post a body without a media type anywhere, but not one with these.
    """
    name = (content_type or "").partition(";")[0].strip().lower()
    codec = _NAMES.get(name)
    if codec is None:
        complaint = f"not {name!r}" if name else "and must be said"
        raise Problem(
            ProblemKind.UNSUPPORTED_MEDIA_TYPE,
            f"the Content-Type is {JSON_TYPE} or {MSGPACK_TYPE}, {complaint[:200]}",
            headers={"accept": f"{JSON_TYPE}, {MSGPACK_TYPE}"},
        )
    return codec


@lru_cache(maxsize=256)
def answer_codec(accept: str | None, *, default: Codec) -> Codec:
    """Returns the response format: the best in Accept; on a tie the default. Raises Problem if none is allowed."""
    if not accept:
        return default
    weights: dict[Codec, float] = {}
    for part in accept[:1024].split(","):
        name, _, parameters = part.partition(";")
        name, weight = name.strip().lower(), _weight(parameters)
        for codec in _NAMES.get(name), *(Codec if name in _ANY else ()):
            if codec is not None:
                weights[codec] = max(weights.get(codec, 0.0), weight)
    best = max(weights, key=lambda codec: (weights[codec], codec is default), default=None)
    if best is None or weights[best] <= 0:
        raise Problem(ProblemKind.NOT_ACCEPTABLE, f"answers are {JSON_TYPE} or {MSGPACK_TYPE}")
    return best


def decode(body: bytes | bytearray, codec: Codec, shape: type[Shape]) -> Shape:
    """Decode the body as a value of this shape. Raises Problem that names the position."""
    try:
        return _decoder(codec, shape).decode(body)
    except DECODE_ERRORS as error:
        raise of_decoding(error) from error


def encode(answer: object, codec: Codec) -> bytes:
    """Encode a response."""
    return _encode_json(answer) if codec is Codec.JSON else _encode_msgpack(answer)


def encode_list(name: str, entries: Iterable[object], codec: Codec, *, count: int, **more: object) -> bytearray:
    """Encode a response with `count` entries one by one as they are generated: no call holds the interpreter for all of
    a long list, nor are all entries in memory at once.

    In JSON an object, {name: entries, **more}. In MessagePack the array of the entries, behind `more` in an array of
    its own if there is any: as an array_like Struct with these fields.
    """
    return _json_list(name, entries, more) if codec is Codec.JSON else _packed_list(entries, more, count=count)


def _json_list(name: str, entries: Iterable[object], more: Mapping[str, object]) -> bytearray:
    answer = bytearray(b"{%b:[" % _encode_json(name))
    for index, entry in enumerate(entries):
        if index:
            answer += b","
        _json.encode_into(entry, answer, -1)
    answer += b"]"
    for field, value in more.items():
        answer += b",%b:%b" % (_encode_json(field), _encode_json(value))
    answer += b"}"
    return answer


def _packed_list(entries: Iterable[object], more: Mapping[str, object], *, count: int) -> bytearray:
    answer = bytearray([_FIXARRAY | len(more) + 1] if more else b"")
    for value in more.values():
        answer += _encode_msgpack(value)
    answer += _ARRAY_32 + count.to_bytes(4, "big")
    for entry in entries:
        _msgpack.encode_into(entry, answer, -1)
    return answer


def encode_uniform_results(name: str, texts: Sequence[str], more: dict[str, str | None]) -> msgspec.Raw | None:
    """Encode `{"results": [{name: text, **more}, ...]}` in MessagePack from pieces: the same result for every entry, as
    where all messages of a batch are stored. None if a text is not ASCII, or very long: then encode entry by entry.
    """
    fields = len(more) + 1
    start = _latin_1(bytes([_FIXMAP | fields]) + _encode_msgpack(name))
    heads = {size: start + head for size in {len(text) for text in texts} if (head := _text_head(size)) is not None}
    tail = _latin_1(b"".join(_encode_msgpack(text) for pair in more.items() for text in pair))
    try:
        # Latin-1 maps every byte to a character and back: joining texts is faster than encoding them one by one.
        entries = "".join([heads[len(text)] + text + tail for text in texts])
    except KeyError:
        return None
    if not "".join(texts).isascii():
        return None
    count = len(texts).to_bytes(4, "big")
    return msgspec.Raw(b"\x81" + _encode_msgpack("results") + b"\xdd" + count + entries.encode("latin-1"))


def _decoder(codec: Codec, shape: type[Shape]) -> msgspec.json.Decoder[Shape] | msgspec.msgpack.Decoder[Shape]:
    return json_decoder(shape) if codec is Codec.JSON else msgpack_decoder(shape)


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _text_head(size: int) -> str | None:
    """Returns the MessagePack header of a text of this size."""
    if size <= _FIXSTR_MAX:
        return chr(0xA0 | size)
    return "\xd9" + chr(size) if size <= _STR8_MAX else None


def _latin_1(data: bytes) -> str:
    return data.decode("latin-1")
