"""The zones of bookies: one file for the cluster's nodes, and for AutoRecovery by a script that reads it, since no
Python runs there. What AutoRecovery on other machines has in its copy is not seen.

A line is an address (a number, as 10.0.1.5), a zone and, if the bookie is not an upgrade domain of its own, a domain:

    10.0.1.5  a
    10.0.2.5  b  rack-7   # a comment
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

FILE_BYTES_MAX: Final = 1024 * 1024
SCRIPT_SECONDS_MAX: Final = 30
ZONES_MIN: Final = 2
"""Zones that the copies of an entry are in, unless writes go on in the last one."""
_UNKNOWN_RACK: Final = "/default-rack"
"""What BookKeeper's rack-aware policy calls the place of a bookie whose zone is not known."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_FIELDS: Final = (2, 3)


class LastZone(StrEnum):
    """What becomes of writes when the bookies of one zone are left."""

    STOP = "stop"
    """They are refused: an acknowledged entry is in two zones, always."""
    GO_ON = "go-on"
    """They go to the zone that is left; AutoRecovery spreads the copies when another zone is back."""

    @property
    def zones_min(self) -> int:
        """Zones without which no ledger is made."""
        return ZONES_MIN if self is LastZone.STOP else 1


@dataclass(frozen=True, slots=True)
class BookieZone:
    """Where a bookie is. The policy puts two copies into one zone only in different domains."""

    zone: str
    domain: str


@dataclass(frozen=True, slots=True)
class ZoneMap:
    """Places by address."""

    places: Mapping[str, BookieZone] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ZoneMap:
        """Returns what a zone file says. Raises ConfigurationError that names the line."""
        places: dict[str, BookieZone] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) not in _FIELDS or not all(_NAME.fullmatch(word) for word in words[1:]):
                raise ConfigurationError(f"line {number} is not `address zone [domain]`")
            address = _number(words[0], line=number)
            if address in places:
                raise ConfigurationError(f"line {number} names {address} again")
            places[address] = BookieZone(words[1], words[2] if len(words) > 2 else address)
        return cls(places)

    def place(self, address: str) -> BookieZone | None:
        """Returns the place of an address, None if the file does not name it."""
        return self.places.get(address)

    def zones(self, bookies: Iterable[str]) -> dict[str, str | None]:
        """Returns the zone of each bookie `host:port`, None if the file does not name it."""
        places = {bookie: self.place(bookie_address(bookie)) for bookie in bookies}
        return {bookie: None if place is None else place.zone for bookie, place in places.items()}


class ZoneFile:
    """The file, read again when it has changed. A later version that is wrong is logged, and the earlier one holds."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigurationError."""
        self._path = path
        self._state = _state(path)
        self._map = _read(path)

    @property
    def map(self) -> ZoneMap:
        """What was read last: another object only if the zones differ."""
        return self._map

    def refresh(self) -> None:
        """Read the file if it was replaced or written."""
        state = _state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            found = _read(self._path)
        except ConfigurationError as error:
            logger.warning("zone_file_refused", extra={"error": str(error)})
            return
        if found != self._map:
            self._map = found


def bookie_address(bookie: str) -> str:
    """Returns the address in `host:port` as a number, as BookKeeper asks for it; the host if its name is not known."""
    host = bookie.rpartition(":")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def script_differences(script: Path, zones: ZoneMap, bookies: Iterable[str]) -> dict[str, str]:
    """Returns the bookies that AutoRecovery's script has in another zone than the zone file, and where.

    Raises ConfigurationError if the script fails.
    """
    addresses = {bookie: bookie_address(bookie) for bookie in bookies}
    if not addresses:
        return {}
    try:
        done = subprocess.run(  # noqa: S603 - the operator's own program, without a shell
            [str(script), *addresses.values()], capture_output=True, text=True, timeout=SCRIPT_SECONDS_MAX, check=True
        )
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"the zone script {script} fails: {error.stderr.strip() or error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"the zone script {script} cannot be run: {error}") from error
    answers = done.stdout.split()
    if len(answers) != len(addresses):
        raise ConfigurationError(f"the zone script {script} has {len(answers)} answers to {len(addresses)} addresses")
    return {
        bookie: answer
        for (bookie, address), answer in zip(addresses.items(), answers, strict=True)
        if answer != rack(zones.place(address))
    }


def rack(place: BookieZone | None) -> str:
    """Returns a place as the rack-aware policy, and AutoRecovery's script, name it."""
    return _UNKNOWN_RACK if place is None else f"/{place.zone}"


def _number(text: str, *, line: int) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigurationError(f"line {line}: {text!r} is not an address as 10.0.1.5") from None


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> ZoneMap:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"the zone file {path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigurationError(f"the zone file {path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return ZoneMap.parse(data.decode())
    except UnicodeDecodeError:
        raise ConfigurationError(f"the zone file {path} is not UTF-8") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"the zone file {path}: {error}") from error
