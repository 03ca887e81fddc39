"""The compensator as a service: it outlives its database, stops in good order, and says how it is."""

from __future__ import annotations

import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from compensator.service.metrics import OTHER_TOPICS, TOPICS_MAX, CompensatorMetrics
from compensator.service.source_upkeep import UpkeepOptions
from compensator.work.source import SourceCounts
from compensator.work.source_schedule import MoreRowsDue, PacingOptions
from compensator.work.source_turn import TurnReport
from outbox_core import ManualClock, Message
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_core.runtime.status_server import StatusServer
from tests.compensator.serving import (
    HOUR_US,
    WAIT_SECONDS,
    Serve,
    WatchedMetrics,
    advance_until,
    name_of,
    wait_until_stopping,
)
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, open_shop
from tests.outbox_broker.polling import until

COUNT_OFTEN = UpkeepOptions(gauges_ms=1, gauges_idle_ms=1, gauges_check_ms=20)


@pytest.mark.mariadb
def test_the_service_outlives_a_database_that_crashes(
    mariadb_server: LocalServer, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> None:
    with mariadb_server.fresh_database() as database, open_shop(database) as shop:
        service = serve(shop, broker)
        shop.add_due(5, prefix="before")
        service.start()
        metrics.wait_for(lambda it: it.accepted == 5)

        mariadb_server.kill9()
        metrics.wait_for(lambda it: it.failures.total() >= 2)
        mariadb_server.restart()
        shop.add_due(5, prefix="after")
        metrics.wait_for(lambda it: it.accepted == 10)
        well = service.health().is_healthy

        assert service.stop()
        assert well
        assert shop.rows() == []
        assert (len(broker.stored), broker.duplicates) == (10, [])


@pytest.mark.slow
@pytest.mark.mariadb
def test_rows_whose_settling_the_crash_took_are_settled_once_the_server_is_back_and_not_sent_again(
    mariadb_server: LocalServer, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> None:
    taken, crashed = threading.Event(), threading.Event()

    def crash(_batch: Sequence[Message]) -> None:
        taken.set()
        crashed.wait(WAIT_SECONDS)

    with mariadb_server.fresh_database() as database, open_shop(database) as shop:
        broker.rule = crash
        ids = shop.add_due(3)
        service = serve(shop, broker)
        service.start()
        assert taken.wait(WAIT_SECONDS)
        mariadb_server.kill9()
        crashed.set()
        metrics.wait_for(lambda it: it.failures.total() >= 1)

        mariadb_server.restart()
        shop.end_leases()
        metrics.wait_for(lambda it: it.accepted == 3)

        assert service.stop()
        assert shop.rows() == []
        assert (broker.ids, broker.duplicates) == (ids, [])


def test_stop_finishes_the_batch_in_hand_and_claims_no_more(sqlite_shop: Shop, serve: Serve) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    broker = RecordingBroker(hang)
    sqlite_shop.add_due(30)
    service = serve(sqlite_shop, broker)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    answers: list[bool] = []
    stopping = threading.Thread(target=lambda: answers.append(service.stop()))
    stopping.start()
    wait_until_stopping(service)
    go_on.set()
    stopping.join(WAIT_SECONDS)

    assert answers == [True]
    assert len(broker.stored) == 10
    assert len(sqlite_shop.rows()) == 20
    assert {row["attempts"] for row in sqlite_shop.rows()} == {1}


def test_stop_says_no_when_the_batch_does_not_end_in_time(
    sqlite_shop: Shop, metrics: WatchedMetrics, serve: Serve
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, RecordingBroker(hang), stop_timeout_ms=1)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    stopped = service.stop()
    go_on.set()
    metrics.wait_for(lambda it: bool(it.turns))

    assert not stopped
    assert sqlite_shop.rows() == [], "the batch in hand was given up"


def test_start_and_stop_may_be_called_again(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> None:
    service = serve(sqlite_shop, broker)

    service.start()
    service.start()
    metrics.wait_for(lambda it: len(it.reports) >= 2)

    assert [service.stop(), service.stop()] == [True, True]


def test_a_service_that_was_never_started_stops(sqlite_shop: Shop, broker: RecordingBroker, serve: Serve) -> None:
    assert serve(sqlite_shop, broker).stop()


def test_health_goes_when_no_turn_ends_well_and_comes_back(
    sqlite_shop: Shop, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    clock = ManualClock()
    service = serve(sqlite_shop, broker, clock=clock)
    service.start()
    metrics.wait_for(lambda it: len(it.reports) >= 1)
    well = service.health().is_healthy

    sqlite_shop.execute("ALTER TABLE outbox_message RENAME TO hidden")
    advance_until(clock, lambda: metrics.failures.total() >= 2)
    clock.advance(15_000)
    ill = service.health()
    sqlite_shop.execute("ALTER TABLE hidden RENAME TO outbox_message")
    seen = len(metrics.reports)
    advance_until(clock, lambda: len(metrics.reports) >= seen + 2)
    again = service.health()

    assert well
    assert not ill.is_healthy
    assert {check.name: check.status for check in ill.checks}["turns"] == "fail"
    assert name_of(sqlite_shop) in {check.name: check.observed for check in ill.checks}["sources"]
    assert again.is_healthy


def test_a_broker_that_is_out_does_not_make_the_compensator_ill(
    sqlite_shop: Shop, metrics: WatchedMetrics, serve: Serve
) -> None:
    def rule(_batch: Sequence[Message]) -> None:
        raise BrokerUnavailable("down")

    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, RecordingBroker(rule))

    service.start()
    metrics.wait_for(lambda it: any(report.outage for report in it.reports))
    health = service.health()
    assert service.stop()

    assert health.is_healthy
    assert {check.name: check.status for check in health.checks}["brokers"] == "warn"
    outages = [report for report in metrics.reports if report.outage]
    assert metrics.value("outbox_compensator_scans_total", result="outage") == len(outages)


@pytest.mark.slow
def test_metrics_say_what_turns_did_and_how_the_tables_stand(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> None:
    ids = sqlite_shop.add_due(25)
    broker.rejects[ids[3]] = "too strange"
    source = name_of(sqlite_shop)

    service = serve(sqlite_shop, broker, upkeep=COUNT_OFTEN)
    service.start()
    metrics.wait_for(lambda it: it.accepted == 24)
    metrics.wait_for(lambda it: it.counts.get(source) == SourceCounts(pending=0, retrying=0, parked=1))
    metrics.wait_for(lambda it: not it.turns[-1][1].pending)
    service.stop()

    assert metrics.value("outbox_compensator_rows_total", outcome="accepted") == 24
    assert metrics.value("outbox_compensator_rows_total", outcome="parked") == 1
    assert metrics.value("outbox_compensator_resent_total", topic="topic") == 25
    assert metrics.value("outbox_parked_messages", source=source) == 1
    assert metrics.value("outbox_pending_messages", source=source) == 0
    assert metrics.value("outbox_retrying_messages", source=source) == 0
    assert metrics.value("outbox_oldest_pending_timestamp_seconds", source=source) == 0
    assert metrics.value("outbox_compensator_leader", source=source) == 1
    assert (metrics.value("outbox_compensator_last_success_timestamp_seconds", source=source) or 0) > 1_700_000_000


def test_the_age_of_the_oldest_due_row_is_the_databases_own_figure(
    shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> None:
    shop.add_due(3, due_for_us=HOUR_US)

    backlog = shop.scan(broker).backlog()
    serve(shop, broker).start()
    metrics.wait_for(lambda it: it.accepted == 3)

    assert (backlog.pending, backlog.due, backlog.parked) == (3, 3, 0)
    assert HOUR_US <= backlog.oldest_due_age_us <= HOUR_US + 60_000_000
    assert HOUR_US <= (metrics.turns[0][1].oldest_due_us or 0) <= HOUR_US + 60_000_000


def test_topics_beyond_the_bound_share_a_series(metrics: WatchedMetrics) -> None:
    topics = [f"topic-{number}" for number in range(TOPICS_MAX + 10)]
    for topic in [*topics, "topic-3"]:
        turn = TurnReport(outcome=MoreRowsDue(), topics=Counter({topic: 1}))
        metrics.record_turn("source", turn, seconds=0.1, now_seconds=1.0)

    resent = {
        sample.labels["topic"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "outbox_compensator_resent_total"
    }
    assert len(resent) == TOPICS_MAX + 1
    assert resent[OTHER_TOPICS] == 10
    assert resent["topic-3"] == 2


@pytest.fixture
def status(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Serve
) -> Iterator[tuple[StatusServer, ManualClock]]:
    """The status page of a service that looks once and then waits, and the clock that it is judged by."""
    clock = ManualClock()
    service = serve(sqlite_shop, broker, clock=clock, pacing=PacingOptions(interval_ms=3_600_000))
    server = StatusServer(service, registry=metrics.registry, host="127.0.0.1", port=0)
    service.start()
    metrics.wait_for(lambda it: len(it.reports) >= 1)
    server.start()
    yield server, clock
    server.stop()


def get(server: StatusServer, path: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and body of a page."""
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_status_page_serves_probes_and_metrics(status: tuple[StatusServer, ManualClock], sqlite_shop: Shop) -> None:
    server, clock = status

    live, ready, scrape = get(server, "/livez"), get(server, "/readyz?verbose"), get(server, "/metrics")
    sqlite_shop.execute("ALTER TABLE outbox_message RENAME TO hidden")
    clock.advance(4 * 3_600_000)
    not_ready, still_live = get(server, "/healthz"), get(server, "/livez")

    assert (live[0], ready[0], scrape[0]) == (200, 200, 200)
    assert {check["name"] for check in json.loads(ready[1])["checks"]} == {
        "running", "turns", "sources", "assignment", "workers", "brokers",
    }  # fmt: skip
    assert "outbox_oldest_due_age_seconds" in scrape[1]
    assert "outbox_build_info{" in scrape[1]
    assert (not_ready[0], json.loads(not_ready[1])["status"]) == (503, "fail")
    assert json.loads(not_ready[1])["seconds_since_last_successful_pass"] >= 14_400.0
    assert still_live[0] == 200
    nothing = get(server, "/nothing")
    assert (nothing[0], "/readyz" in nothing[1]) == (404, True)


def test_a_service_that_stops_is_not_ready_and_still_alive(
    sqlite_shop: Shop, metrics: WatchedMetrics, serve: Serve
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, RecordingBroker(hang), stop_timeout_ms=1)
    service.start()
    assert entered.wait(WAIT_SECONDS)
    ready = service.health().is_healthy

    stopped = service.stop()  # not yet: a worker has a batch in hand
    well, alive = service.health().is_healthy, service.alive()
    go_on.set()
    metrics.wait_for(lambda it: bool(it.turns))

    assert (ready, stopped) == (True, False)
    assert (well, alive) == (False, True)


def test_a_process_whose_every_worker_is_stuck_is_not_alive(sqlite_shop: Shop, serve: Serve) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    clock = ManualClock()
    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, RecordingBroker(hang), clock=clock, workers=1)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    before = service.alive()
    clock.advance(3_600_000)
    after = service.alive()
    go_on.set()

    assert (before, after) == (True, False)


def test_probes_that_hang_up_leave_nothing_in_the_log(
    status: tuple[StatusServer, ManualClock], capfd: pytest.CaptureFixture[str]
) -> None:
    server, _ = status

    for begun in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n") * 10:
        with socket.create_connection(("127.0.0.1", server.port)) as probe:
            probe.sendall(begun)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes by a reset

    assert get(server, "/livez")[0] == 200
    until(lambda: not any("process_request_thread" in one.name for one in threading.enumerate()))
    assert "Traceback" not in capfd.readouterr().err


def test_a_taken_port_is_said_with_the_cure(status: tuple[StatusServer, ManualClock]) -> None:
    server, _ = status

    with pytest.raises(ConfigurationError, match="choose another port"):
        StatusServer(None, registry=CompensatorMetrics().registry, host="127.0.0.1", port=server.port)  # type: ignore[arg-type]


def test_an_address_that_is_not_this_machines_is_said_with_the_cure() -> None:
    with pytest.raises(ConfigurationError, match="as --host"):
        StatusServer(None, registry=CompensatorMetrics().registry, host="203.0.113.1", port=0)  # type: ignore[arg-type]


def test_the_status_page_is_served_over_ip_version_6(
    sqlite_shop: Shop, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    service = serve(sqlite_shop, broker, clock=ManualClock(), pacing=PacingOptions(interval_ms=3_600_000))
    server = StatusServer(service, registry=metrics.registry, host="::1", port=0)
    service.start()
    server.start()

    scrape = get(server, "/metrics", host="[::1]")

    server.stop()
    assert scrape[0] == 200
