"""Decodes the messages of a large publish one by one, so that no call holds the interpreter for a whole batch.

Nothing is built from a batch with too many messages. Small publishes are decoded at once elsewhere.
In MessagePack an array states its length, and its entries are found without decoding them. In JSON the end of each
entry is where the decoder reports trailing characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NoReturn, TypeVar

import msgspec

from outbox_broker.http.content_negotiation import LONG_BYTES
from outbox_broker.http.problems import Problem, of_decoding
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.problem import ProblemKind

WHERE: Final = "$.messages"

_WINDOW_BYTES: Final = 256 * 1024
_BLANKS: Final = rb"[ \t\n\r]{0,4096}+"
_BEGIN: Final = re.compile(rb'%b\{%b"messages"%b:%b\[' % ((_BLANKS,) * 4))
_VALUE: Final = re.compile(rb"%b(?![ \t\n\r])" % _BLANKS)
_NEXT: Final = re.compile(rb"%b," % _BLANKS)
_END: Final = re.compile(rb"%b\]%b\}%b\Z" % ((_BLANKS,) * 3))
_MORE: Final = re.compile(r"trailing characters \(byte ([0-9]+)\)$")
"""The decoder's error for a value with something after it: the position of that, counted from 1."""
_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)$")
_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)

Entry = TypeVar("Entry")
Body = bytes | bytearray


class _PackedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)]


_split_packed: Final = msgspec.msgpack.Decoder(_PackedBatch).decode
_skip_text: Final = msgspec.json.Decoder(msgspec.Raw).decode


class TooManyMessages(Exception):
    """A batch has more messages than allowed."""


def packed_entries(body: Body) -> Sequence[msgspec.Raw]:
    """Returns the messages of a MessagePack publish as slices of the body, without copies.

    Raises TooManyMessages or what msgspec raises.
    """
    try:
        return _split_packed(body).messages
    except msgspec.ValidationError as error:
        if str(error).startswith(f"Expected `array` of length <= {BATCH_MESSAGES_MAX}"):
            raise TooManyMessages from error
        raise


def packed_messages(body: Body, shape: type[Entry]) -> Iterator[Entry]:
    """Yields the messages of a MessagePack publish. Raises TooManyMessages, or Problem that names the position."""
    try:
        entries = packed_entries(body)
    except _ERRORS as error:
        raise of_decoding(error) from error
    decode = msgpack_decoder(shape).decode
    for index, entry in enumerate(entries):
        try:
            message = decode(entry)
        except _ERRORS as error:
            raise of_decoding(error, within=f"{WHERE}[{index}]") from error
        yield message


def text_messages(body: Body, shape: type[Entry]) -> Iterator[Entry]:
    """Yields the messages of a JSON publish. Raises TooManyMessages, or Problem that names the position."""
    decode = json_decoder(shape).decode
    for index, (start, end) in enumerate(_text_entries(body)):
        if index == BATCH_MESSAGES_MAX:
            raise TooManyMessages
        try:
            message = decode(memoryview(body)[start:end])
        except _ERRORS as error:
            raise _shifted(error, start, within=f"{WHERE}[{index}]") from error
        yield message


def _text_entries(body: Body) -> Iterator[tuple[int, int]]:
    """Yields where the entries of {"messages": [...]} begin and end."""
    begin = _BEGIN.match(body)
    if begin is None:
        _refuse_frame()
    position = begin.end()
    if _END.match(body, position):
        return
    likely_bytes = 0
    while True:
        end = _end_of_value(body, position, likely_bytes=likely_bytes)
        yield position, end
        likely_bytes = end - position
        comma = _NEXT.match(body, end)
        if comma is None:
            break
        position = comma.end()
    if not _END.match(body, end):
        _refuse_frame()


def _end_of_value(body: Body, start: int, *, likely_bytes: int) -> int:
    """Returns the end of the value that begins here, which something must follow. Raises Problem.

    The decoder gets at most twice what it needs: it would skip any number of blanks.
    """
    if not _VALUE.match(body, start):
        _refuse_frame()
    size = max(_WINDOW_BYTES, 2 * likely_bytes)
    while True:
        try:
            _skip_text(memoryview(body)[start : start + size])
        except _ERRORS as error:
            more = _MORE.search(str(error))
            if more is not None:
                return start + int(more.group(1)) - 1
            if start + size >= len(body):
                raise _shifted(error, start, within=WHERE) from error
        else:
            _refuse_frame()
        size *= 2


def _shifted(error: Exception, start: int, *, within: str) -> Problem:
    """Returns the problem of an entry that begins at this offset of the body."""
    problem = of_decoding(error, within=within)
    byte_match = _BYTE.search(str(error))
    if byte_match is None or problem.kind is not ProblemKind.MALFORMED_BODY:
        return problem
    return Problem(problem.kind, f"{str(error)[: byte_match.start()]}(byte {start + int(byte_match.group(1))})")


def _refuse_frame() -> NoReturn:
    raise Problem(
        ProblemKind.MALFORMED_BODY,
        f'a publish of more than {LONG_BYTES:,} bytes is {{"messages": [...]}}, with nothing before or behind it, and '
        "few blanks in between",
    )
