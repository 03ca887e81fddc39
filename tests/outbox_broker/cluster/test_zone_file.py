"""The zone file: what it says, what is wrong in it, and that the script of AutoRecovery says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_broker.cluster.bookie_zones import BookieZones, compare_zones
from outbox_broker.cluster.zone_file import BookieZone, LastZone, ZoneFile, ZoneMap, script_differences
from outbox_core.common.errors import ConfigurationError

ZONE_OF = Path(__file__).parents[3] / "deploy" / "bookkeeper" / "zone-of"
TEXT = "# bookies\n10.0.1.5 a  # first\n\n10.0.2.5\tb rack-7\n10.0.2.6 b\n10.0.3.5 c\n"


def warnings(*bookies: str, last_zone: LastZone, ensemble: int = 3) -> list[str]:
    """Of bookies in the zones of TEXT that can be written to."""
    shown = compare_zones(bookies, ZoneMap.parse(TEXT), ensemble=ensemble, last_zone=last_zone, script=None)
    return shown.warnings


def test_a_bookie_is_a_domain_of_its_own_unless_the_file_names_one() -> None:
    zones = ZoneMap.parse(TEXT)

    assert [zones.place(f"10.0.{end}") for end in ("1.5", "2.5", "9.9")] == [
        BookieZone("a", "10.0.1.5"), BookieZone("b", "rack-7"), None
    ]  # fmt: skip
    assert zones.zones(["10.0.1.5:3181", "10.0.9.9:3181"]) == {"10.0.1.5:3181": "a", "10.0.9.9:3181": None}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10.0.1.5\n", "line 1 is not `address zone"),
        ("\n10.0.1.5 a b c\n", "line 2 is not `address zone"),
        ("10.0.1.5 /a/b\n", "line 1 is not `address zone"),
        ("bookie-1 a\n", "line 1: 'bookie-1' is not an address"),
        ("10.0.1.5 a\n10.0.1.5 b\n", "line 2 names 10.0.1.5 again"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "zones"
    file.write_text(text)

    with pytest.raises(ConfigurationError, match=problem):
        ZoneFile(file)


def test_a_changed_file_is_read_again_and_a_wrong_one_leaves_the_zones_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "zones"
    path.write_text("10.0.1.5 a\n")
    file = ZoneFile(path)
    before = file.map

    path.write_text("10.0.1.5   a  # the same\n")
    file.refresh()
    assert file.map is before
    path.write_text("nothing of the kind\n")
    file.refresh()
    assert file.map is before
    path.unlink()
    file.refresh()
    assert file.map is before
    path.write_text("10.0.1.5 b2\n")
    file.refresh()
    assert file.map.place("10.0.1.5") == BookieZone("b2", "10.0.1.5")


def test_the_script_reads_the_same_file_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "zones"
    file.write_text(TEXT)
    monkeypatch.setenv("OUTBOX_ZONES", str(file))
    bookies = ["10.0.1.5:1", "10.0.2.5:1", "10.0.2.6:1", "10.0.9.9:1"]

    assert script_differences(ZONE_OF, ZoneFile(file).map, bookies) == {}
    assert script_differences(ZONE_OF, ZoneMap.parse("10.0.1.5 other\n10.0.2.5 b rack-8\n"), bookies) == {
        "10.0.1.5:1": "/a", "10.0.2.6:1": "/b"
    }  # fmt: skip


def test_a_script_that_fails_is_named_with_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_ZONES", str(tmp_path / "missing"))

    with pytest.raises(ConfigurationError, match=r"zone script .*zone-of fails: .*name the zone file in OUTBOX_ZONES"):
        script_differences(ZONE_OF, ZoneMap(), ["10.0.1.5:1"])
    with pytest.raises(ConfigurationError, match=r"zone script .*none cannot be run"):
        script_differences(tmp_path / "none", ZoneMap(), ["10.0.1.5:1"])


def test_unknown_bookies_and_a_last_zone_are_shown_with_the_operators_choice() -> None:
    assert warnings("10.0.1.5:1", "10.0.2.5:1", "10.0.2.6:1", "10.0.3.5:1", last_zone=LastZone.GO_ON) == [
        "zone b cannot be spared: without it 2 bookies in 2 zones are left, and a ledger needs 3 bookies"
    ]
    assert warnings("10.0.2.5:1", "10.0.9.9:1", last_zone=LastZone.GO_ON) == [
        "bookie 10.0.9.9:1 is not in the zone file, and counts for no zone",
        "zone b alone is left: all copies are in it (last_zone = go-on)",
    ]
    assert warnings("10.0.2.5:1", last_zone=LastZone.STOP) == [
        "zone b alone is left: writes are refused (last_zone = stop)"
    ]
    nothing = BookieZones(zones={}, ensemble=3, last_zone=LastZone.GO_ON)
    assert "no zone is left: writes are refused" in nothing.as_text()


def test_a_zone_without_which_no_ledger_can_be_made_is_shown() -> None:
    three = ("10.0.1.5:1", "10.0.2.5:1", "10.0.2.6:1", "10.0.3.5:1")
    two = ("10.0.1.5:1", "10.0.2.5:1", "10.0.2.6:1")

    assert warnings(*three, last_zone=LastZone.STOP, ensemble=2) == []
    assert warnings(*two, last_zone=LastZone.GO_ON, ensemble=1) == []
    assert [line[:6] for line in warnings(*two, last_zone=LastZone.STOP, ensemble=1)] == ["zone a", "zone b"]
    assert "in 1 zone are left, and a ledger needs 3 bookies in 2 zones" in warnings(*two, last_zone=LastZone.STOP)[0]
