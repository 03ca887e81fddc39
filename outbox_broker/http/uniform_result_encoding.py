"""Builds responses with the same result for every entry from pieces: for example a batch whose messages are all stored.

Responses with different results are encoded entry by entry elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_FIXSTR_MAX = 31
_STR8_MAX = 255
_encode = msgspec.msgpack.Encoder().encode


def encode_uniform_results(name: str, texts: Sequence[str], more: dict[str, str | None]) -> msgspec.Raw | None:
    """Encode `{"results": [{name: text, **more}, ...]}` in MessagePack; None if a text is not ASCII, or very long."""
    fields = len(more) + 1
    start = _text(bytes([0x80 | fields]) + _encode(name))
    heads = {size: start + head for size in {len(text) for text in texts} if (head := _head_of(size)) is not None}
    tail = _text(b"".join(_encode(text) for pair in more.items() for text in pair))
    try:
        # Latin-1 maps every byte to a character and back: joining texts is faster than encoding them one by one.
        entries = "".join([heads[len(text)] + text + tail for text in texts])
    except KeyError:
        return None
    if not "".join(texts).isascii():
        return None
    count = len(texts).to_bytes(4, "big")
    return msgspec.Raw(b"\x81" + _encode("results") + b"\xdd" + count + entries.encode("latin-1"))


def _head_of(size: int) -> str | None:
    """Returns the MessagePack header of a text of this size."""
    if size <= _FIXSTR_MAX:
        return chr(0xA0 | size)
    return "\xd9" + chr(size) if size <= _STR8_MAX else None


def _text(data: bytes) -> str:
    return data.decode("latin-1")
