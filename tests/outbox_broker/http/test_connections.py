"""Connections are bounded, for each address too; strangers keep nobody out, and a reserve is left for operators."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.http.access_control import Access, load_tokens
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer, bind
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.protocol.problem import ProblemKind
from tests.outbox_broker.http.raw_exchange import DEADLINE_S, Answer, RawConnection, ask
from tests.outbox_broker.http.raw_requests.raw_request import GOOD, HOST, JSON, LENGTH, livez, publish, request

LONG_MS = 600_000
MIB = 1024 * 1024
SHORT_MS = 200
PATIENCE_MS = 3_000
"""For a head: longer than a machine may stop its client before it sends it."""
SLOTS = 8
RESERVE = 4
OTHER_ADDRESS = "127.0.0.2"
LOG_LINES_MAX = 20
DESCRIPTORS = 256
STRANGERS = 300

ONE_PUBLISH = publish(LENGTH, "Connection: close")
PULL = request("POST /v1/topics/corpus/groups/g/pull HTTP/1.1", HOST, JSON, "Content-Length: 2", "Connection: close",
               body=b"{}")  # fmt: skip
DECLARE = request("PUT /v1/topics/corpus/groups/g HTTP/1.1", HOST, JSON, "Content-Length: 2", body=b"{}")
TOPICS = request("GET /v1/topics HTTP/1.1", HOST, "Connection: close")

Serve = Callable[..., HttpServer]


def get(path: str) -> bytes:
    return request(f"GET {path} HTTP/1.1", HOST, "Connection: close")


def status_of(answer: Answer | None) -> int | None:
    return None if answer is None else answer.status


def assert_overloaded(answer: Answer | None) -> None:
    """Assert that a client was told to come back, and that its connection ends."""
    assert answer is not None
    assert answer.status == 503, answer
    problem = json.loads(answer.body)
    assert problem["type"].endswith(ProblemKind.OVERLOADED)
    assert problem["retry_after_ms"] >= 1
    assert int(answer.header("retry-after") or 0) >= 1
    assert answer.header("connection") == "close"


def ask_until(url: str, raw: bytes, status: int, *, source: str = "") -> None:
    """Ask again and again until the answer has this status."""
    deadline = monotonic() + DEADLINE_S
    while status_of(answer := ask(url, raw, source=source)) != status:
        assert monotonic() < deadline, answer


def exchange(connection: RawConnection, raw: bytes) -> int | None:
    connection.send(raw)
    return status_of(connection.read_final())


@contextmanager
def clients(url: str, number: int, *, source: str = "", first: bytes = GOOD) -> Iterator[list[RawConnection]]:
    """Connections whose clients have each had a request answered, and hold on to it."""
    with ExitStack() as stack:
        made = [stack.enter_context(RawConnection(url, source=source)) for _ in range(number)]
        for connection in made:
            assert exchange(connection, first) == 200
        yield made


@contextmanager
def strangers(url: str, number: int, *, source: str = "") -> Iterator[list[RawConnection]]:
    """Connections that say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(RawConnection(url, source=source)) for _ in range(number)]


@pytest.fixture
def settings() -> HttpSettings:
    """Few connections, and all the time in the world."""
    return HttpSettings(
        connections_max=SLOTS,
        connections_per_address_max=SLOTS,
        connections_reserved=RESERVE,
        request_head_ms_max=LONG_MS,
        keep_alive_ms=LONG_MS,
    )


