"""Asks each bookie for its copy of an entry: whether all copies are damaged, or one is while other bookies are out.

BookKeeper's client reports both by one error, and returns no damaged copy. A copy is the entry's head, its digest, and
its content ("The BookKeeper protocol", Entries, in its manual): ledger, entry, last confirmed entry and length of
the ledger, 8 bytes each; a CRC-32C of head and content.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import google_crc32c

from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.result_codes import ResultCode
from outbox_broker.segments.ledgers import LedgerDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_HEAD: Final = struct.Struct(">qqqq")
_DIGEST: Final = struct.Struct(">I")
CONTENT_BEGIN: Final = _HEAD.size + _DIGEST.size
_NOT_THERE: Final = frozenset({ResultCode.NO_SUCH_LEDGER, ResultCode.NO_SUCH_ENTRY})
_CALLBACK: Final = "org.apache.bookkeeper.proto.BookkeeperInternalCallbacks$ReadEntryCallback"


@dataclass(frozen=True, slots=True)
class BookieAnswer:
    """A bookie's answer: a code of BookKeeper's, and the copy, if it has one."""

    code: int
    copy: bytes = b""


class JavaEntryCopies:
    """Reads copies by BookKeeper's own client."""

    def __init__(self, runtime: JavaRuntime, client: Any, *, timeout_ms: int) -> None:
        """`client` ends each request by a time-out of its own, which is shorter than this one."""
        self._runtime = runtime
        self._client = client
        self._timeout_ms = timeout_ms

    def damage(self, metadata: Any, ledger_id: int, entries: Iterable[int]) -> LedgerDamaged | None:
        """Returns the damage of the first of these entries that is lost. None if none is; or if one may be, since a
        bookie does not answer: the others are not asked for then, and what is lost is found later.
        """
        for entry in entries:
            answers = self._answers(metadata, ledger_id, entry)
            found = damaged_content(answers, ledger_id, entry)
            if found is not None:
                text = f"entry {entry} of ledger {ledger_id} is lost: no copy on its {len(answers)} bookies is whole"
                return LedgerDamaged(text, found=found)
            if not are_all_answers(answers):
                return None
        return None

    def _answers(self, metadata: Any, ledger_id: int, entry: int) -> list[BookieAnswer]:
        """Returns what the bookies answer that keep the copies of an entry, by the ledger's metadata."""
        bookies = list(metadata.getEnsembleAt(entry))
        copies = [bookies[(entry + other) % len(bookies)] for other in range(int(metadata.getWriteQuorumSize()))]
        received = _BookieAnswers(len(copies))
        reader = self._client.getClientCtx().getBookieClient()
        for number, bookie in enumerate(copies):
            note = partial(received.note, number, self._bytes_of)
            callback = self._runtime.implementation(_CALLBACK, {"readEntryComplete": note})
            reader.readEntry(bookie, ledger_id, entry, callback, None, 0)
        return received.wait(timeout_ms=self._timeout_ms)

    def _bytes_of(self, buffer: Any) -> bytes:
        copied = self._runtime.byte_array(bytes(int(buffer.readableBytes())))
        buffer.getBytes(buffer.readerIndex(), copied)
        return bytes(copied)


class _BookieAnswers:
    """Collects answers from threads of Java's."""

    def __init__(self, count: int) -> None:
        self._answers = [BookieAnswer(ResultCode.BOOKIE_NOT_AVAILABLE)] * count
        self._missing = count
        self._guard = threading.Lock()
        self._all_there = threading.Event()

    def note(
        self, number: int, bytes_of: Callable[[Any], bytes], code: Any, _ledger: Any, _entry: Any, buffer: Any, _: Any
    ) -> None:
        """Called back once for each bookie. The buffer is Java's again afterwards."""
        answer = BookieAnswer(ResultCode.BOOKIE_NOT_AVAILABLE)
        try:
            answer = BookieAnswer(int(code), b"" if buffer is None else bytes_of(buffer))
        except Exception:  # the boundary of Java's thread: without an answer, nothing is taken for damaged
            logger.exception("entry_copy_not_read")
        with self._guard:
            self._answers[number] = answer
            self._missing -= 1
            if not self._missing:
                self._all_there.set()

    def wait(self, *, timeout_ms: int) -> list[BookieAnswer]:
        """Returns the answers, once all are there, or after the time-out."""
        self._all_there.wait(timeout_ms / 1000)
        with self._guard:
            return list(self._answers)


def damaged_content(answers: Sequence[BookieAnswer], ledger_id: int, entry: int) -> bytes | None:
    """Returns the content of a damaged copy, if the entry is lost: all bookies answered, and no copy is whole. Pure.

    None if it may not be: a bookie did not answer, or has a copy that a reader will find.
    """
    if not are_all_answers(answers):
        return None
    copies = [answer.copy for answer in answers if answer.code == ResultCode.OK]
    if any(is_whole(copy, ledger_id, entry) for copy in copies):
        return None
    return copies[0][CONTENT_BEGIN:] if copies else b""


def are_all_answers(answers: Sequence[BookieAnswer]) -> bool:
    """Returns whether each bookie said that it has a copy, or that it has none."""
    return all(answer.code == ResultCode.OK or answer.code in _NOT_THERE for answer in answers)


def is_whole(copy: bytes, ledger_id: int, entry: int) -> bool:
    """Returns whether a copy is of this entry and matches its digest."""
    if len(copy) < CONTENT_BEGIN:
        return False
    head, content = copy[: _HEAD.size], copy[CONTENT_BEGIN:]
    [digest] = _DIGEST.unpack_from(copy, _HEAD.size)
    found_ledger, found_entry, _, _ = _HEAD.unpack(head)
    is_matched = google_crc32c.extend(google_crc32c.value(head), content) == digest
    return is_matched and (found_ledger, found_entry) == (ledger_id, entry)
