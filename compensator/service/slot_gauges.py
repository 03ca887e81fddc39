"""Gauges of the slots of timing stores that this instance serves. Labels are bounded by the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from outbox_core.messages.timing_port import SlotStatus

_LABELS: Final = ("source", "slot")


class SlotGauges:
    """Whether a slot answers, its timers, and those of them that are due. For one thread a source at a time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Gauge(
            "outbox_timing_store_slot_answers", "1 where this slot of the timing store answers.", _LABELS,
            registry=registry,
        )  # fmt: skip
        self._timers = Gauge("outbox_timing_store_slot_timers", "Timers of a slot.", _LABELS, registry=registry)
        self._due = Gauge(
            "outbox_timing_store_slot_due_timers", "Timers of a slot that are due.", _LABELS, registry=registry
        )
        self._shown: dict[str, set[int]] = {}

    def record(self, source: str, statuses: Sequence[SlotStatus]) -> None:
        """Set the series of these slots of a source, and remove those of its others; of a slot that does not answer
        only that is shown.
        """
        answered = {status.slot: status.figures for status in statuses if status.figures is not None}
        for slot in self._shown.get(source, set()) - answered.keys():
            for gauge in (self._answers, self._timers, self._due):
                gauge.remove_by_labels({"source": source, "slot": str(slot)})
        self._shown[source] = {status.slot for status in statuses}
        for slot in self._shown[source]:
            self._answers.labels(source, slot).set(1 if slot in answered else 0)
        for slot, figures in answered.items():
            self._timers.labels(source, slot).set(figures.timers)
            self._due.labels(source, slot).set(figures.due)
