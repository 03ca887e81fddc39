"""The charts of the report: what the labels of their axes say, and where each bucket is drawn."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from spark_reconcile.core.time_buckets import BUCKETS_MAX, TimeAxis
from spark_reconcile.report.charts import duration, flow_chart, heat_map, latency_bar, moment
from spark_reconcile.results.summary import Flow, Latency
from spark_reconcile.results.window_totals import Tally, trouble_of
from spark_reconcile.rules.verdict_rule import Scope, State

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOON_MS = 1_800_014_400_000
"""2027-01-15 12:00:00."""
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "labels"),
    [
        (NOON_MS, NOON_MS, ["2027-01-15 12:00:00", "200 ms each", "2027-01-15 12:00:00"]),
        (NOON_MS + 1, NOON_MS + 59_999, ["2027-01-15 12:00:00", "1.0 s each", "2027-01-15 12:01:00"]),
        (NOON_MS, NOON_MS + HOUR_MS, ["2027-01-15 12:00:00", "1.0 min each", "2027-01-15 13:01:00"]),
        (NOON_MS + 1, NOON_MS + 2 * DAY_MS, ["2027-01-15 12:00:00", "1.0 h each", "2027-01-17 13:00:00"]),
        (NOON_MS, NOON_MS + 59 * DAY_MS, ["2027-01-15 00:00:00", "24.0 h each", "2027-03-16 00:00:00"]),
        (NOON_MS, NOON_MS + 700 * DAY_MS, ["2027-01-14 00:00:00", "14.0 days each", "2028-12-28 00:00:00"]),
    ],
)
def test_the_labels_of_a_time_axis_are_its_ends_and_the_width_of_a_bucket(
    first_ms: int, last_ms: int, labels: list[str]
) -> None:
    axis = TimeAxis.over(first_ms, last_ms)
    flow = Flow(axis=axis, events=_events(stored={0: 1}), trouble={State.LOST: {0: 1}})

    assert axis.start_ms <= first_ms <= last_ms < axis.start_ms + axis.buckets * axis.width_ms
    assert axis.buckets <= BUCKETS_MAX + 1
    assert _texts(flow_chart(flow))[-3:] == labels
    assert _texts(heat_map(flow))[-3:] == labels


@pytest.mark.parametrize(
    ("most", "labels"),
    [
        (1, ["0", "1", "2"]),
        (3, ["0", "2", "4"]),
        (7, ["0", "4", "8"]),
        (95, ["0", "50", "100"]),
        (1_500, ["0", "1,000", "2,000"]),
        (11_000, ["0", "10k", "20k"]),
        (2_500_000, ["0", "2M", "4M"]),
        (3_000_000_000, ["0", "2G", "4G"]),
    ],
)
def test_the_labels_of_the_counts_are_nothing_half_and_a_round_number_above_the_most(
    most: int, labels: list[str]
) -> None:
    axis = TimeAxis.over(NOON_MS, NOON_MS + HOUR_MS)

    drawn = flow_chart(Flow(axis=axis, events=_events(stored={0: 1, 3: most}, acknowledged={60: 1}), trouble={}))

    assert _texts(drawn)[:3] == labels
    highest = max(float(bar.get("height", "")) for bar in _bars(drawn, "stored"))
    assert 190 / 2 - 0.1 <= highest <= 190


def test_each_bucket_is_drawn_at_its_time() -> None:
    axis = TimeAxis.over(NOON_MS, NOON_MS + HOUR_MS - 1)
    events = _events(stored={0: 5, 59: 10}, acknowledged={59: 10})

    flow = flow_chart(Flow(axis=axis, events=events, trouble={}))
    heat = heat_map(Flow(axis=axis, events=events, trouble={State.LATE: {30: 7}, State.DEAD: {59: 1}}))

    assert axis.buckets == 60
    first, last = _bars(flow, "stored")
    assert (_title(first), _title(last)) == ("2027-01-15 12:00:00: 5 stored", "2027-01-15 12:59:00: 10 stored")
    assert (first.get("height"), last.get("height")) == ("95.0", "190.0")
    left, right = (float(bar.get("x", "")) for bar in (first, last))
    assert left < 60 < 700 < right < 720
    (late,) = _bars(heat, f"t-{State.LATE}")
    assert _title(late) == f"2027-01-15 12:30:00: 7 {State.LATE}"
    assert [text for text in _texts(heat) if text in set(State)] == [State.LATE, State.DEAD]


def test_the_heat_map_counts_messages_and_deliveries_that_ask_for_a_look_in_the_buckets_of_their_hours() -> None:
    first, second = Tally(), Tally()
    for tally in (first, second):
        tally.add((Scope.MESSAGE, "order.paid", "", "stored"), 9)
        tally.add((Scope.MESSAGE, "order.paid", "", "in_grace"), 5)
        tally.add((Scope.DELIVERY, "order.paid", "mail", "done"), 9)
        tally.add((Scope.MESSAGE, "order.paid", "", "not_in_broker"), 2)
        tally.add((Scope.MESSAGE, "newsletter", "", "not_in_broker"), 1)
    second.add((Scope.DELIVERY, "order.paid", "mail", "dead"), 4)
    second.add((Scope.BUSINESS, "order.paid", "rule", "message_lost"), 2)
    second.add((Scope.BUSINESS, "order.paid", "rule", "no_key"), 1)
    results = {NOON_MS: first.as_result(), NOON_MS + 2 * HOUR_MS: second.as_result()}

    trouble = trouble_of(results, TimeAxis(NOON_MS - HOUR_MS, HOUR_MS, 4))

    assert trouble == {State.LOST: {1: 3, 3: 3}, State.DEAD: {3: 4}}


def test_nothing_is_drawn_of_nothing() -> None:
    axis = TimeAxis(0, 1, 1)

    assert flow_chart(Flow(axis=axis, events=_events(), trouble={})) == ""
    assert heat_map(Flow(axis=axis, events={}, trouble={State.LOST: {}})) == ""
    assert moment(0) == moment(None) == "-"


def test_the_longest_latency_is_at_the_end_of_its_scale_and_the_others_are_in_their_order() -> None:
    one = Latency(
        hop="commit to broker", topic="order.paid", of="", count=9, p50_ms=10, p95_ms=100, p99_ms=1_000,
        longest_ms=10_000,
    )  # fmt: skip

    drawn = ET.fromstring(_document(latency_bar(one, longest_ms=10_000)))
    shapes = {part.get("class"): part for part in drawn.iter() if part.get("class")}

    assert float(shapes["dot"].get("cx", "")) == 194.0
    places = [float(shapes["median"].get("x", "")), float(shapes["most"].get("x", "")), 194.0]
    assert places == sorted(places)


def test_a_duration_is_in_the_unit_that_reads_best() -> None:
    values = {999: "999 ms", 1_500: "1.5 s", 90_000: "1.5 min", 5_400_000: "1.5 h", 36 * HOUR_MS: "36.0 h"}

    assert {value: duration(value) for value in values} == values
    assert duration(60 * HOUR_MS) == "2.5 days"


def _events(
    stored: dict[int, int] | None = None, acknowledged: dict[int, int] | None = None
) -> dict[str, dict[int, int]]:
    return {"stored": stored or {}, "delivered": {}, "acknowledged": acknowledged or {}}


def _document(drawn: str) -> str:
    return str(drawn).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _texts(drawn: str) -> list[str]:
    return [part.text or "" for part in ET.fromstring(_document(drawn)).iter(f"{NAMESPACE}text")]


def _bars(drawn: str, style: str) -> list[ET.Element]:
    parts = ET.fromstring(_document(drawn)).iter(f"{NAMESPACE}rect")
    return [part for part in parts if part.get("class") == style]


def _title(part: ET.Element) -> str:
    (title,) = part.iter(f"{NAMESPACE}title")
    return title.text or ""
