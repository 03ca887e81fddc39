"""Has BookKeeper's client spread the copies of each entry over zones, as the zone file says.

Policies of BookKeeper decide. For LastZone.STOP that is ZoneawareEnsemblePlacementPolicy, strict. Without strictness it
takes bookies at random, whatever their zones; so for LastZone.GO_ON it is RackawareEnsemblePlacementPolicy, whose racks
are the zones: it prefers other zones, and settles for what is left.

Both ask for a bookie's place when it registers, and not again. So a change of the file is reported to them by the call
with which BookKeeper's own resolvers report one. Its ScriptBasedMapping would start a process for each question, and
keep the answers while the node runs.

AutoRecovery uses the rack-aware policy in both cases, zones as racks: the zone-aware one marks a ledger whose copies
are in one zone and cannot repair it (it does not implement replaceToAdherePlacementPolicy). The rack-aware one does not
serve LastZone.STOP: where a zone of three is lost, it replaces a bookie of an open ledger by none of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.zone_file import ZONES_MIN, BookieZone, LastZone, ZoneFile, rack
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_CLIENT: Final = "org.apache.bookkeeper.client"
_RESOLVER: Final = "org.apache.bookkeeper.net.DNSToSwitchMapping"
_UNKNOWN_ZONE: Final = "/default-zone/default-upgradedomain"
"""What the zone-aware policy calls the place of a bookie whose zone is not known. Such bookies are not used."""
_REFRESH_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneOptions:
    """Where the zones are said, and what becomes of writes in the last one."""

    file: ZoneFile
    last_zone: LastZone = LastZone.STOP


class ZonePlacement:
    """The zones of one client. watch() once the client is made; close() before it is closed."""

    def __init__(self, runtime: JavaRuntime, options: ZoneOptions) -> None:
        """Nothing is asked or started yet."""
        self._runtime = runtime
        self._options = options
        self._is_strict = options.last_zone is LastZone.STOP
        self._zones = options.file.map
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.resolver = runtime.implementation(
            _RESOLVER,
            {
                "resolve": self._resolve,
                "reloadCachedMappings": _ignore,
                "useHostName": lambda: False,
                "setBookieAddressResolver": _ignore,
            },
        )

    def configure(self, config: Any, *, write_quorum: int, ack_s_max: int) -> None:
        """Set the policy in a client's configuration. `ack_s_max`: how long an entry waits for a second zone."""
        name = "ZoneawareEnsemblePlacementPolicy" if self._is_strict else "RackawareEnsemblePlacementPolicy"
        config.setEnsemblePlacementPolicy(self._runtime.java_class(f"{_CLIENT}.{name}").class_)
        if self._is_strict:
            config.setMinNumZonesPerWriteQuorum(ZONES_MIN)
            config.setDesiredNumZonesPerWriteQuorum(write_quorum)
            config.setEnforceStrictZoneawarePlacement(True)
            # An entry is acknowledged when its copies are in two zones, and not when two copies are in one. It waits
            # for the other zone: two copies of three are no reason to replace the bookie that failed.
            config.setEnforceMinNumFaultDomainsForWrite(True)
            config.setAddEntryQuorumTimeout(ack_s_max)
        else:
            config.setMinNumRacksPerWriteQuorum(ZONES_MIN)
            config.setEnforceMinNumRacksPerWriteQuorum(False)

    def watch(self, client: Any) -> None:
        """Report changes of the file to a client's policy from now on."""
        policy = _Policy(self._runtime, client, is_strict=self._is_strict)
        self._thread = threading.Thread(target=self._refresh, args=(policy,), name="zones", daemon=True)
        self._thread.start()

    def count(self, bookies: Iterable[str]) -> int:
        """Returns how many zones bookies are in."""
        return len({zone for zone in self._zones.zones(bookies).values() if zone is not None})

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _refresh(self, policy: _Policy) -> None:
        """Place the bookies anew when the file changes, and when one came or went: the policy may remember the place of
        one that was away while the file changed.
        """
        bookies = policy.bookies()
        while not self._stopping.wait(_REFRESH_S):
            try:
                self._options.file.refresh()
                present = policy.bookies()
                if present != bookies or self._options.file.map is not self._zones:
                    self._place_anew(policy)
                    bookies = present
            except Exception as error:  # noqa: BLE001 - the thread's boundary, also for exceptions of Java; tried again
                logger.warning("zone_change_failed", extra={"error": str(error)})

    def _place_anew(self, policy: _Policy) -> None:
        zones = self._options.file.map
        # A ledger that is made meanwhile sees all bookies at their former places, or all at their new ones.
        with policy:
            is_changed, self._zones = zones is not self._zones, zones
            policy.place_bookies()
        if is_changed:
            logger.info("zones_changed", extra={"addresses": len(zones.places)})

    def _resolve(self, names: Iterable[Any]) -> Any:
        places = self._runtime.java_class("java.util.ArrayList")()
        for name in names:
            places.add(self._runtime.string(self._location(self._zones.place(str(name)))))
        return places

    def _location(self, place: BookieZone | None) -> str:
        if not self._is_strict:
            return rack(place)
        return _UNKNOWN_ZONE if place is None else f"/{place.zone}/{place.domain}"


class _Policy:
    """The placement policy of a client, which no public method returns; as a context, its lock.

    The names of its fields are those of BookKeeper 4.18, the only version that JavaRuntime starts.
    """

    def __init__(self, runtime: JavaRuntime, client: Any, *, is_strict: bool) -> None:
        self._runtime = runtime
        self._policy = self._field("BookKeeper", "placementPolicy", client)
        self._lock = self._field("TopologyAwareEnsemblePlacementPolicy", "rwLock", self._policy).writeLock()
        self._known = self._field("TopologyAwareEnsemblePlacementPolicy", "knownBookies", self._policy)
        self._remembered = (
            self._field("ZoneawareEnsemblePlacementPolicyImpl", "address2NodePlacement", self._policy)
            if is_strict
            else None
        )

    def __enter__(self) -> None:
        self._lock.lock()

    def __exit__(self, *_: object) -> None:
        self._lock.unlock()

    def bookies(self) -> frozenset[str]:
        """Returns the bookies that can be written to."""
        with self:
            bookies = self._bookies()
        return frozenset(str(bookie) for bookie in bookies)

    def place_bookies(self) -> None:
        """Have the place of each bookie asked for again. The caller holds the lock."""
        if self._remembered is not None:
            # The zone-aware policy keeps the zones that it compares apart from its tree of bookies, and never renews
            # them: it would look for a second zone where there is none, and fail with "not enough bookies".
            self._remembered.clear()
        self._policy.onBookieRackChange(self._bookies())

    def _bookies(self) -> Any:
        return self._runtime.java_class("java.util.ArrayList")(self._known.keySet())

    def _field(self, owner: str, name: str, instance: Any) -> Any:
        field = self._runtime.java_class(f"{_CLIENT}.{owner}").class_.getDeclaredField(name)
        field.setAccessible(True)
        return field.get(instance)


def _ignore(*_arguments: object) -> None:
    pass
