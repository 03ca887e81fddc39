"""The format of a data folder: which release wrote it, and which may open it. Asked before anything in it is touched.

Segments have versions of their own, which are found when they are read: too late to leave the folder as it was, since
by then its reserve is released and indexes are rebuilt. The file `format` says it beforehand. It is a hint: where it is
missing, or was cut by a power failure, the segments are asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.log.restored_folder import refuse_unfinished
from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from outbox_core.common.private_files import write_private
from outbox_core.runtime.build_info import build
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

FORMAT: Final = 1
"""What this release writes. One that writes what this one cannot read has a higher number."""
OLDEST_FORMAT: Final = 1
"""The oldest format that this release opens, and writes on in its own."""
FILE_NAME: Final = "format"
EXPORT: Final = "export"
"""The file that says that a folder has the logs of a broker on BookKeeper, for the proof, and not all that it keeps."""
_FILE_BYTES_MAX: Final = 64 * 1024


class FolderFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    format: int
    """What the folder has."""
    opened_by: int
    """The least format that a release must know to open it: that of an earlier release, where what is new in the
    folder does not hinder that.
    """
    release: str
    """The release that wrote this file; empty if it did not know its own."""


_decode = msgspec.json.Decoder(FolderFormat).decode


def format_of(folder: Path) -> FolderFormat | None:
    """Returns a folder's format; None if it does not say one. Raises ConfigurationError if it cannot be read."""
    try:
        with (folder / FILE_NAME).open("rb") as file:
            return _decode(file.read(_FILE_BYTES_MAX))
    except (FileNotFoundError, NotADirectoryError, *DECODE_ERRORS):
        return None
    except OSError as error:
        raise ConfigurationError(f"{folder / FILE_NAME} cannot be read: {error.strerror}") from error


def refuse_other_format(folder: Path) -> FolderFormat | None:
    """Returns a folder's format, if this release may open it. Changes nothing. Raises ConfigurationError, which names
    the cures.
    """
    refuse_unfinished(folder)
    if (folder / EXPORT).exists():
        raise ConfigurationError(
            f"{folder} is an export of a broker's logs, without what is scheduled: no broker is started on it. "
            "`outbox broker store copy` makes a data folder"
        )
    found = format_of(folder)
    if found is not None:
        refuse_format(found, of=f"the data folder {folder}")
    return found


def refuse_format(found: FolderFormat, *, of: str) -> None:
    """Raise ConfigurationError, which names the cures, if this release may not open a format. `of`: what has it."""
    writer = f"release {found.release}" if found.release else "another release"
    if found.opened_by > FORMAT:
        raise ConfigurationError(
            f"{of} has format {found.format}, of {writer}, and this release opens formats up to "
            f"{FORMAT}; nothing was changed. Run that release or a later one; or, to go back, restore the backup that "
            "was taken before the upgrade into another folder: what came since is missing there"
        )
    if found.format < OLDEST_FORMAT:
        raise ConfigurationError(
            f"{of} has format {found.format}, of {writer}, and this release opens formats from "
            f"{OLDEST_FORMAT} on; nothing was changed. Open it with a release in between, or drain it with {writer}"
        )


def note_format(folder: Path) -> None:
    """Record that this release writes to a folder, whose lock is held; one of a later format, which this release may
    open, keeps what it says. Raises ConfigurationError as refuse_other_format().
    """
    found = refuse_other_format(folder)
    if found is not None and found.format >= FORMAT:
        return
    path = folder / FILE_NAME
    unfinished = path.with_name(f"{FILE_NAME}.new")
    here = FolderFormat(format=FORMAT, opened_by=FORMAT, release=build().version)
    try:
        write_private(unfinished, msgspec.json.encode(here) + b"\n")
        unfinished.replace(path)
    except OSError as error:  # a full disk: what is stored must be consumed all the same
        logger.warning("folder_format_not_written", extra={"folder": str(folder), "error": error.strerror})
