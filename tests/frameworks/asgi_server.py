"""Serves an ASGI application on a free port, as its users would, from a thread. Not a test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

DEADLINE_SECONDS = 300


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application's URL; its lifespan has begun, and is over at the end."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = _Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            if not server.ready.wait(DEADLINE_SECONDS):
                raise TimeoutError("the application did not start")
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(DEADLINE_SECONDS)
