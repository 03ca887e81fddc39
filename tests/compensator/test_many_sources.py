"""Many sources in one service: none holds up another, what is lost is let go of, what joins later is served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import make_url

from compensator.work.engines import InstanceEngines
from compensator.work.source import Source
from outbox_core import ManualClock
from outbox_core.assignment.even_assignment import Resource
from tests.compensator.serving import (
    WAIT_SECONDS,
    Serve,
    WatchedMetrics,
    name_of,
    serving,
    source_at,
    wait_until_stopping,
)
from tests.fixtures.databases import sqlite_database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, open_shop

BEAT_MS = 20


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[list[Shop]]:
    """Four shops."""
    with ExitStack() as closing:
        made = []
        for number in range(4):
            (tmp_path / str(number)).mkdir()
            made.append(closing.enter_context(open_shop(sqlite_database(tmp_path / str(number)))))
        yield made


class SilentServer:
    """Takes connections and never says a word: a database host that hangs."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.taken = threading.Semaphore(0)
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connections.append(self._socket.accept()[0])
                self.taken.release()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            connection.close()
        self._thread.join(WAIT_SECONDS)


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    """A server that hangs."""
    server = SilentServer()
    yield server
    server.close()


def hanging_source(silent: SilentServer, number: int) -> tuple[Source, InstanceEngines]:
    """A source whose database never answers."""
    url = make_url(f"mysql+pymysql://u@127.0.0.1:{silent.port}/db{number}?connect_timeout=60")
    return source_at(url, f"outbox{number}", RecordingBroker(), broker_name="none")


def test_a_source_whose_database_hangs_holds_up_no_other(
    shops: list[Shop], broker: RecordingBroker, metrics: WatchedMetrics, silent: SilentServer
) -> None:
    dead, engines = hanging_source(silent, 1)
    service, close = serving(shops, [broker] * 4, metrics=metrics, extra=[dead], workers=2, stop_timeout_ms=1)
    try:
        service.start()
        assert silent.taken.acquire(timeout=WAIT_SECONDS)
        for number, shop in enumerate(shops):
            shop.add_due(100, prefix=str(number))

        broker.wait_for(lambda it: len(it.stored) == 400)

        assert not metrics.failures[dead.name], "the dead one is not being tried any more"
        assert service.health().is_healthy
        service.stop()
    finally:
        silent.close()
        metrics.wait_for(lambda it: it.failures[dead.name] == 1)
        close()
        engines.close()
    assert dead.name not in {name for name, _ in metrics.turns}


def test_sources_that_cannot_be_reached_are_tried_ever_more_seldom_and_the_others_as_ever(
    shops: list[Shop], broker: RecordingBroker, metrics: WatchedMetrics
) -> None:
    nobody_listens = make_url("mysql+pymysql://u@127.0.0.1:1/db")
    dead, engines = source_at(nobody_listens, "outbox", broker, broker_name="none")
    service, close = serving(shops[:1], [broker], metrics=metrics, extra=[dead], workers=1)
    try:
        service.start()
        metrics.wait_for(lambda it: it.failures[dead.name] >= 3)
        shops[0].add_due(50)
        metrics.wait_for(lambda it: it.accepted == 50)
        failing = {check.name: check.observed for check in service.health().checks}["sources"]

        assert dead.name in failing
        assert service.health().is_healthy
        assert service.stop()
    finally:
        close()
        engines.close()


class Told:
    """An assignment that says what a test tells it."""

    def __init__(self, *mine: str) -> None:
        self.mine = frozenset(mine)
        self.left = False
        self.instance = "told"
        self.failed_beats = 0
        self.problem: str | None = None

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        return self.mine & {source.name for source in sources}

    def leave(self) -> None:
        self.left = True


