"""Message ids: time-ordered, so that index entries are appended, not scattered (UUIDv7, RFC 9562)."""

from __future__ import annotations

import os
import time


def new_message_id() -> str:
    """Returns a new id: 32 lower-case hex digits, 48 bits of milliseconds, 74 random bits (RFC 9562, section 5.7)."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def new_token() -> str:
    """Returns a token for one owner of rows, never used again by any owner: 32 hex digits."""
    return os.urandom(16).hex()
