"""The codes of BookKeeper's errors, of its client and of bookies: BKException.Code in its source."""

from __future__ import annotations

from enum import IntEnum


class ResultCode(IntEnum):
    """Those that are treated in a way of their own."""

    OK = 0
    DIGEST_MISMATCH = -5
    NOT_ENOUGH_BOOKIES = -6
    NO_SUCH_LEDGER = -7
    BOOKIE_NOT_AVAILABLE = -8
    NO_SUCH_ENTRY = -13
    NO_QUORUM_IN_TIME = -21
    NO_SUCH_LEDGER_METADATA = -25
    FENCED = -101
    UNAUTHORIZED = -102
