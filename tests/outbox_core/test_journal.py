"""The records of the broker's actions: each is read as it was written."""

from __future__ import annotations

import pytest

from outbox_core.journal.journal import (
    Canceled,
    Declared,
    Died,
    Extended,
    Fired,
    Handed,
    HandedRun,
    Paused,
    Redriven,
    Requeued,
    Settled,
    Sought,
    decode_action,
    encode_record,
)

RECORDS = [
    Fired(topic="t", at_ms=1, entries=[(0, "m")]),
    Canceled(at_ms=1, ids=["m"], topics=[""]),
    Declared(topic="t", group="g", at_ms=1, position=0, settings={"ordered": True, "filter": None, "x": 1.5}),
    Handed(topic="t", group="g", at_ms=1, visible_at_ms=2, runs=[HandedRun(0, 500, 1, 1), HandedRun(509, 1, 2, 1)]),
    Settled(topic="t", group="g", at_ms=1, runs=[(0, 500), (509, 1)]),
    Requeued(topic="t", group="g", at_ms=1, entries=[(0, 500, 5, 1)]),
    Died(topic="t", group="g", at_ms=1, entries=[(0, 500, 16)], reason="why"),
    Requeued(topic="t", group="g", at_ms=1, entries=[(0, 1, 5, 1)], reason="why"),
    Extended(topic="t", group="g", at_ms=1, visible_at_ms=2, entries=[(0, 1)]),
    Redriven(topic="t", group="g", at_ms=1, entries=[(0, 1)]),
    Sought(topic="t", group="g", at_ms=1, position=0, generation=1),
    Paused(topic="t", group="g", at_ms=1, paused=True),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_action_is_read_as_it_was_written(record: object) -> None:
    assert decode_action(encode_record(record)) == record
