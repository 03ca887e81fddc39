"""What /metrics says: names, labels and reasons as dashboards expect them, in bounds whatever clients send."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
import requests

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.http.broker_metrics import BrokerMetrics
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.message_log import flip_footer, footers_of, message_segments
from tests.outbox_broker.mounts import small_disk
from tests.outbox_broker.test_full_disk import MIB, fill

TOPIC, GROUP = "orders", "billing"
HORIZONS = ("1m", "1h", "1d", "30d", "inf")
BOUNDS = ("0.001", "0.002", "0.05", "0.1", "+Inf")


def shown(engine: Engine, *, series_max: int = 100) -> dict[str, float]:
    """Samples by name and labels, as they are in the text."""
    text, _ = BrokerMetrics(lambda: ServicePorts.of(engine), series_max=series_max).exposition("")
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def until_fired(engine: Engine) -> None:
    """Wait for the round in which another thread, the timer's, fires what is due: it can be pulled before that ends."""
    engine.publisher.cancel([])


def publish(engine: Engine, *ids: str, topic: str = TOPIC) -> None:
    engine.publisher.publish([Message(id=one, topic=topic, body=b"", headers={"type": one[0]}) for one in ids])


def test_dead_letters_are_counted_by_what_made_them(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, "a", "b", "c")
    [refused], _ = (engine.puller.pull(TOPIC, GROUP, max_messages=1, invisible_ms=50) for _ in range(2))
    engine.settler.nack([refused.receipt])
    clock.advance(50)
    assert [one.id for one in engine.puller.pull(TOPIC, GROUP)] == ["c"]
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=3))
    for _ in range(2):
        clock.advance(3_600_000)
        engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)], delay_ms=0)
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.puller.pull(TOPIC, GROUP)

    found = {
        reason: shown(engine).get(
            f'broker_messages_dead_lettered_total{{group="{GROUP}",reason="{reason}",topic="{TOPIC}"}}'
        )
        for reason in ("rejected", "expired", "delivery_limit")
    }

    assert found == {"rejected": 1, "expired": 1, "delivery_limit": 1}


def test_a_scrape_shows_the_disk_of_the_data_folder_and_whether_publishes_are_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path, size_mb=12) as disk:
        with closing(Engine.open(disk / "data", options=EngineOptions(reserve_bytes=MIB))) as engine:
            roomy = shown(engine)
        fill(disk)
        with closing(Engine.open(disk / "data", options=EngineOptions(reserve_bytes=MIB))) as engine:
            full = shown(engine)

    assert roomy["broker_disk_size_bytes"] == full["broker_disk_size_bytes"] == 12 * MIB
    assert full["broker_disk_free_bytes"] <= MIB < roomy["broker_disk_free_bytes"] < 12 * MIB
    assert (roomy["broker_publishes_refused"], full["broker_publishes_refused"]) == (0, 1)


def test_refused_messages_are_counted_by_reason_and_those_for_no_topic_under_one_name(
    open_engine: Callable[..., Engine], clock: ManualClock
) -> None:
    engine = open_engine(topics_max=1)
    publish(engine, "a")

    far_ms = clock.now_ms() + DELAY_ACCEPTED_MS_MAX + 1
    engine.publisher.publish([Message(id="far", topic=TOPIC, body=b"", deliver_at_ms=far_ms)])
    for number in range(5):
        publish(engine, f"x{number}", topic=f"invented-{number}")

    samples = shown(engine)
    assert samples[f'broker_messages_rejected_total{{reason="delay",topic="{TOPIC}"}}'] == 1
    assert samples['broker_messages_rejected_total{reason="topics_max",topic="~others"}'] == 5
    assert not [name for name in engine.counters() if "invented" in name[1]], "nobody makes figures grow by names"


def test_filtered_messages_are_counted(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(filter="type = 'a'"))
    publish(engine, "a1", "b1", "b2")
    engine.puller.pull(TOPIC, GROUP)
    engine.puller.pull(TOPIC, GROUP)

    assert shown(engine)[f'broker_messages_filtered_total{{group="{GROUP}",topic="{TOPIC}"}}'] == 2


