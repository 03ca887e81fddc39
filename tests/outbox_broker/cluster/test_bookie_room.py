"""When publishes are refused because bookies are full, and what is known where the bookies do not answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outbox_broker.cluster.bookie_room import BookieRoom, BookieSpace, RoomOptions, why_no_room
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.cluster.conftest import eventually

OPTIONS = RoomOptions(ensemble=3, usage_max=0.9, every_ms=100)
TOTAL = 1000


def space(number: int, used: int, *, zone: str | None = None, is_writable: bool = True) -> BookieSpace:
    """A bookie that has used so many thousandths of its disks."""
    return BookieSpace(
        bookie=f"10.0.0.{number}:1", is_writable=is_writable, free_bytes=TOTAL - used, total_bytes=TOTAL, zone=zone
    )


def test_there_is_room_while_the_bookies_of_a_ledger_are_below_the_limit() -> None:
    spaces = [space(1, 900), space(2, 0), space(3, 500), space(4, 999)]

    assert why_no_room(spaces, OPTIONS) is None


def test_the_reason_names_the_full_bookies_and_those_that_are_read_only_first() -> None:
    spaces = [space(1, 910), space(2, 0), space(3, 500, is_writable=False), space(4, 990)]

    assert why_no_room(spaces, OPTIONS) == (
        "1 of 4 bookies have room for new messages, and a ledger needs 3: 10.0.0.3:1 is 50% full, read-only, "
        "10.0.0.4:1 is 99% full, 10.0.0.1:1 is 91% full; what is scheduled can be sent and canceled; add bookies or "
        "disk space, and publishes are accepted again"
    )
    assert "none answers" in str(why_no_room([], OPTIONS))


def test_where_zones_matter_the_bookies_with_room_have_to_be_in_two_of_them() -> None:
    options = RoomOptions(ensemble=3, zones_min=2)
    spaces = [space(number, 100, zone="a") for number in range(3)]

    assert "a ledger needs 3 in 2 zones" in str(why_no_room([*spaces, space(4, 990, zone="b")], options))
    assert "a ledger needs 3 in 2 zones" in str(why_no_room([*spaces, space(4, 100)], options))
    assert why_no_room([*spaces, space(4, 100, zone="b")], options) is None


def test_publishes_are_refused_from_one_measurement_to_the_next_and_as_before_where_that_fails() -> None:
    answers: list[Sequence[BookieSpace] | None] = [None, [space(1, 950)], None, [space(one, 0) for one in range(3)]]
    asked = iter(answers)

    def measure() -> Sequence[BookieSpace]:
        if (answer := next(asked)) is None:
            raise StorageFailed("the bookies do not answer")
        return answer

    room = BookieRoom(measure, options=OPTIONS)

    assert [room.measure(), room.why_none()] == [False, None]
    assert room.measure()
    with pytest.raises(StorageFailed, match="have room for new messages"):
        room.require()
    assert not room.measure()
    with pytest.raises(StorageFailed, match="have room for new messages"):
        room.check_room()
    assert room.measure()
    room.require()
    assert room.why_none() is None


def test_the_thread_goes_on_after_a_defect_of_what_measures() -> None:
    counts: list[int] = []

    def measure() -> Sequence[BookieSpace]:
        counts.append(1)
        if len(counts) == 1:
            raise ValueError("a defect")
        return [space(1, 950)]

    room = BookieRoom(measure, options=OPTIONS)
    room.start()
    eventually(lambda: room.why_none() is not None, what="a measurement after the defect")
    room.stop()

    assert len(counts) >= 2
