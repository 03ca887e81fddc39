"""What a broker says of its restore from a backup: the annotation `restored` (annotations.py), and in a data folder the
file `restoring` until that was done.

A restored broker goes on where the backup ended, beside what its broker did after it: the same sequences and delivery
numbers are given again, to other messages. So it has epochs far above those of before, and receipts of a lower one are
stale: one that settled a message of its broker's later life would settle another here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.log.annotations import Annotations
from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError, StorageFailed

NAME: Final = "restored"
UNFINISHED: Final = "restoring"
_EPOCH_SECONDS: Final = 32
"""Epochs of restores are counted by this span since 1970: a broker that is opened less often than once in it never has
one that a later restore is given, and a delivery number has room for them until 2205."""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The annotation: when, from the backup of which moment, and the epoch from which on receipts count."""

    at_ms: int
    backup_at_ms: int
    epoch: int


_decode = msgspec.json.Decoder(Restored).decode


def restored(annotations: Annotations) -> Restored | None:
    """Returns what a broker says of its restore; None if it was not restored. Raises ConfigurationError if it cannot be
    read: old receipts would count.
    """
    try:
        value = annotations.get(NAME)
        return None if value is None else _decode(value)
    except (StorageFailed, *DECODE_ERRORS) as error:
        raise ConfigurationError(
            f"what the broker says of its restore (`{NAME}`) cannot be read: restore it once more"
        ) from error


def epoch_of_restore(now_ms: int, *, before: int) -> int:
    """Returns the epoch of a broker that is restored now; `before`: the highest one in the backup."""
    return max(now_ms // 1_000 // _EPOCH_SECONDS, before + 1)


def refuse_unfinished(folder: Path) -> None:
    """Raise ConfigurationError if a restore into a folder did not end: what is in it is a part."""
    if (folder / UNFINISHED).exists():
        raise ConfigurationError(
            f"{folder} holds a part of a backup, whose restore did not end: empty it, and restore once more"
        )