def test_damage_is_shown_before_it_is_met_and_once_it_is(open_engine: Callable[..., Engine], folder: Path) -> None:
    whole = open_engine()
    publish(whole, "a", "b-damaged", "c")
    before = shown(whole)
    [segment] = message_segments(folder)
    data = bytearray(segment.read_bytes())
    data[data.index(b"b-damaged")] ^= 1
    segment.write_bytes(data)

    engine = open_engine()
    opened = shown(engine)
    for group in (GROUP, "another"):
        while engine.puller.pull(TOPIC, group):
            pass

    quarantined = f'broker_messages_quarantined_total{{topic="{TOPIC}"}}'
    assert before["broker_quarantined_bytes"] == 0
    assert opened["broker_quarantined_bytes"] > len("b-damaged")
    assert (before.get(quarantined), opened.get(quarantined)) == (None, None)
    assert shown(engine)[quarantined] == 2


def test_damage_in_the_schedule_is_shown_once_it_is_met(
    open_engine: Callable[..., Engine], folder: Path, clock: ManualClock
) -> None:
    later_ms = clock.now_ms() + 3_600_000
    engine = open_engine()
    engine.publisher.publish(
        [Message(id=f"m{at}", topic=TOPIC, body=b"body of m%d" % at, deliver_at_ms=later_ms) for at in range(3)]
    )
    engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)
    engine.close()
    [bucket] = (folder / "schedule").glob("l[01]*.segment")
    data = bytearray(bucket.read_bytes())
    data[data.index(b"body of m1")] ^= 1
    bucket.write_bytes(data)

    engine = open_engine()
    clock.advance(3_600_000)
    until_fired(engine)
    came = [one.id for one in engine.puller.pull(TOPIC, GROUP)]

    samples = shown(engine)
    assert came == ["m0", "m2"]
    assert samples["broker_quarantined_runs"] == 1
    assert samples["broker_quarantined_scheduled_messages"] == 1
    assert samples['broker_scheduled_messages{horizon="inf"}'] == 0


def test_a_group_whose_messages_cannot_be_found_takes_no_figures_from_the_others(
    open_engine: Callable[..., Engine], folder: Path
) -> None:
    engine = open_engine(segment_bytes=4096)
    engine.admin.declare_group("unread", GROUP, GroupConfig())
    publish(engine, *(f"m{number}" for number in range(100)), topic="unread")
    publish(engine, "a")
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    flip_footer(footers_of(folder)[0])
    message_segments(folder)[0].unlink()

    samples = shown(engine)

    assert samples[f'broker_ready_messages{{group="{GROUP}",topic="{TOPIC}"}}'] == 1
    assert f'broker_ready_messages{{group="{GROUP}",topic="unread"}}' not in samples


def test_a_group_that_gets_nothing_is_shown_with_the_reason(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    engine.admin.declare_group(TOPIC, "served", GroupConfig())
    engine.admin.pause(TOPIC, GROUP, paused=True)
    publish(engine, "a")
    engine.puller.pull(TOPIC, "served")
    shown(engine)
    clock.advance(7_000)

    samples = shown(engine)

    stalled = {name: value for name, value in samples.items() if name.startswith("broker_group_stalled_seconds")}
    assert stalled == {f'broker_group_stalled_seconds{{group="{GROUP}",reason="paused",topic="{TOPIC}"}}': 7}


def test_beyond_the_bound_on_series_reasons_are_still_told_apart(engine: Engine) -> None:
    for number in range(5):
        engine.admin.declare_group(TOPIC, f"g{number}", GroupConfig(max_attempts=1))
    publish(engine, "a")
    for number in range(5):
        engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, f"g{number}")])

    samples = shown(engine, series_max=2)

    others = 'broker_messages_dead_lettered_total{group="~others",reason="rejected",topic="~others"}'
    assert samples[others] == 3
    assert sum("dead_lettered_total" in name for name in samples) == 3


def test_every_sync_of_a_log_is_in_the_histogram(engine: Engine) -> None:
    before = shown(engine)["broker_fsync_duration_seconds_count"]

    publish(engine, "a")
    publish(engine, "b")

    samples = shown(engine)
    assert samples["broker_fsync_duration_seconds_count"] == before + 2
    assert samples['broker_fsync_duration_seconds_bucket{le="+Inf"}'] == before + 2
    assert samples["broker_fsync_duration_seconds_sum"] > 0


def test_a_sync_s_time_goes_where_it_belongs_also_where_it_fails(tmp_path: Path) -> None:
    times = iter([0.0, 0.002, 10.0, 13.0])
    storage = TimedStorage(DiskStorage(), clock_s=lambda: next(times))
    with (tmp_path / "file").open("wb") as file:
        storage.sync(file.fileno())
    with pytest.raises(OSError, match="descriptor"):
        storage.sync(10**6)

    assert [(bound, count) for bound, count in storage.counts() if count] == [(0.0025, 1), (5, 1)]
    assert storage.sum_s == pytest.approx(3.002)


