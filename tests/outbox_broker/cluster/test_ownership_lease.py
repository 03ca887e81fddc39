"""How long a node may act without ZooKeeper, by which clock, and what ends it for good."""

from __future__ import annotations

import pytest

from outbox_broker.cluster.cluster_clock import ROUNDING_MS, ClusterClock, Contact
from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit
from outbox_core.common.clock import ManualClock, SystemClock


def test_a_lease_lasts_two_thirds_of_the_session_from_when_the_confirmed_write_was_sent(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    sent_ms = lease.now_ms()
    clock.advance(1_500)
    lease.extend(sent_ms)

    assert lease.left_ms() == 2_500
    clock.advance(2_500)
    assert lease.why_ended() is not None


def test_a_lease_without_a_confirmed_write_has_ended(clock: ManualClock) -> None:
    assert OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms).why_ended() is not None


def test_an_answer_that_comes_late_does_not_shorten_a_lease(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    clock.advance(1_000)
    lease.extend(1_000)
    lease.extend(0)

    assert lease.left_ms() == 4_000


def test_a_step_of_the_wall_clock_does_not_change_a_lease(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    lease.extend(0)
    clock.step_wall(-3_600_000)

    assert lease.left_ms() == 4_000


def test_a_session_that_moves_to_a_server_with_a_shorter_time_out_shortens_the_lease(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    lease.shorten(3_000)
    lease.extend(0)

    assert lease.left_ms() == 2_000


def test_a_permit_that_was_revoked_stays_so_although_the_lease_is_extended(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    lease.extend(0)
    permit = ShardPermit("0-0000", lease, epoch=1)
    permit.require()
    permit.revoke("it moves")
    lease.extend(1_000)

    with pytest.raises(NotOwner, match="it moves"):
        permit.require()


def test_permits_of_an_ended_session_stay_ended(clock: ManualClock) -> None:
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=clock.monotonic_ms)
    permit = ShardPermit("0-0000", lease, epoch=1)
    lease.end("the session ended")
    lease.extend(clock.monotonic_ms())

    assert permit.why_ended() == "the session ended"


def contact(clock: ManualClock, *, dated_ms: int) -> Contact:
    return Contact(
        sent_boot_ms=clock.monotonic_ms(), sent_wall_ms=clock.now_ms(), answered_wall_ms=clock.now_ms() + 20,
        dated_ms=dated_ms,
    )  # fmt: skip


@pytest.mark.parametrize("boot_us", range(0, 1_000, 100))
def test_whole_milliseconds_never_make_it_run_ahead_of_the_wall_clock(boot_us: int) -> None:
    """`boot_us`: by which the clocks' milliseconds do not begin together."""
    at_us = [0]

    def wall_ms() -> int:
        return at_us[0] // 1_000

    def clock_ms() -> int:
        return (boot_us + at_us[0]) // 1_000

    def ahead_ms(now_us: int) -> int:
        at_us[0] = now_us
        return cluster.now_ms() - wall_ms()

    cluster = ClusterClock(SystemClock(), clock_ms=clock_ms)
    cluster.correct(
        Contact(sent_wall_ms=wall_ms(), sent_boot_ms=clock_ms(), answered_wall_ms=wall_ms(), dated_ms=wall_ms())
    )
    found = [ahead_ms(now_us) for now_us in range(0, 5_000, 50)]

    assert max(found) <= 0
    assert min(found) >= -2 * ROUNDING_MS


def test_a_wall_clock_that_steps_after_a_contact_moves_nothing_forward(clock: ManualClock) -> None:
    cluster = ClusterClock(clock, clock_ms=clock.monotonic_ms)
    begin_ms = clock.now_ms()
    assert cluster.correct(contact(clock, dated_ms=begin_ms + 5)) is None
    clock.step_wall(3_600_000)
    clock.advance(400)

    assert cluster.now_ms() == begin_ms + 400 - ROUNDING_MS


@pytest.mark.parametrize(("step_ms", "word"), [(3_600_000, "ahead of"), (-3_600_000, "behind"), (1_100, "ahead of")])
def test_a_clock_that_differs_by_more_than_a_second_is_reported_and_not_followed(
    clock: ManualClock, step_ms: int, word: str
) -> None:
    cluster = ClusterClock(clock, clock_ms=clock.monotonic_ms)
    begin_ms = clock.now_ms()
    cluster.correct(contact(clock, dated_ms=begin_ms))
    clock.step_wall(step_ms)
    clock.advance(50)

    assert word in (cluster.correct(contact(clock, dated_ms=begin_ms + 50)) or "")
    assert cluster.now_ms() == begin_ms + 50 - ROUNDING_MS


def test_a_clock_that_differs_by_less_than_a_second_is_followed(clock: ManualClock) -> None:
    cluster = ClusterClock(clock, clock_ms=clock.monotonic_ms)

    assert cluster.correct(contact(clock, dated_ms=clock.now_ms() - 900)) is None
    assert cluster.correct(contact(clock, dated_ms=clock.now_ms() + 1_010)) is None
