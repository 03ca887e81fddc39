"""Compares HTTP servers in front of the broker's routes: our connection, plain ASGI, Starlette, Granian.

    python -m benchmarks.broker.http_fronts [--rounds 5] [--seconds 2] [--before TREE] [--json]

Each front serves the same application (outbox_broker/http/application.py) on an engine of its own, in a process of its
own, on a folder in memory, so that what differs is the front. `--before` adds `outbox broker serve` of another tree. A
client process sends prepared requests over raw sockets, the next on each connection as soon as the answer is there:
publishes of one message of 512 bytes, of 500, and pulls of one message with its ack, on 1 and on 32 connections.
Requests a second, medians of rounds whose order rotates. Granian has to be installed (`pip install granian`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.harness.report import machine, table, talk

FRONTS: Final = ("connection", "plain_asgi", "starlette", "granian")
LOADS: Final = ("publish_1", "publish_500", "pull_ack_1")
CONNECTIONS: Final = (1, 32)
LENGTH: Final = re.compile(rb"\r\ncontent-length: ?(\d+)", re.IGNORECASE)
TYPE: Final = "application/vnd.msgpack"


# -- servers -----------------------------------------------------------------------------------------------------------


def serve(front: str, folder: Path, port: int) -> None:
    """Serve with one front until killed."""
    from outbox_broker.engine.engine import Engine
    from outbox_broker.http.access_control import Access
    from outbox_broker.http.http_settings import HttpSettings
    from outbox_broker.http.request_context import Services
    from outbox_core.common.clock import SystemClock

    engine = Engine.open(folder)
    if front == "connection":
        from outbox_broker.http.server import HttpServer, bind
        from outbox_broker.http.service_ports import ServicePorts

        server = HttpServer(ServicePorts.of(engine), bind("127.0.0.1", port), settings=HttpSettings())
        server.run(on_ready=lambda _url: _ready())
        return
    from outbox_broker.http.application import Application

    services = Services.of(ServicePorts.of(engine), HttpSettings(), access=Access(), clock=SystemClock())
    application = Application(services)
    {"plain_asgi": _uvicorn, "starlette": _starlette, "granian": _granian}[front](application, port)


def _ready() -> None:
    print("ready", flush=True)


async def _answered(application: Any, method: str, path: str, query: str, headers: Mapping[str, str], body: Any) -> Any:
    """What a request is answered, by the application; the body is read once the request is admitted."""
    from outbox_broker.http.request_reader import RequestHead
    from outbox_broker.http.responses import Response

    length = int(headers.get("content-length", 0))
    head = RequestHead(method=method, path=path, query=query, headers=headers, content_length=length)
    admitted = application.admit(head, is_reserved=False)
    if isinstance(admitted, Response):
        return admitted
    data, pool, loop = await body(), application.pool_of(admitted), asyncio.get_running_loop()
    if pool is None:
        response = await application.wait_for(admitted, data, loop.create_future())
    else:
        response = await loop.run_in_executor(pool, application.work, admitted, data)
    application.finish(admitted, response)
    admitted.lease.release()
    return response


def _uvicorn(application: Any, port: int) -> None:
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> bytes:
            pieces, more = [], True
            while more:
                event = await receive()
                pieces.append(event.get("body", b""))
                more = event.get("more_body", False)
            return b"".join(pieces)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        response = await _answered(application, scope["method"], path, query, headers, body)
        fields = [
            (b"content-type", response.media_type.encode()), (b"content-length", b"%d" % len(response.body)),
            (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": response.status, "headers": fields})
        await send({"type": "http.response.body", "body": response.body})

    _run_uvicorn(uvicorn, app, port)


def _starlette(application: Any, port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from outbox_broker.http.routes import ROUTES

    async def endpoint(request: Request) -> Response:
        found = await _answered(
            application, request.method, request.scope["raw_path"].decode("latin-1"), request.url.query,
            request.headers, request.body,
        )  # fmt: skip
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(found.body, found.status, headers, media_type=found.media_type)

    _run_uvicorn(uvicorn, Starlette(routes=[Route(one.path, endpoint, methods=[one.method]) for one in ROUTES]), port)


def _run_uvicorn(uvicorn: Any, app: Any, port: int) -> None:
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, lifespan="off", access_log=False, log_level="warning", http="httptools",
        loop="uvloop", proxy_headers=False, server_header=False,
    )  # fmt: skip

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            _ready()

    Server(config).run()


def _granian(application: Any, port: int) -> None:
    import uvloop
    from granian.server.embed import Server

    async def app(scope: Any, protocol: Any) -> None:
        headers = {name: scope.headers.get(name) for name in scope.headers}
        found = await _answered(application, scope.method, scope.path, scope.query_string, headers, protocol)
        fields = [
            ("content-type", found.media_type), ("cache-control", "no-store"), ("x-content-type-options", "nosniff"),
        ]  # fmt: skip
        protocol.response_bytes(found.status, fields, found.body)

    async def main() -> None:
        server = Server(app, address="127.0.0.1", port=port, interface="rsgi")
        serving = asyncio.create_task(server.serve())
        await asyncio.sleep(1)
        _ready()
        await serving

    uvloop.run(main())


# -- client ------------------------------------------------------------------------------------------------------------


def _request(path: str, body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: bench\r\naccept: {TYPE}\r\ncontent-type: {TYPE}\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Loader:
    """One connection's next request, made of the last answer."""

    def __init__(self, load: str, name: str) -> None:
        self._load, self._topic, self._count, self._receipt = load, f"t.{name}", 0, ""
        self._body = b"x" * 512

    def first(self) -> bytes:
        """What the connection sends first."""
        if self._load != "pull_ack_1":
            return self.next(b"")
        return _request(f"/v1/topics/{self._topic}/messages", {"messages": [self._message() for _ in range(1_000)]})

    def next(self, answer: bytes) -> bytes:
        """What follows an answer's body."""
        path = f"/v1/topics/{self._topic}"
        if self._load.startswith("publish"):
            size = int(self._load.rpartition("_")[2])
            return _request(f"{path}/messages", {"messages": [self._message() for _ in range(size)]})
        found = msgspec.msgpack.decode(answer)
        if found.get("deliveries"):
            return _request(f"{path}/groups/g/ack", {"receipts": [one["receipt"] for one in found["deliveries"]]})
        if "deliveries" in found:
            return self.first()
        return _request(f"{path}/groups/g/pull", {"max_messages": 1})

    def _message(self) -> dict[str, object]:
        self._count += 1
        return {"body": self._body, "id": f"{self._topic}.{self._count}"}