@pytest.mark.parametrize("after", ["x", "-1", "٣", "²", ""])  # digits to str.isdigit, and to nobody else
def test_a_cursor_that_no_page_gave_is_refused(engine: Engine, after: str) -> None:
    publish(engine, "a")
    engine.puller.pull(TOPIC, GROUP)

    with pytest.raises(InvalidMessage, match="next"):
        engine.admin.dead(TOPIC, GROUP, after=after)


def test_what_is_scheduled_is_counted_by_how_soon_it_is_due(engine: Engine, clock: ManualClock) -> None:
    ahead_ms = (1_000, 60_000, 60_001, 3_600_000, 86_400_000, 30 * 86_400_000 + 1)
    engine.publisher.publish(
        [
            Message(id=f"m{number}", topic=TOPIC, body=b"", deliver_at_ms=clock.now_ms() + span_ms)
            for number, span_ms in enumerate(ahead_ms)
        ]
    )

    samples = shown(engine)

    horizons = {name: samples[f'broker_scheduled_messages{{horizon="{name}"}}'] for name in HORIZONS}
    assert horizons == {"1m": 2, "1h": 4, "1d": 5, "30d": 5, "inf": 6}


def test_a_scrape_tells_which_build_runs(engine: Engine) -> None:
    (built,) = [name for name in shown(engine) if name.startswith("outbox_build_info{")]

    assert f'python="{platform.python_version()}"' in built
    assert f'version="{version("outbox-mq")}"' in built
    assert 'revision="' in built


def test_how_late_scheduled_messages_were_is_a_histogram(engine: Engine, clock: ManualClock) -> None:
    for ahead_ms in (30, 30, 5_000):
        one = Message(
            id=f"m{ahead_ms}-{clock.now_ms()}", topic=TOPIC, body=b"", deliver_at_ms=clock.now_ms() + ahead_ms
        )
        engine.publisher.publish([one])
        clock.advance(100)  # in one step: the broker comes to it 70 ms late
        until_fired(engine)
        engine.puller.pull(TOPIC, GROUP)
    clock.advance(4_900 + 2)
    until_fired(engine)
    assert len(engine.puller.pull(TOPIC, GROUP)) == 1

    found = shown(engine)

    counts = {bound: found[f'broker_delay_lateness_seconds_bucket{{le="{bound}"}}'] for bound in BOUNDS}
    assert counts == {"0.001": 0, "0.002": 1, "0.05": 1, "0.1": 3, "+Inf": 3}
    assert found["broker_delay_lateness_seconds_count"] == 3
    assert found["broker_delay_lateness_seconds_sum"] == pytest.approx(0.142)


def test_each_sync_is_counted_once(engine: Engine) -> None:
    def synced() -> int:
        return sum(count for _, count in engine.syncs.counts())

    publish(engine, "a")
    before, found, after = synced(), shown(engine), synced()

    assert 0 < before <= found["broker_fsync_duration_seconds_count"] <= after
    assert found['broker_fsync_duration_seconds_bucket{le="+Inf"}'] == found["broker_fsync_duration_seconds_count"]


def test_the_oldest_message_of_a_group_is_shown_by_when_it_became_ready(engine: Engine, clock: ManualClock) -> None:
    oldest = f'broker_oldest_ready_timestamp_seconds{{group="{GROUP}",topic="{TOPIC}"}}'
    publish(engine, "a")
    [delivery] = engine.puller.pull(TOPIC, GROUP)
    clock.advance(60_000)
    before, waiting, after = time.time(), shown(engine)[oldest], time.time()
    engine.settler.ack([delivery.receipt])

    assert before - 1 <= waiting + 60 <= after + 1  # it is a difference of floats
    assert shown(engine)[oldest] == 0


def test_connections_and_bytes_in_work_are_shown(shared_url: str, client: Callable[..., requests.Response]) -> None:
    text = client("GET", f"{shared_url}/metrics").text

    assert 'broker_http_connections_refused_total{reason="no_room"} 0.0' in text
    assert 'broker_http_connections_refused_total{reason="made_room"} 0.0' in text
    figures = dict(line.split() for line in text.splitlines() if line.startswith("broker_http_") and "{" not in line)
    assert float(figures["broker_http_connections"]) >= 1
    assert float(figures["broker_http_work_bytes"]) == 0
