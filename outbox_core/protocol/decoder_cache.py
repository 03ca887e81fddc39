"""Decoders of shapes, each built once, and one at a time. Not the shapes.

msgspec (0.22) keeps what it knows of a shape with the class, and puts it there before it is whole: where two threads
build a decoder of the same shape at the same moment, one may decode by the other's half, and the process dies. So every
decoder that is not built while its module is imported is built here.
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
    """The decoder of this shape from JSON."""
    if shape not in _json:
        with _building:
            _json.setdefault(shape, msgspec.json.Decoder(shape))
    return _json[shape]


def msgpack_decoder(shape: type[Shape]) -> msgspec.msgpack.Decoder[Shape]:
    """The decoder of this shape from MessagePack."""
    if shape not in _msgpack:
        with _building:
            _msgpack.setdefault(shape, msgspec.msgpack.Decoder(shape))
    return _msgpack[shape]


def known(shape: type[Shape]) -> type[Shape]:
    """The same shape, of which msgspec knows all from now on: for msgspec.convert(), which has no decoder."""
    json_decoder(shape)
    return shape
