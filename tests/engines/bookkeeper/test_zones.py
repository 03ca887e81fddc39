"""Bookies in zones: one zone is lost and comes back, and the zone file changes while clients run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_broker.cluster.bookie_list import read_bookies
from outbox_broker.cluster.bookie_zones import compare_zones
from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE, JavaRuntime
from outbox_broker.cluster.bookkeeper.zone_placement import ZoneOptions
from outbox_broker.cluster.zone_file import LastZone, ZoneFile
from outbox_broker.segments.ledgers import LedgerFailed
from outbox_core.zookeeper.zookeeper_session import SessionOptions
from tests.engines.bookkeeper.client import PASSWORD, LedgerClient, connected
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.engines.java_server import java_home
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.delay_history import Fate
from tests.outbox_broker.cluster.delay_load import PENDING, DelayLoad
from tests.outbox_broker.cluster.running_cluster import RunningCluster

BOOKIES = 5
IN_ZONE_A = 2
"""Of the bookies; the other three are in zone b, where a ledger fits without zone a."""
ENSEMBLE = 3
MESSAGES = 150
"""Acknowledged at least before, during and after the loss of a zone."""
ZONE_OF = Path(__file__).parents[3] / "deploy" / "bookkeeper" / "zone-of"
OPTIONS = SessionOptions(session_ms=30_000, request_ms_max=60_000)


@dataclass(frozen=True, slots=True)
class ZonedCluster:
    """Servers in two zones, of which one runs AutoRecovery with the script mapping."""

    servers: BookKeeperCluster
    file: Path
    script: Path
    client: LedgerClient

    @property
    def zone_a(self) -> list[str]:
        return self.servers.bookie_ids[:IN_ZONE_A]

    @property
    def zone_b(self) -> list[str]:
        return self.servers.bookie_ids[IN_ZONE_A:]

    def zones(self, ledger_id: int) -> set[str | None]:
        """The zones of the bookies that the end of a ledger is on."""
        return set(ZoneFile(self.file).map.zones(self.client.ensembles(ledger_id)[-1]).values())

    def writable(self) -> tuple[str, ...]:
        return read_bookies(self.servers.metadata_uri, options=OPTIONS, ensemble=ENSEMBLE).writable

    def warnings(self) -> list[str]:
        """What `status` warns of, where writes stop in the last zone."""
        zones, stop = ZoneFile(self.file).map, LastZone.STOP
        return compare_zones(
            self.writable(), zones, ensemble=ENSEMBLE, last_zone=stop, script=self.script
        ).warnings  # fmt: skip


def zone_lines(**zones: list[str]) -> str:
    """A zone file, from the bookies of each zone."""
    return "".join(f"{bookie.rpartition(':')[0]} {zone}\n" for zone, bookies in zones.items() for bookie in bookies)


@pytest.fixture(scope="module")
def standing(jars: Path, jvm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZonedCluster]:
    """The servers of the tests here."""
    folder = tmp_path_factory.mktemp("zones")
    file, script = folder / "zones", folder / "zone-script"

    def settings(number: int, _host: str) -> dict[str, object]:
        return _recovery_settings(script) if number == BOOKIES else {}

    servers = BookKeeperCluster(jars=jars, folder=folder, bookies=BOOKIES, bookie_settings=settings)
    file.write_text(zone_lines(a=servers.bookie_ids[:IN_ZONE_A], b=servers.bookie_ids[IN_ZONE_A:]))
    script.write_text(f'#!/bin/sh\nOUTBOX_ZONES="{file}" exec "{ZONE_OF}" "$@"\n')
    script.chmod(0o755)
    try:
        servers.start()
        with connected(servers.metadata_uri) as client:
            yield ZonedCluster(servers, file, script, client)
    finally:
        servers.stop()


def _recovery_settings(script: Path) -> dict[str, object]:
    """As docs/guides/delay-cluster.md has them, with shorter intervals."""
    return {
        "autoRecoveryDaemonEnabled": "true", "lostBookieRecoveryDelay": 0, "auditorPeriodicBookieCheckInterval": 5,
        "openLedgerRereplicationGracePeriod": 2_000, "rwRereplicateBackoffMs": 500,
        "lockReleaseOfFailedLedgerGracePeriod": 1_000, "auditorPeriodicPlacementPolicyCheckInterval": 2,
        "ensemblePlacementPolicy": "org.apache.bookkeeper.client.RackawareEnsemblePlacementPolicy",
        "reppDnsResolverClass": "org.apache.bookkeeper.net.ScriptBasedMapping", "networkTopologyScriptFileName": script,
        "minNumRacksPerWriteQuorum": 2, "repairedPlacementPolicyNotAdheringBookieEnabled": "true",
    }  # fmt: skip


@pytest.fixture
def zoned(standing: ZonedCluster) -> ZonedCluster:
    """The same, with all bookies."""
    standing.servers.check_alive()
    standing.servers.restore()
    return standing


@pytest.fixture
def opened(zoned: ZonedCluster, runtime: JavaRuntime) -> Iterator[Callable[..., JavaLedgers]]:
    """Make a client of ours."""
    with ExitStack() as stack:

        def open_client(last_zone: LastZone, *, file: Path = zoned.file) -> JavaLedgers:
            options = BookKeeperOptions(
                password=PASSWORD, zones=ZoneOptions(file=ZoneFile(file), last_zone=last_zone),
                request_s_max=4, operation_ms_max=60_000, session_ms=30_000,
            )  # fmt: skip
            ledgers = JavaLedgers(runtime, zoned.servers.metadata_uri, options=options)
            stack.callback(ledgers.close)
            return ledgers

        yield open_client


def written(ledgers: JavaLedgers) -> int:
    """Write a closed ledger of ten entries; returns its id."""
    writer = ledgers.begin_create({})()
    for _ in range(10):
        writer.append(b"entry")
    writer.confirm(10)
    writer.begin_close()()
    return writer.ledger_id


def in_one_zone(ledgers: JavaLedgers) -> set[int]:
    """The ledgers whose copies are in one zone, as a sweep counts them."""
    return {ledger_id for ledger_id, _ in ledgers.find_in_one_zone()}


def test_without_a_zone_writes_stop_or_go_on_as_chosen_and_with_it_all_copies_are_spread_again(
    zoned: ZonedCluster, opened: Callable[..., JavaLedgers]
) -> None:
    stopping, going = opened(LastZone.STOP), opened(LastZone.GO_ON)
    before = written(stopping)
    assert all(zoned.zones(written(ledgers)) == {"a", "b"} for ledgers in (stopping, going) for _ in range(10))
    writers = [ledgers.begin_create({})() for ledgers in (stopping, going)]
    for bookie in zoned.zone_a:
        zoned.servers.kill9(bookie)

    for writer in writers:
        writer.append(b"one zone is left")
    with pytest.raises(LedgerFailed):
        writers[0].confirm(1)
    writers[1].confirm(1)
    eventually(lambda: set(zoned.writable()) == set(zoned.zone_b), what="zone a is gone")
    during = written(going)
    with pytest.raises(LedgerFailed, match="`outbox delay status` shows the bookies of each zone"):
        written(stopping)
    assert zoned.zones(during) == {"b"}
    assert during in in_one_zone(going)
    assert zoned.warnings() == ["zone b alone is left: writes are refused (last_zone = stop)"]
    eventually(lambda: zoned.zones(before) == {"b"}, what="the lost copies were made anew in zone b")

    zoned.servers.restore()
    wait_until_ledgers_can_be_made(stopping)
    after = written(stopping)
    eventually(lambda: zoned.zones(during) == {"a", "b"}, what="what was written meanwhile has a copy in zone a")
    eventually(lambda: zoned.zones(before) == {"a", "b"}, what="what was repaired meanwhile has a copy in zone a")

    assert zoned.zones(after) == {"a", "b"}
    assert not in_one_zone(going) & {before, during, after}
    for bookie in zoned.zone_b:
        zoned.servers.kill9(bookie)
    assert [stopping.read(ledger, 0, 9) for ledger in (before, during, after)] == [[b"entry"] * 10] * 3


@pytest.mark.parametrize("last_zone", list(LastZone))
def test_a_changed_zone_file_holds_for_the_next_ledgers(
    last_zone: LastZone, zoned: ZonedCluster, opened: Callable[..., JavaLedgers], tmp_path: Path
) -> None:
    first, second, *others = zoned.servers.bookie_ids
    file = tmp_path / "zones"
    file.write_text(zone_lines(a=[first], b=[second, *others]))
    ledgers = opened(last_zone, file=file)

    def alone_in_a_zone(bookie: str) -> bool:
        """Whether each of some ledgers has a copy on a bookie."""
        writers = [ledgers.begin_create({})() for _ in range(10)]
        made = [zoned.client.ensembles(writer.ledger_id)[-1] for writer in writers]
        for writer in writers:
            writer.begin_close()()
        # AutoRecovery would try to repair them, one after the other, when another test kills their bookies.
        ledgers.delete([writer.ledger_id for writer in writers])
        return all(bookie in ensemble for ensemble in made)

    # On a busy machine a bookie may be passed over for a while, and with go-on no copy is in its zone then.
    eventually(lambda: alone_in_a_zone(first), what="ledgers are placed by the file")
    file.write_text("this is no zone file\n")
    file.write_text(zone_lines(a=[second], b=[first, *others]))
    eventually(lambda: all(alone_in_a_zone(second) for _ in range(2)), what="ledgers follow the file")


def test_status_shows_the_zones_and_compares_them_with_the_script_of_autorecovery(
    zoned: ZonedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = zoned.servers.bookie_ids
    file = tmp_path / "zones"
    file.write_text(zone_lines(a=[second], b=[first], c=others))
    names = {"LEDGERS_URI": zoned.servers.metadata_uri, "ZONE_FILE": str(file), "ZONE_SCRIPT": str(zoned.script)}
    for name, value in names.items():
        monkeypatch.setenv(f"OUTBOX_CLUSTER__{name}", value)

    with ExitStack() as stack:
        running = RunningCluster(zoned.servers.zookeeper_hosts, tmp_path, stack)
        shown = running.status()["bookies"]["zones"]
        text = running.command("status").stdout
        monkeypatch.setenv("OUTBOX_CLUSTER__ZONE_FILE", str(tmp_path / "missing"))
        broken = running.status()["bookies"]

    assert "cannot be read" in broken["zones"]["error"]
    assert len(broken["writable"]) == BOOKIES
    assert shown["zones"] == {first: "b", second: "a", **dict.fromkeys(others, "c")}
    assert [warning.split()[:2] for warning in shown["warnings"][:-1]] == [["bookie", one] for one in (first, *others)]
    assert shown["warnings"][-1].startswith("zone c cannot be spared: without it 2 bookies")
    assert f"WARNING: bookie {first} is at /a for AutoRecovery" in text
    assert f"zone b: {first}" in text


def test_nodes_lose_nothing_with_a_zone_of_three_and_publish_on_without_it(
    zoned: ZonedCluster, jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    monkeypatch.setenv("JAVA_HOME", str(java_home()))
    file = tmp_path / "zones"
    file.write_text(zone_lines(a=zoned.zone_a, b=zoned.zone_b[:2], c=zoned.zone_b[2:]))
    settings = {"ledgers_uri": zoned.servers.metadata_uri, "zone_file": str(file), "last_zone": "stop"}
    with ExitStack() as stack:
        running = RunningCluster(zoned.servers.zookeeper_hosts, tmp_path, stack, settings=settings)
        target, url = running.recorded_target()
        nodes = [running.node(name, target=url) for name in ("n1", "n2")]
        running.wait_until_served(*nodes)
        load = DelayLoad([node.url for node in nodes], target, prefix="zone")
        load.go_on(MESSAGES)

        for bookie in zoned.zone_a:
            zoned.servers.kill9(bookie)
        eventually(lambda: set(zoned.writable()) == set(zoned.zone_b), what="zone a is gone")
        load.go_on(MESSAGES)
        zoned.servers.restore()
        load.go_on(MESSAGES)
        running.wait_until_served(*nodes)
        verdict = load.finish()
        shown = running.sweep("--dry-run")

    print(verdict)
    assert not verdict.violations
    assert verdict.acknowledged == sum(verdict.fates.values()) >= 3 * MESSAGES
    assert verdict.fates[Fate.PENDING] == PENDING
    assert verdict.fates[Fate.CANCELED] > 0
    assert shown["in_one_zone"] == 0
    assert shown["named"] > 0
