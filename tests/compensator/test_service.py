"""The compensator as a service: it outlives its database, stops in good order, and says how it is."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence

import pytest

from compensator.metrics import CompensatorMetrics
from compensator.scan import PassReport
from compensator.service import CompensatorService, ServiceOptions
from compensator.status_server import StatusServer
from messaging.clock import ManualClock
from messaging.errors import BrokerUnavailable, ConfigurationError
from messaging.message import Message
from outbox.row import publish_row
from outbox.store import Backlog
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, open_shop

HOUR_US = 3_600_000_000
WAIT_SECONDS = 30
OFTEN = ServiceOptions(interval_ms=20, jitter_ms=0)


class WatchedMetrics(CompensatorMetrics):
    """Metrics that a test can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Condition()
        self.reports: list[PassReport] = []
        self.failures = 0
        self.backlogs: list[Backlog] = []

    def passed(self, report: PassReport, *, seconds: float, now_seconds: float) -> None:
        super().passed(report, seconds=seconds, now_seconds=now_seconds)
        self._tell(lambda: self.reports.append(report))

    def failed(self) -> None:
        super().failed()
        self._tell(lambda: setattr(self, "failures", self.failures + 1))

    def stands(self, backlog: Backlog) -> None:
        super().stands(backlog)
        self._tell(lambda: self.backlogs.append(backlog))

    def wait_for(self, condition: Callable[[WatchedMetrics], bool]) -> None:
        """Wait until what passes came to makes the condition true."""
        with self._told:
            assert self._told.wait_for(lambda: condition(self), WAIT_SECONDS)

    def value(self, name: str, **labels: str) -> float:
        """What a scrape would show."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def _tell(self, note: Callable[[], object]) -> None:
        with self._told:
            note()
            self._told.notify_all()


@pytest.fixture
def metrics() -> WatchedMetrics:
    """Metrics to watch."""
    return WatchedMetrics()


@pytest.fixture
def serve(metrics: WatchedMetrics) -> Iterator[Callable[..., CompensatorService]]:
    """Makes services that are stopped at the end of the test."""
    services: list[CompensatorService] = []

    def make(shop: Shop, broker: RecordingBroker, **options: object) -> CompensatorService:
        scan = shop.scan(broker, batch_rows=10)
        settings = {"options": OFTEN, "metrics": metrics, **options}
        services.append(CompensatorService(scan, **settings))  # type: ignore[arg-type]
        return services[-1]

    yield make
    for service in services:
        service.stop()


def add_due(shop: Shop, count: int, *, prefix: str = "m") -> None:
    """Rows of a dead sender, their leases over."""
    rows = [publish_row(Message(id=f"{prefix}-{number:03d}", topic="topic", body=b"")) for number in range(count)]
    with shop.engine.begin() as connection:
        shop.store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)


@pytest.mark.mariadb
def test_the_service_outlives_a_database_that_crashes(
    mariadb_server: LocalServer,
    broker: RecordingBroker,
    metrics: WatchedMetrics,
    serve: Callable[..., CompensatorService],
) -> None:
    with mariadb_server.fresh_database() as database, open_shop(database) as shop:
        service = serve(shop, broker)
        add_due(shop, 5, prefix="before")
        service.start()
        metrics.wait_for(lambda it: sum(report.accepted for report in it.reports) == 5)

        mariadb_server.kill9()
        metrics.wait_for(lambda it: it.failures >= 2)
        mariadb_server.restart()
        add_due(shop, 5, prefix="after")
        metrics.wait_for(lambda it: sum(report.accepted for report in it.reports) == 10)

        assert service.stop()
        assert service.healthy()
        assert shop.rows() == []
        assert (len(broker.stored), broker.duplicates) == (10, [])


@pytest.mark.mariadb
def test_rows_whose_settling_the_crash_took_are_sent_again_and_dropped_as_duplicates(
    mariadb_server: LocalServer,
    broker: RecordingBroker,
    metrics: WatchedMetrics,
    serve: Callable[..., CompensatorService],
) -> None:
    taken, crashed = threading.Event(), threading.Event()

    def crash(_batch: Sequence[Message]) -> None:
        taken.set()
        crashed.wait(WAIT_SECONDS)

    with mariadb_server.fresh_database() as database, open_shop(database) as shop:
        broker.rule = crash
        add_due(shop, 3)
        service = serve(shop, broker)
        service.start()
        assert taken.wait(WAIT_SECONDS)
        mariadb_server.kill9()
        crashed.set()
        metrics.wait_for(lambda it: it.failures >= 1)

        mariadb_server.restart()
        shop.end_leases()
        metrics.wait_for(lambda it: sum(report.accepted for report in it.reports) == 3)

        assert service.stop()
        assert shop.rows() == []
        assert (broker.ids, broker.duplicates) == (["m-000", "m-001", "m-002"], ["m-000", "m-001", "m-002"])


def test_a_defect_in_one_pass_does_not_end_the_loop(
    sqlite_shop: Shop, metrics: WatchedMetrics, serve: Callable[..., CompensatorService]
) -> None:
    def rule(_batch: Sequence[Message]) -> None:
        if len(broker.batches) == 1:
            raise RuntimeError("a defect of an adapter")

    broker = RecordingBroker(rule)
    add_due(sqlite_shop, 1)

    serve(sqlite_shop, broker).start()
    metrics.wait_for(lambda it: it.failures == 1)
    sqlite_shop.end_leases()

    broker.wait_for(lambda it: len(it.stored) == 1)


def test_stop_finishes_the_batch_in_hand_and_claims_no_more(
    sqlite_shop: Shop, serve: Callable[..., CompensatorService]
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    broker = RecordingBroker(hang)
    add_due(sqlite_shop, 30)
    service = serve(sqlite_shop, broker)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    answers: list[bool] = []
    stopping = threading.Thread(target=lambda: answers.append(service.stop()))
    stopping.start()
    assert service._stopping.wait(WAIT_SECONDS)
    go_on.set()
    stopping.join(WAIT_SECONDS)

    assert answers == [True]
    assert len(broker.stored) == 10
    assert len(sqlite_shop.rows()) == 20
    assert {row["attempts"] for row in sqlite_shop.rows()} == {1}


def test_stop_says_no_when_the_batch_does_not_end_in_time(
    sqlite_shop: Shop, serve: Callable[..., CompensatorService]
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: Sequence[Message]) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    add_due(sqlite_shop, 1)
    options = ServiceOptions(interval_ms=20, jitter_ms=0, stop_timeout_ms=1)
    service = serve(sqlite_shop, RecordingBroker(hang), options=options)
    service.start()
    assert entered.wait(WAIT_SECONDS)

    stopped = service.stop()
    go_on.set()

    assert not stopped
    assert service._idle.wait(WAIT_SECONDS)


def test_start_and_stop_may_be_called_again(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Callable[..., CompensatorService]
) -> None:
    service = serve(sqlite_shop, broker)

    service.start()
    service.start()
    metrics.wait_for(lambda it: len(it.reports) >= 2)

    assert [service.stop(), service.stop()] == [True, True]


def test_health_goes_when_no_pass_ends_well_and_comes_back(
    sqlite_shop: Shop, broker: RecordingBroker, serve: Callable[..., CompensatorService], metrics: WatchedMetrics
) -> None:
    clock = ManualClock()
    service = serve(sqlite_shop, broker, clock=clock)
    service.start()
    metrics.wait_for(lambda it: len(it.reports) >= 1)
    well = service.healthy()

    sqlite_shop.execute("ALTER TABLE outbox_message RENAME TO hidden")
    metrics.wait_for(lambda it: it.failures >= 2)
    clock.advance(10_000)
    ill = service.healthy()
    sqlite_shop.execute("ALTER TABLE hidden RENAME TO outbox_message")
    seen = len(metrics.reports)
    metrics.wait_for(lambda it: len(it.reports) >= seen + 2)

    assert (well, ill, service.healthy()) == (True, False, True)


def test_a_broker_that_is_out_does_not_make_the_compensator_ill(
    sqlite_shop: Shop, metrics: WatchedMetrics, serve: Callable[..., CompensatorService]
) -> None:
    def rule(_batch: Sequence[Message]) -> None:
        raise BrokerUnavailable("down")

    add_due(sqlite_shop, 1)
    clock = ManualClock()
    service = serve(sqlite_shop, RecordingBroker(rule), clock=clock)
    clock.advance(60_000)

    service.start()
    metrics.wait_for(lambda it: any(report.outage for report in it.reports))

    assert service.healthy()
    assert metrics.value("outbox_compensator_scans_total", result="outage") == 1


def test_metrics_say_what_passes_did_and_how_the_table_stands(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Callable[..., CompensatorService]
) -> None:
    add_due(sqlite_shop, 25)
    broker.rejects["m-003"] = "too strange"

    service = serve(sqlite_shop, broker)
    service.start()
    metrics.wait_for(lambda it: any(report.accepted for report in it.reports))
    service.stop()

    assert metrics.value("outbox_compensator_rows_total", outcome="accepted") == 24
    assert metrics.value("outbox_compensator_rows_total", outcome="parked") == 1
    assert metrics.value("outbox_parked_messages") == 1
    assert metrics.value("outbox_compensator_last_success_timestamp_seconds") > 1_700_000_000


def test_the_age_of_the_oldest_due_row_is_the_databases_own_figure(shop: Shop, broker: RecordingBroker) -> None:
    add_due(shop, 3)

    backlog = shop.scan(broker).backlog()

    assert (backlog.pending, backlog.due, backlog.parked) == (3, 3, 0)
    assert HOUR_US <= backlog.oldest_due_age_us <= HOUR_US + 60_000_000


@pytest.fixture
def status(
    sqlite_shop: Shop, broker: RecordingBroker, metrics: WatchedMetrics, serve: Callable[..., CompensatorService]
) -> Iterator[tuple[StatusServer, ManualClock]]:
    """The status page of a service that has not made a pass, and the clock that it is judged by."""
    clock = ManualClock()
    service = serve(sqlite_shop, broker, clock=clock)
    server = StatusServer(service, registry=metrics.registry, host="127.0.0.1", port=0)
    server.start()
    yield server, clock
    server.stop()


def get(server: StatusServer, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_status_page_serves_probes_and_metrics(status: tuple[StatusServer, ManualClock]) -> None:
    server, clock = status

    live, ready, scrape = get(server, "/livez"), get(server, "/readyz?verbose"), get(server, "/metrics")
    clock.advance(60_000)
    not_ready, still_live = get(server, "/healthz"), get(server, "/livez")

    assert (live[0], ready[0], scrape[0]) == (200, 200, 200)
    assert "outbox_oldest_due_age_seconds" in scrape[1]
    assert (not_ready[0], json.loads(not_ready[1])["status"]) == (503, "fail")
    assert json.loads(not_ready[1])["seconds_since_last_successful_pass"] == 60.0
    assert still_live[0] == 200
    assert get(server, "/nothing")[0] == 404


def test_a_taken_port_is_said_with_the_cure(status: tuple[StatusServer, ManualClock]) -> None:
    server, _ = status

    with pytest.raises(ConfigurationError, match="choose another port"):
        StatusServer(None, registry=CompensatorMetrics().registry, host="127.0.0.1", port=server.port)  # type: ignore[arg-type]
