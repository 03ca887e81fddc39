"""A cache of decoders of shapes. Builds each once, and one at a time.

msgspec (0.22) stores the type information of a shape in its class, and does so before it is complete: if two threads
build a decoder of the same shape at the same time, one may use the other's incomplete information, and the process
crashes. So every decoder that is not built while its module is imported is built here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Shape = TypeVar("Shape")

_building = threading.Lock()
_json: dict[object, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[object, msgspec.msgpack.Decoder[Any]] = {}


def json_decoder(shape: type[Shape]) -> msgspec.json.Decoder[Shape]:
    """Returns the decoder of this shape from JSON."""
    if shape not in _json:
        with _building:
            _json.setdefault(shape, msgspec.json.Decoder(shape))
    return _json[shape]


def msgpack_decoder(shape: type[Shape]) -> msgspec.msgpack.Decoder[Shape]:
    """Returns the decoder of this shape from MessagePack."""
    if shape not in _msgpack:
        with _building:
            _msgpack.setdefault(shape, msgspec.msgpack.Decoder(shape))
    return _msgpack[shape]


def known(shape: type[Shape]) -> type[Shape]:
    """Returns the shape once msgspec's type information is complete: for msgspec.convert(), which has no decoder."""
    json_decoder(shape)
    return shape
