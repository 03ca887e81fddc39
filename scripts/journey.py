#!/usr/bin/env python3
"""Runs one message from `publish` to `ack` under a tracer, and prints the modules entered, by their first entry.

    .venv/bin/python scripts/journey.py [--json]

SQLite in a file, the broker over HTTP in threads of this process, a consumer with an inbox, a topic in the order of its
keys. Two journeys, as in docs/ARCHITECTURE.md: `publish`, until the row has left the message table, and `pull`, until
the ack is answered. Each module stands under the thread that entered it first; a hop is a call from a function of one
of our modules into a function of another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Outbox, connect, consumer, run_consumers
from outbox.migrate import upgrade
from outbox_broker.engine.engine import Engine
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer, bind
from outbox_broker.http.service_ports import ServicePorts

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("outbox", "outbox_core", "broker_adapter", "outbox_broker")
DEADLINE_SECONDS: Final = 60.0
TOPIC: Final = "journey.begun"
BY_THE_CLOCK: Final = {"broker-timer", "broker-keeper"}
"""Threads that look for what is due or outdated now and then: on no message's way."""


@dataclass(slots=True)
class Journey:
    """What one journey entered: modules by the thread that was first in them, the modules of all calls in their order,
    and the hops by calling and called module.
    """

    threads: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    hops: Counter[tuple[str, str]] = field(default_factory=Counter)

    def enter(self, module: str, caller: str | None) -> None:
        """Note a call."""
        self.threads.setdefault(module, threading.current_thread().name)
        self.calls.append(module)
        if caller is not None and caller != module:
            self.hops[caller, module] += 1

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"modules": list(self.threads.items()), "calls": self.calls, "hops": self.hops.total()}


class Tracer:
    """Notes the calls of our functions, in this thread and those started later, in `journey`, if there is one."""

    def __init__(self) -> None:
        self.journey: Journey | None = None
        self._modules: dict[CodeType, str | None] = {}

    def __enter__(self) -> Self:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Journey]:
        """Note the calls of this block, in whatever thread."""
        self.journey = journey = Journey()
        try:
            yield journey
        finally:
            self.journey = None

    def _called(self, frame: FrameType, event: str, _arg: object) -> None:
        journey = self.journey
        if journey is None or event != "call" or threading.current_thread().name in BY_THE_CLOCK:
            return
        module = self._module(frame.f_code)
        if module is not None:
            journey.enter(module, self._caller(frame.f_back))

    def _caller(self, frame: FrameType | None) -> str | None:
        while frame is not None:  # past SQLAlchemy, contextlib and asyncio, which only hand the call on
            module = self._module(frame.f_code)
            if module is not None:
                return module
            frame = frame.f_back
        return None

    def _module(self, code: CodeType) -> str | None:
        if code not in self._modules:
            self._modules[code] = _module_of(code)
        return self._modules[code]


def run() -> dict[str, Journey]:
    """Both journeys."""
    with Tracer() as tracer, tempfile.TemporaryDirectory() as folder, _broker(Path(folder) / "broker") as url:
        database = create_engine(f"sqlite:///{folder}/shop.db")
        upgrade(database)
        handled = threading.Event()

        @consumer(TOPIC, group="traveller", inbox=database, ordered=True)
        def arrive(_session: Session, _delivery: Delivery) -> None:
            handled.set()

        with Outbox(database, broker=url, ordered=[TOPIC]) as box:

            @box.transactional
            def depart(_session: Session) -> None:
                box.publish(TOPIC, {"number": 1}, key="k")

            with tracer.noting() as published:
                depart()
                assert box.close(timeout_ms=60_000)  # until it has sent what it was offered
        with contextlib.closing(connect(url)) as broker, tracer.noting() as pulled:
            runner = run_consumers([arrive], broker=broker)
            assert handled.wait(DEADLINE_SECONDS)
            runner.stop()
        database.dispose()
    return {"publish": published, "pull": pulled}


@contextlib.contextmanager
def _broker(folder: Path) -> Iterator[str]:
    engine, bound, ready = Engine.open(folder), bind("127.0.0.1", 0), threading.Event()
    server = HttpServer(ServicePorts.of(engine), bound, settings=HttpSettings())
    thread = threading.Thread(
        target=server.run, kwargs={"on_ready": lambda _url: ready.set()}, name="broker's event loop"
    )
    thread.start()
    try:
        assert ready.wait(DEADLINE_SECONDS)
        yield server.url
    finally:
        server.stop()
        thread.join(DEADLINE_SECONDS)
        bound.close()
        engine.close()


def _module_of(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if code.co_name == "<module>" or not path.is_relative_to(ROOT):
        return None
    module = path.relative_to(ROOT)
    return str(module) if module.parts[0] in PACKAGES else None


def _show(name: str, journey: Journey) -> None:
    print(
        f"{name}: {len(journey.threads)} modules, {len(journey.hops)} arrows between them, {journey.hops.total()} hops"
    )
    before = None
    for module, thread in journey.threads.items():
        if thread != before:
            print(f"  {thread}")
        print(f"    {module}")
        before = thread


def main() -> None:
    """Travel, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="for a program to read")
    chosen = parser.parse_args()
    journeys = run()
    if chosen.json:
        print(json.dumps({name: journey.figures() for name, journey in journeys.items()}))
        return
    for name, journey in journeys.items():
        _show(name, journey)
    print(f"both: {len({module for journey in journeys.values() for module in journey.threads})} modules")


if __name__ == "__main__":
    main()
