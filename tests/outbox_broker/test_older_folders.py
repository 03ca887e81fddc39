"""A data folder that the version before wrote, with ids in its actions: it is opened, and gone on with.

`version-3.tar.xz` was written by that code: 60 messages m0 to m59 on `orders`, and of the group `billing` acked, given
back, extended, dead and redriven ones, over checkpoints; of the group `ordered` m0 acked and three in hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.journal.journal import segment_paths
from tests.outbox_broker.older_folder import unpack

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
type_of_open = Callable[..., Engine]


@pytest.fixture
def clock() -> ManualClock:
    """Set to when the folder was written."""
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpack(Path(__file__).parent / "version-3.tar.xz", tmp_path)


def damage_checkpoints(folder: Path) -> None:
    for path in segment_paths(folder / "actions")[1:]:
        data = bytearray(path.read_bytes())
        data[data.index(b"checkpoint") + 30] ^= 1
        path.write_bytes(data)


def pull_ids(engine: Engine, group: str = GROUP) -> list[str]:
    found = engine.pull(TOPIC, group, max_messages=1_000)
    engine.ack([one.receipt for one in found])
    return [one.id for one in found]


@pytest.mark.parametrize("harm", [lambda _: None, damage_checkpoints], ids=["from a checkpoint", "from the beginning"])
def test_what_the_version_before_wrote_goes_on_where_it_was(
    open_engine: type_of_open, folder: Path, clock: ManualClock, harm: Callable[[Path], None]
) -> None:
    harm(folder)
    engine = open_engine()

    figures = engine.group_figures(TOPIC, GROUP)
    assert (figures["in_flight"], figures["dead"], figures["position"], figures["backlog"]) == (7, 2, 20, 42)
    letters = [(one.id, one.reason, one.attempts, one.body) for one in engine.dead(TOPIC, GROUP)[0]]
    assert letters == [("m5", "broken", 2, b"m5"), ("m11", "bad", 2, b"m11")]
    receipts = [f"orders/billing/{number}.4294967297.0" for number in (13, 10, 9)]
    assert engine.ack(receipts) == ["acked", "already_acked", "acked"]
    assert pull_ids(engine) == ["m4", *(f"m{number}" for number in range(20, 60))]
    assert pull_ids(engine, "ordered")[0] == "m4"
    clock.advance(5_000)
    assert sorted(pull_ids(engine)) == ["later", "m8"]
    clock.advance(HOUR_MS)
    assert set(pull_ids(engine)) == {"m6", "m7", "m15", "m17", "m19"}


def test_actions_of_this_version_begin_a_segment_that_the_version_before_refuses(
    open_engine: type_of_open, folder: Path
) -> None:
    before = segment_paths(folder / "actions")

    engine = open_engine()
    engine.ack([one.receipt for one in engine.pull(TOPIC, GROUP)])
    engine.close()

    [path] = [one for one in segment_paths(folder / "actions") if one not in before]
    headers = [journal.read_segment(one)[0].version for one in (before[-1], path)]
    assert headers == [3, journal.VERSION]
    engine = open_engine()
    assert engine.group_figures(TOPIC, GROUP)["backlog"] == 1, "what is put off"