def test_silent_strangers_on_every_slot_keep_nobody_out(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    with strangers(url, SLOTS + RESERVE) as silent:
        for path in ("/livez", "/readyz", "/healthz", "/metrics", "/v1/topics"):
            assert status_of(ask(url, get(path))) == 200, path
        for _ in range(3 * SLOTS):
            assert status_of(ask(url, ONE_PUBLISH)) == 200

        assert silent[0].read_to_end() == b"", "the oldest made room"


def test_strangers_do_not_take_the_place_of_clients(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    with clients(url, SLOTS - 1) as known:
        for _ in range(3):
            with strangers(url, SLOTS + RESERVE + 1) as silent:
                assert [exchange(connection, GOOD) for connection in known] == [200] * len(known)
                assert silent[0].read_to_end() == b""
        assert status_of(ask(url, ONE_PUBLISH)) == 200


def test_where_every_slot_is_in_use_probes_metrics_and_operators_are_served_and_the_rest_comes_back(
    serve: Serve, settings: HttpSettings
) -> None:
    server = serve(settings)
    url = server.url
    with clients(url, SLOTS) as known:
        stored = figures(known[0])["stored"]

        for _ in range(2 * RESERVE):
            for path in ("/livez", "/readyz", "/healthz", "/metrics"):
                assert status_of(ask(url, get(path))) == 200, path
            assert_overloaded(ask(url, ONE_PUBLISH))
            assert_overloaded(ask(url, PULL))
            assert_overloaded(ask(url, TOPICS))
        with RawConnection(url) as operator:
            assert exchange(operator, DECLARE) == 200

        assert figures(known[0])["stored"] == stored
        assert [exchange(connection, GOOD) for connection in known] == [200] * SLOTS
        known[0].close()
        ask_until(url, ONE_PUBLISH, 200)


def test_strangers_in_the_reserve_make_room_for_probes(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    with clients(url, SLOTS), strangers(url, 3 * RESERVE) as silent:
        assert status_of(ask(url, get("/readyz"))) == 200
        assert silent[0].read_to_end() == b""


def test_beyond_the_reserve_a_connection_is_closed_at_once(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    with clients(url, SLOTS), clients(url, RESERVE, first=DECLARE):
        for _ in range(10):
            with RawConnection(url) as beyond:
                beyond.send(livez())
                assert beyond.read_to_end() == b""


def test_an_address_has_a_bound_of_its_own(serve: Serve, settings: HttpSettings) -> None:
    own = 3
    url = serve(replace(settings, connections_per_address_max=own)).url
    with clients(url, own), strangers(url, 2 * SLOTS):
        assert_overloaded(ask(url, ONE_PUBLISH))
        assert status_of(ask(url, get("/livez"))) == 200
        with clients(url, own, source=OTHER_ADDRESS) as others:
            assert [exchange(connection, GOOD) for connection in others] == [200] * own
            assert_overloaded(ask(url, ONE_PUBLISH, source=OTHER_ADDRESS))
            assert_overloaded(ask(url, ONE_PUBLISH))
        ask_until(url, ONE_PUBLISH, 200, source=OTHER_ADDRESS)


@pytest.mark.slow
def test_silent_strangers_are_gone_after_the_time_for_a_head(serve: Serve) -> None:
    url = serve(HttpSettings(connections_max=SLOTS, connections_reserved=RESERVE, request_head_ms_max=PATIENCE_MS)).url
    with strangers(url, SLOTS) as silent:
        assert [connection.read_to_end() for connection in silent] == [b""] * SLOTS
    assert status_of(ask(url, ONE_PUBLISH)) == 200


def test_idle_clients_give_their_slots_back_after_the_keep_alive(serve: Serve) -> None:
    url = serve(HttpSettings(connections_max=SLOTS, connections_reserved=RESERVE, keep_alive_ms=SHORT_MS)).url
    with clients(url, SLOTS) as known:
        assert [connection.read_to_end() for connection in known] == [b""] * SLOTS
        assert status_of(ask(url, ONE_PUBLISH)) == 200


def test_with_tokens_only_those_who_have_one_hold_a_slot(serve: Serve, settings: HttpSettings, tmp_path: Path) -> None:
    url = serve(settings, access=tokens(tmp_path)).url
    with ExitStack() as stack:
        for _ in range(SLOTS + RESERVE):
            unknown = stack.enter_context(RawConnection(url))
            assert exchange(unknown, GOOD) == 401
        for _ in range(2 * SLOTS):
            assert status_of(ask(url, publish(LENGTH, "Connection: close", bearer("publisher")))) == 200


def test_with_tokens_the_reserve_is_for_operators_who_show_theirs(
    serve: Serve, settings: HttpSettings, tmp_path: Path
) -> None:
    url = serve(settings, access=tokens(tmp_path)).url
    declare = request("PUT /v1/topics/corpus/groups/g HTTP/1.1", HOST, JSON, "Content-Length: 2", "Connection: close",
                      bearer("operator"), body=b"{}")  # fmt: skip
    with clients(url, SLOTS, first=publish(LENGTH, bearer("publisher"))):
        assert_overloaded(ask(url, publish(LENGTH, "Connection: close", bearer("publisher"))))
        assert status_of(ask(url, ONE_PUBLISH)) in {401, 503}
        assert status_of(ask(url, declare)) == 200
        assert status_of(ask(url, get("/livez"))) == 200


def test_clients_that_reset_leave_their_slots(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    for raw in (b"", b"GET /", livez(), GOOD, GOOD[:-5], b"garbage\r\n\r\n"):
        for _ in range(3 * SLOTS):
            with RawConnection(url) as connection:
                connection.send(raw)

    ask_until(url, ONE_PUBLISH, 200)
    with clients(url, SLOTS - 1) as known:
        assert [exchange(connection, GOOD) for connection in known] == [200] * len(known)


def test_bodies_that_do_not_come_do_not_hold_the_publishes_of_others(serve: Serve) -> None:
    url = serve(HttpSettings(publishes_max=SLOTS, request_read_ms_max=LONG_MS)).url
    with RawConnection(url) as client, strangers(url, 3 * SLOTS) as slow:
        for connection in slow:
            connection.send(GOOD[:-5])
        statuses = [exchange(client, GOOD) for _ in range(20)]

        assert statuses == [200] * 20


def test_bodies_that_are_announced_and_do_not_come_do_not_hold_the_bytes_of_others(serve: Serve) -> None:
    announced = MIB
    url = serve(HttpSettings(work_bytes_max=2 * SLOTS * announced, request_read_ms_max=LONG_MS)).url
    with RawConnection(url) as client, strangers(url, 3 * SLOTS) as slow:
        for connection in slow:
            connection.send(publish(f"Content-Length: {announced}", body=b"{"))
        statuses = [exchange(client, GOOD) for _ in range(20)]

        assert statuses == [200] * 20


def test_a_server_stops_though_it_has_closed_on_many_strangers(tmp_path: Path, settings: HttpSettings) -> None:
    engine = Engine.open(tmp_path / "data")
    server = HttpServer(
        ServicePorts.of(engine), bind("127.0.0.1", 0), settings=replace(settings, shutdown_timeout_ms=LONG_MS)
    )
    ready = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"on_ready": lambda _url: ready.set()}, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)

    with clients(server.url, SLOTS - 1):
        for _ in range(10):
            with strangers(server.url, 3 * RESERVE):
                assert status_of(ask(server.url, get("/livez"))) == 200
    server.stop()
    thread.join(DEADLINE_S)
    is_stopped = not thread.is_alive()
    server.stop()  # at once, where it was not yet
    thread.join(DEADLINE_S)
    engine.close()

    assert is_stopped


@pytest.mark.processes
def test_silent_strangers_cannot_use_up_the_descriptors_of_a_process(tmp_path: Path) -> None:
    with limited_process(tmp_path / "data") as process, RawConnection(process.url) as client:
        assert exchange(client, GOOD) == 200
        with strangers(process.url, STRANGERS):
            answers = [exchange(client, GOOD) for _ in range(60)]
            ready = [status_of(ask(process.url, get("/readyz"))) for _ in range(10)]
            newcomers = [status_of(ask(process.url, ONE_PUBLISH)) for _ in range(10)]

        assert answers == [200] * 60
        assert ready == [200] * 10
        assert newcomers == [200] * 10


@pytest.mark.processes
def test_many_clients_cannot_use_up_the_descriptors_of_a_process(tmp_path: Path) -> None:
    with limited_process(tmp_path / "data") as process, RawConnection(process.url) as client, ExitStack() as stack:
        assert exchange(client, GOOD) == 200
        kept, refused = 0, 0
        for _ in range(STRANGERS):
            connection = stack.enter_context(RawConnection(process.url))
            status = exchange(connection, GOOD)
            kept += status == 200
            refused += status == 503

        assert kept > DESCRIPTORS // 4
        assert refused > 0
        assert [exchange(client, GOOD) for _ in range(60)] == [200] * 60
        assert [status_of(ask(process.url, get("/readyz"))) for _ in range(10)] == [200] * 10


@pytest.mark.processes
def test_what_strangers_do_fills_no_log(tmp_path: Path) -> None:
    with limited_process(tmp_path / "data") as process:
        quiet = len(process.lines)
        for raw in (b"", b"garbage\r\n\r\n", b"\x16\x03\x01\x00\xa1\x01", GOOD[:50], b"CONNECT a:1 HTTP/1.1\r\n\r\n"):
            with strangers(process.url, STRANGERS) as many:
                for connection in many:
                    connection.send(raw)
                assert status_of(ask(process.url, ONE_PUBLISH)) == 200
        for _ in range(STRANGERS):
            ask(process.url, get("/nowhere"))
            ask(process.url, request("POST /v1/publish HTTP/1.1", HOST, JSON, "Content-Length: 1",
                                     "Connection: close", body=b"{"))  # fmt: skip

    assert len(process.lines) - quiet <= LOG_LINES_MAX, process.lines[: 2 * LOG_LINES_MAX]


def test_a_body_that_a_probe_does_not_want_is_not_gathered(serve: Serve, settings: HttpSettings) -> None:
    url = serve(settings).url
    for path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
        with RawConnection(url) as connection:
            connection.send(request(f"GET {path} HTTP/1.1", HOST, "Content-Length: 999999999999999999"))

            assert status_of(connection.read_final()) == 413, path


def figures(connection: RawConnection) -> dict[str, int]:
    connection.send(request("GET /v1/topics/corpus HTTP/1.1", HOST))
    answer = connection.read_final()
    assert answer is not None
    found: dict[str, int] = json.loads(answer.body)["figures"]
    return found


def bearer(name: str) -> str:
    return f"Authorization: Bearer token-of-{name}"


def tokens(folder: Path) -> Access:
    """A publisher's and an operator's."""
    file = folder / "tokens.toml"
    file.write_text(
        "".join(
            f'[[tokens]]\nname = "{name}"\nsha256 = "{hashlib.sha256(f"token-of-{name}".encode()).hexdigest()}"\n'
            f'roles = ["{role}"]\ntopics = ["*"]\n'
            for name, role in (("publisher", "publish"), ("operator", "admin"))
        )
    )
    return Access(tokens=load_tokens(file))


class LimitedProcess:
    """`outbox broker serve` with few descriptors, and all the lines that it logs."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                *("sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh"),
                *(sys.executable, "-m", "outbox", "broker", "serve", "--data", str(folder), "--port", "0"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(DEADLINE_S)
        self.url = next(
            (line.split()[3] for line in self.lines if line.startswith("broker ready at ")), "".join(self.lines)
        )

    def end(self) -> None:
        """Kill it; all lines are there afterwards."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if line.startswith("broker ready at "):
                self._ready.set()
        self._ready.set()


@contextmanager
def limited_process(folder: Path) -> Iterator[LimitedProcess]:
    """A process with few descriptors, killed in the end."""
    made = LimitedProcess(folder)
    try:
        yield made
    finally:
        made.end()
