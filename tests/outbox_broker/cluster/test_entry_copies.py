"""Whether an entry is lost, from what the bookies answer that keep its copies."""

from __future__ import annotations

import struct

import google_crc32c
import pytest

from outbox_broker.cluster.bookkeeper.java_entry_copies import BookieAnswer, damaged_content, is_whole

LEDGER, ENTRY = 7, 3
TIME_OUT, OUT, NO_LEDGER, NO_ENTRY, DISK_ERROR = -23, -8, -7, -13, -1


def copy_of(content: bytes, *, ledger_id: int = LEDGER, entry: int = ENTRY) -> bytes:
    head = struct.pack(">qqqq", ledger_id, entry, entry - 1, 1_000)
    return head + struct.pack(">I", google_crc32c.value(head + content)) + content


def flipped(copy: bytes, at: int) -> bytes:
    changed = bytearray(copy)
    changed[at] ^= 1
    return bytes(changed)


WHOLE = BookieAnswer(0, copy_of(b"content"))
DAMAGED = BookieAnswer(0, flipped(copy_of(b"content"), -1))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([DAMAGED, DAMAGED, DAMAGED], b"contenu"),
        ([DAMAGED, BookieAnswer(NO_ENTRY), BookieAnswer(NO_LEDGER)], b"contenu"),
        ([DAMAGED, DAMAGED, WHOLE], None),
        ([DAMAGED, DAMAGED, BookieAnswer(OUT)], None),
        ([DAMAGED, DAMAGED, BookieAnswer(TIME_OUT)], None),
        ([DAMAGED, DAMAGED, BookieAnswer(DISK_ERROR)], None),
    ],
    ids=["all_damaged", "others_missing", "one_whole", "one_out", "one_late", "one_unreadable"],
)
def test_an_entry_is_lost_only_if_all_bookies_answered_and_no_copy_is_whole(
    answers: list[BookieAnswer], expected: bytes | None
) -> None:
    assert damaged_content(answers, LEDGER, ENTRY) == expected


@pytest.mark.parametrize("at", range(len(copy_of(b"content"))))
def test_a_flipped_bit_anywhere_in_a_copy_is_damage(at: int) -> None:
    copy = copy_of(b"content")

    assert is_whole(copy, LEDGER, ENTRY)
    assert not is_whole(flipped(copy, at), LEDGER, ENTRY)


def test_a_copy_of_another_entry_and_a_torn_one_are_damage() -> None:
    assert not is_whole(copy_of(b"content", entry=ENTRY + 1), LEDGER, ENTRY)
    assert not is_whole(copy_of(b"content", ledger_id=LEDGER + 1), LEDGER, ENTRY)
    assert not is_whole(copy_of(b"content")[:20], LEDGER, ENTRY)
    assert not is_whole(b"", LEDGER, ENTRY)
    assert is_whole(copy_of(b""), LEDGER, ENTRY)