def test_only_what_is_assigned_is_served_and_leases_are_given_up_at_the_end(
    shops: list[Shop], broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    told = Told(name_of(shops[0]))
    for number, shop in enumerate(shops[:2]):
        shop.add_due(20, prefix=str(number))
    service = serve(shops[:2], broker, assignment=told, beat_ms=20)

    service.start()
    broker.wait_for(lambda it: len(it.stored) == 20)
    leaders = [metrics.value("outbox_compensator_leader", source=name_of(shop)) for shop in shops[:2]]
    told.mine = frozenset({name_of(shops[1])})
    broker.wait_for(lambda it: len(it.stored) == 40)
    stopped = service.stop()

    assert (stopped, told.left) == (True, True)
    assert leaders == [1, 0]
    assert {name for name, turn in metrics.turns if turn.report.claimed} == {name_of(shop) for shop in shops[:2]}


def test_a_beat_that_fails_changes_nothing_and_the_next_one_comes(
    shops: list[Shop], broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    class Failing(Told):
        def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
            if self.fails:
                self.failed.release()
                raise RuntimeError("a defect")
            return super().beat(sources)

        fails = False
        failed = threading.Semaphore(0)

    told = Failing(name_of(shops[0]))
    service = serve(shops[:1], broker, assignment=told, beat_ms=20)
    service.start()

    told.fails = True
    assert told.failed.acquire(timeout=WAIT_SECONDS)
    assert told.failed.acquire(timeout=WAIT_SECONDS)  # there was a next one, and the first was counted
    shops[0].add_due(10)
    metrics.wait_for(lambda it: it.accepted == 10)

    assert (metrics.value("outbox_compensator_periodic_task_failures_total", task="beat") or 0) >= 1


def test_beats_that_find_no_answer_keep_what_it_has_and_are_told_to_health_and_metrics(
    shops: list[Shop], broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics, clock: ManualClock
) -> None:
    class OneByOne(Told):
        def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
            assert self.go_on.acquire(timeout=WAIT_SECONDS)
            return super().beat(sources)

        go_on = threading.Semaphore(1)  # for the beat of start()

    told = OneByOne(name_of(shops[0]))
    service = serve(shops[:2], broker, assignment=told, clock=clock, beat_ms=BEAT_MS)
    service.start()

    def after(beats: int, *, failed: int) -> tuple[str, float | None, float | None]:
        clock.advance(beats * BEAT_MS)
        told.failed_beats = failed
        heard = len(metrics.beats)
        told.go_on.release()
        metrics.wait_for(lambda it: len(it.beats) == heard + 1)
        [status] = [check.status for check in service.health().checks if check.name == "assignment"]
        gauges = (f"outbox_compensator_{name}" for name in ("sources", "assignment_failed_beats"))
        ours, beats = (metrics.value(name) for name in gauges)
        return status, ours, beats

    try:
        assert after(0, failed=0) == ("ok", 1, 0)
        assert after(10, failed=10) == ("ok", 1, 10)
        assert after(10, failed=20) == ("fail", 1, 20)
        assert metrics.value("outbox_compensator_periodic_task_failures_total", task="beat") == 2
        assert after(1, failed=0) == ("ok", 1, 0)
    finally:
        told.go_on.release(1_000_000)  # else stop() would wait for a beat


def test_a_schema_that_is_made_later_is_served_from_then_on(
    shops: list[Shop], tmp_path: Path, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    late = shops[0]
    late.execute("ALTER TABLE outbox_message RENAME TO hidden")
    service = serve(late, broker)
    service.start()
    metrics.wait_for(lambda it: it.failures.total() >= 2)

    late.execute("ALTER TABLE hidden RENAME TO outbox_message")
    late.add_due(5)
    metrics.wait_for(lambda it: it.accepted == 5)

    assert service.stop()


# -- at every moment of a turn ---------------------------------------------------------------------------------------


class AtStatement:
    """Does something when the n-th statement of a service is about to be sent, and counts them."""

    def __init__(self, number: int, act: Callable[[object], None]) -> None:
        self.seen = 0
        self._number = number
        self._act = act
        self._lock = threading.Lock()

    def watch(self, engines: InstanceEngines) -> None:
        for engine in (engines.work, engines.reads):
            event.listen(engine, "before_cursor_execute", self._before)

    def _before(self, connection: object, *_: object) -> None:
        with self._lock:  # the turns and the upkeep are two threads: neither may skip the number for the other
            self.seen += 1
            is_it = self.seen == self._number
        if is_it:
            self._act(connection)


@pytest.mark.parametrize("number", range(1, 16))
def test_a_stop_at_any_statement_leaves_no_row_leased_and_loses_none(
    mysql_shop: Shop, broker: RecordingBroker, serve: Serve, number: int
) -> None:
    ids = mysql_shop.add_due(25)
    engines = InstanceEngines(mysql_shop.engine.url)
    service = serve(mysql_shop, broker, workers=1, engines=[engines])
    started, reached = threading.Event(), threading.Event()

    def stop_once_started() -> None:
        assert started.wait(WAIT_SECONDS)  # only one thread may start and stop a service, or one after the other
        service.stop()

    stopping = threading.Thread(target=stop_once_started)

    def stop(_connection: object) -> None:
        stopping.start()
        wait_until_stopping(service)
        reached.set()

    at = AtStatement(number, stop)
    at.watch(engines)

    service.start()
    started.set()
    assert reached.wait(WAIT_SECONDS)
    stopping.join(WAIT_SECONDS)
    stopped = service.stop()  # what the first call came to

    left = mysql_shop.rows()
    assert stopped
    assert {row["token"] for row in left} <= {"d" * 32, None}, "a row was claimed and neither sent nor given back"
    assert {row["attempts"] for row in left} <= {1}, "an attempt was counted for a row that was not sent"
    assert sorted([*broker.ids, *(row["id"] for row in left)]) == ids
    assert broker.duplicates == []


@pytest.mark.parametrize("number", range(1, 16))
def test_a_connection_that_is_lost_at_any_statement_loses_nothing_and_parks_nothing(
    mysql_shop: Shop, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics, number: int
) -> None:
    ids = mysql_shop.add_due(25)
    engines = InstanceEngines(mysql_shop.engine.url)
    service = serve(mysql_shop, broker, workers=1, engines=[engines])
    reached = threading.Event()

    def lose(connection: object) -> None:
        kill_connection(mysql_shop, connection)
        reached.set()

    AtStatement(number, lose).watch(engines)

    service.start()
    assert reached.wait(WAIT_SECONDS)
    metrics.wait_for(lambda it: it.failures.total() >= 1 or it.accepted >= 20)
    mysql_shop.end_leases(at_us=time.time_ns() // 1_000)  # just now: the next look need not be a whole one
    broker.wait_for(lambda it: len(it.stored) == 25)
    metrics.wait_for(lambda _: mysql_shop.rows() == [])

    assert service.stop()
    assert sorted(broker.ids) == ids
    assert mysql_shop.rows() == []


def kill_connection(shop: Shop, connection: object) -> None:
    """As a server does that fails over: the connection is gone before its next statement."""
    thread_id = connection.connection.dbapi_connection.thread_id()  # type: ignore[attr-defined]
    with shop.engine.connect() as other:
        other.exec_driver_sql(f"KILL {thread_id}")
