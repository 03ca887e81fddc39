"""An Outbox closes the broker that it connected behind its last request, and within the time that it is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from outbox import Message
from outbox_broker.http.server import HttpServer
from tests.broker_adapter.servers import served
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy, cutting_tcp_proxy
from tests.outbox.shop import Payment, Shop

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.01


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    """A broker over HTTP."""
    with served(tmp_path / "broker-data") as server:
        yield server


@pytest.fixture
def proxy(server: HttpServer) -> Iterator[CuttingTcpProxy]:
    """The way to that broker."""
    with cutting_tcp_proxy(int(server.url.rpartition(":")[2])) as proxy:
        yield proxy


def test_what_a_request_stored_that_outlived_the_close_is_settled(sqlite_shop: Shop, proxy: CuttingTcpProxy) -> None:
    box = sqlite_shop.box(f"http://127.0.0.1:{proxy.port}", ordered=["paid"])  # so a key's messages go one by one
    proxy.partition()
    with Session(sqlite_shop.engine) as session, session.begin():
        session.add(Payment(id=1))
        for body in (b"1", b"2", b"3"):
            box.publish("paid", body, key="k", session=session)

    emptied = box.close(timeout_ms=100)
    proxy.heal()

    wait_for(lambda: not sqlite_shop.rows())
    assert (emptied, sqlite_shop.archived()) == (False, 3)
    wait_for(lambda: "outbox-close" not in {thread.name for thread in threading.enumerate()})


def test_no_broker_holds_a_close_up_for_longer_than_it_was_given(sqlite_shop: Shop, proxy: CuttingTcpProxy) -> None:
    box = sqlite_shop.box(f"http://127.0.0.1:{proxy.port}")
    proxy.partition()
    submitted = box.broker.submit(Message(id="1", topic="paid", body=b""))  # type: ignore[attr-defined]

    box.close(timeout_ms=100)

    assert not submitted.done(), "the broker's own close waits for it"
    proxy.heal()


def wait_for(condition: object) -> None:
    deadline, nothing = time.monotonic() + DEADLINE_SECONDS, threading.Event()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        nothing.wait(POLL_SECONDS)