def measure(port: int, load: str, connections: int, seconds: float, name: str) -> float:
    """Requests a second."""
    selector = selectors.DefaultSelector()
    loaders = [Loader(load, f"{name}.{number}") for number in range(connections)]
    for loader in loaders:
        made = socket.create_connection(("127.0.0.1", port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(loader.first())
        selector.register(made, selectors.EVENT_READ, (loader, bytearray()))
    counted, begins = 0, time.perf_counter() + seconds / 4
    ends = begins + seconds
    while (now := time.perf_counter()) < ends:
        for key, _ in selector.select(1):
            loader, received = key.data
            received += key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            end = received.find(b"\r\n\r\n")
            if end < 0:
                continue
            size = end + 4 + int(LENGTH.search(received)[1])  # type: ignore[index]
            if len(received) < size:
                continue
            if not received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(bytes(received[:500]))
            body = bytes(received[end + 4 : size])
            del received[:size]
            counted += now >= begins
            key.fileobj.sendall(loader.next(body))  # type: ignore[union-attr]
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return counted / seconds


# -- rounds ------------------------------------------------------------------------------------------------------------


def _start(front: str, before: Path | None, folder: str) -> tuple[subprocess.Popen[str], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.broker.http_fronts", "--serve", front, folder, str(port)]
    environment, where = dict(os.environ), Path.cwd()
    stream = "stdout"
    if front == "before" and before is not None:
        command = [sys.executable, "-m", "outbox", "broker", "serve", "--data", f"{folder}/data", "--port", str(port)]
        environment["PYTHONPATH"], where, stream = str(before), before, "stderr"
    process = subprocess.Popen(command, text=True, env=environment, cwd=where, **{stream: subprocess.PIPE})
    said = iter(getattr(process, stream).readline, "")
    if not any("ready" in line for line in said):
        raise RuntimeError(f"{front} did not start")
    return process, port


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        front, folder, port = options.serve
        serve(front, Path(folder), int(port))
        return
    fronts = (*FRONTS, *(("before",) if options.before else ()))
    figures: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for front in (*fronts[number % len(fronts) :], *fronts[: number % len(fronts)]):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                process, port = _start(front, options.before, folder)
                try:
                    for load in LOADS:
                        for connections in CONNECTIONS:
                            name = f"{load}.{connections}"
                            found = measure(port, load, connections, options.seconds, name)
                            figures[front, load, connections].append(found)
                finally:
                    process.kill()
                    process.wait()
            talk.print(f"round {number + 1}: {front}")
    rows = [
        [front, *(f"{statistics.median(figures[front, load, count]):,.0f}" for load in LOADS for count in CONNECTIONS)]
        for front in fronts
    ]
    if options.json:
        print(json.dumps({" ".join(map(str, key)): found for key, found in figures.items()}))
        return
    talk.print(machine())
    table("requests a second", ["front", *(f"{load} at {count}" for load in LOADS for count in CONNECTIONS)], rows)


if __name__ == "__main__":
    main()
