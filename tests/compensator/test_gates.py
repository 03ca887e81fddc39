"""Gates: each change of a breaker's state is told to listeners and logged, by the call that caused it."""

from __future__ import annotations

import logging
from random import Random

import pytest

from compensator.admission.circuit_breaker import BreakerOptions, BreakerState
from compensator.admission.gate import AdmissionGate, Gates
from compensator.core.batch_totals import BatchTotals
from outbox_core import ManualClock
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerUnavailable

PROBE_MS = 1_000
OPTIONS = BreakerOptions(
    backoff=Backoff(initial_ms=PROBE_MS, max_ms=8_000, jitter=0), probe_rows=5, drain_step_ms=1_000, drain_steps=2
)
OUTAGE = BatchTotals(claimed=1, outage=BrokerUnavailable("down"))


def settle(gate: AdmissionGate, report: BatchTotals | None) -> None:
    """Claim and send one batch."""
    permit = gate.permit(10)
    assert permit is not None
    gate.settle(permit, report)


def run_outage(gates: Gates, clock: ManualClock) -> None:
    """An outage with a probe that fails, and one that succeeds, until the breaker is closed again."""
    gate = gates.gate("broker")
    settle(gate, OUTAGE)
    clock.advance(PROBE_MS)
    settle(gate, OUTAGE)
    clock.advance(2 * PROBE_MS)
    settle(gate, BatchTotals(claimed=5, accepted=5))
    clock.advance(OPTIONS.drain_steps * OPTIONS.drain_step_ms)
    settle(gate, BatchTotals(claimed=5, accepted=5))


def test_listeners_get_each_state_of_an_outage_and_may_ask_the_gates() -> None:
    clock = ManualClock()
    gates = Gates(clock=clock, random=Random(0), breaker=OPTIONS)
    told: list[tuple[str, BreakerState]] = []
    asked: list[BreakerState] = []

    def listener(broker: str, state: BreakerState) -> None:
        told.append((broker, state))
        asked.append(gates.states[broker])

    gates.listen(listener)
    run_outage(gates, clock)

    expected = ["open", "half_open", "open", "half_open", "closing", "closed"]
    assert told == [("broker", BreakerState(state)) for state in expected]
    assert asked == [state for _, state in told]


def test_the_end_of_an_outage_is_a_warning_as_its_beginning_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    clock = ManualClock()

    run_outage(Gates(clock=clock, random=Random(0), breaker=OPTIONS), clock)

    states = [vars(one)["state"] for one in caplog.records if one.getMessage().startswith("breaker_changed")]
    reasons = [vars(one)["reason"] for one in caplog.records if one.getMessage().startswith("breaker_changed")]
    assert states == ["open", "open", "closing", "closed"]
    assert reasons[-2:] == ["the broker answers"] * 2
    assert reasons[0] == "down"
