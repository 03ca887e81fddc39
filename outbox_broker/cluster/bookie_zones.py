"""Whether the zones of a cluster's bookies are enough, and known alike to nodes and to AutoRecovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox_broker.cluster.zone_file import ZONES_MIN, LastZone, ZoneMap, script_differences


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieZones:
    """`zones`: of each bookie that can be written to, None if it is unknown. `ensemble`: bookies of a ledger.
    `last_zone`: the operator's choice. `differences`: where AutoRecovery's script has those that it has elsewhere.
    """

    zones: Mapping[str, str | None]
    ensemble: int
    last_zone: LastZone
    differences: Mapping[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What an operator has to mend, a line each."""
        unknown = [bookie for bookie, zone in self.zones.items() if zone is None]
        lines = [f"bookie {bookie} is not in the zone file, and counts for no zone" for bookie in unknown]
        lines += [
            f"bookie {bookie} is at {place} for AutoRecovery: its zone script and the zone file differ"
            for bookie, place in self.differences.items()
        ]
        members = self._members()
        if len(members) < ZONES_MIN:
            left = f"zone {next(iter(members))} alone is left" if members else "no zone is left"
            is_stopped = self.last_zone is LastZone.STOP or not members
            effect = "writes are refused" if is_stopped else "all copies are in it"
            return [*lines, f"{left}: {effect} (last_zone = {self.last_zone})"]
        return lines + [self._loss(zone) for zone in members if not self._can_spare(zone)]

    def as_data(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return {"zones": dict(self.zones), "last_zone": self.last_zone, "warnings": self.warnings}

    def as_text(self) -> str:
        """Returns a line for each zone, and one for each warning."""
        lines = [f"zone {name}: {', '.join(bookies)}" for name, bookies in self._members().items()]
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])

    def _members(self) -> dict[str, list[str]]:
        names = sorted({zone for zone in self.zones.values() if zone is not None})
        return {name: [bookie for bookie, zone in self.zones.items() if zone == name] for name in names}

    def _can_spare(self, lost: str) -> bool:
        """Returns whether ledgers can still be made without a zone."""
        left = {zone: bookies for zone, bookies in self._members().items() if zone != lost}
        return len(left) >= self.last_zone.zones_min and sum(map(len, left.values())) >= self.ensemble

    def _loss(self, lost: str) -> str:
        left = [zone for zone in self.zones.values() if zone not in {None, lost}]
        wanted = f"{self.ensemble} bookies" + (f" in {ZONES_MIN} zones" if self.last_zone is LastZone.STOP else "")
        zones = len(set(left))
        return (
            f"zone {lost} cannot be spared: without it {len(left)} bookies in {zones} zone{'s' * (zones != 1)} are "
            f"left, and a ledger needs {wanted}"
        )


def compare_zones(
    bookies: Sequence[str], zones: ZoneMap, *, ensemble: int, last_zone: LastZone, script: Path | None
) -> BookieZones:
    """Returns the zones of bookies that can be written to, compared with the script's. Raises ConfigurationError."""
    differences = {} if script is None else script_differences(script, zones, bookies)
    return BookieZones(zones=zones.zones(bookies), ensemble=ensemble, last_zone=last_zone, differences=differences)
