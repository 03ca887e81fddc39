"""Message ids: time-ordered, so that index entries are appended, not scattered (UUIDv7, RFC 9562)."""

from __future__ import annotations

import hashlib
import os
import time

EDITED_PREFIX = "edit-"
"""Of the id of an edited message."""
_EDITED_HEX_DIGITS = 32


def new_message_id() -> str:
    """Returns a new id: 32 lower-case hex digits, 48 bits of milliseconds, 74 random bits (RFC 9562, section 5.7)."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def edited_id(operation: str, topic: str, group: str, message_id: str) -> str:
    """Returns the id of a dead letter's edited message: a repeat of the same operation makes the same one."""
    named = f"{operation}\0{topic}\0{group}\0{message_id}".encode()
    return f"{EDITED_PREFIX}{hashlib.sha256(named).hexdigest()[:_EDITED_HEX_DIGITS]}"


def new_token() -> str:
    """Returns a token for one owner of rows, never used again by any owner: 32 hex digits."""
    return os.urandom(16).hex()
