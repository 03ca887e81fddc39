"""The connections of a process: a child that was forked has its own, whatever other threads did just then."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import redis

from broker_adapter.redis.connections import ProcessServers, SingleServer

WAIT_SECONDS = 60


@pytest.mark.own_process
def test_a_child_opens_servers_of_its_own_that_was_forked_while_another_thread_did() -> None:
    parent, opening, go_on = os.getpid(), threading.Event(), threading.Event()

    def open_server() -> SingleServer:
        opening.set()
        assert os.getpid() != parent or go_on.wait(WAIT_SECONDS)
        return SingleServer(redis.Redis(port=1), address="127.0.0.1:1")

    servers = ProcessServers(open_server)
    thread = threading.Thread(target=servers.own)
    thread.start()
    assert opening.wait(WAIT_SECONDS)

    child = os.fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # which ends a child that waits for a lock for ever
        servers.own()
        os._exit(0)
    go_on.set()
    _, status = os.waitpid(child, 0)
    thread.join(WAIT_SECONDS)

    assert os.waitstatus_to_exitcode(status) == 0
