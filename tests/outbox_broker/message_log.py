"""The broker's message log, as tests read, damage and count it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from outbox_core.journal.block import FRAME_HEAD_BYTES, FrameKind
from outbox_core.messages.message import Record, decode_record
from tests.outbox_broker.action_log import blocks_in

NOTE = "messages-000000000001.proven"
"""Of a log's first segment: up to where it is known to be durable."""


class StoredMessage(NamedTuple):
    """A message, its frame's kind and number, when it was stored, and where its frame begins and ends in its file; its
    block begins at `block`.
    """

    record: Record
    kind: int
    number: int
    stored_at_ms: int | None
    block: int
    begin: int
    end: int


def segments_of(folder: Path, log: str) -> list[Path]:
    """The files of a log of a data folder, oldest first."""
    return sorted((folder / log).glob(f"{log}-*.segment"))


def message_segments(folder: Path) -> list[Path]:
    """The files of a data folder's message log, oldest first."""
    return segments_of(folder, "messages")


def stored_messages(path: Path) -> list[StoredMessage]:
    """The messages of a file, and markers of scheduled ones, too."""
    found: list[StoredMessage] = []
    for block in blocks_in(path):
        for frame, start in zip(block.frames, block.starts, strict=True):
            if frame.kind == FrameKind.FOOTER:
                continue
            end = start + FRAME_HEAD_BYTES + len(frame.payload)
            record = decode_record(frame.payload)
            found.append(StoredMessage(record, frame.kind, frame.number, block.at_ms, block.position, start, end))
    return found


def messages_of(folder: Path) -> list[StoredMessage]:
    """All messages of a data folder, and markers of scheduled ones, too."""
    return [stored for path in message_segments(folder) for stored in stored_messages(path)]


def damage_message(folder: Path, message_id: str) -> None:
    """Flip a bit in the body's end of a message that is stored once."""
    [(path, stored)] = [
        (path, stored)
        for path in message_segments(folder)
        for stored in stored_messages(path)
        if stored.record.id == message_id
    ]
    data = bytearray(path.read_bytes())
    data[stored.end - 12] ^= 1
    path.write_bytes(data)


class LoggedFooter(NamedTuple):
    """A footer: its file, where its block begins there, and the payload of its directory, and where that of the last
    other frame ends, or the directory's if there is none.
    """

    path: Path
    begin: int
    directory: range
    end: int


def footers_of(folder: Path) -> list[LoggedFooter]:
    """The footers of a data folder, in their order."""
    found = []
    for path in message_segments(folder):
        for block in blocks_in(path):
            if block.kind == FrameKind.FOOTER:
                begin = block.starts[0] + FRAME_HEAD_BYTES
                directory = range(begin, begin + len(block.frames[0].payload))
                found.append(LoggedFooter(path, block.position, directory, block.end))
    return found


def flip_footer(footer: LoggedFooter) -> None:
    """Flip a bit in its first block of runs."""
    flip(footer.path, footer.directory.stop + FRAME_HEAD_BYTES + 3)


def flip_directory(footer: LoggedFooter) -> None:
    """Flip a bit in its directory."""
    flip(footer.path, footer.directory.start + 3)


def flip_ids(footer: LoggedFooter) -> None:
    """Flip a bit in the last of its ids."""
    flip(footer.path, footer.end - 1)


def clear_footer(footer: LoggedFooter) -> None:
    """Fill it with zeros, its block's head too."""
    with footer.path.open("r+b") as file:
        file.seek(footer.begin)
        file.write(bytes(footer.end - footer.begin))


def flip(path: Path, position: int) -> None:
    """Flip a bit in place, of a file that somebody may have open."""
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))
