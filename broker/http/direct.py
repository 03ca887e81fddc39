"""The application with a short way for what is asked thousands of times a second. Not the routes, nor their handlers.

FastAPI and Starlette pass a request through a stack of middleware and match its path against every route: a third of
what a small request costs. None of that says anything about a publish, a pull or a settlement, which begin and end in
their endpoint. Everything else takes the usual way, and so does whatever is odd about these: another method, an empty
name, a path of another shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]

_TOPIC_PARTS: Final = 5
_GROUP_PARTS: Final = 7
_PUBLISH: Final = ["", "v1", "publish"]
DIRECT: Final = frozenset({"messages", "publish", "pull", "ack", "nack", "extend"})
"""The last parts of the paths that go the short way, all of them by POST."""


class BrokerApp(FastAPI):
    """FastAPI, but for the endpoints that are in `direct`, by the last part of their path."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.direct: dict[str, Endpoint] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope.get("raw_path"):
            last, names = path_names(scope["raw_path"])
            endpoint = self.direct.get(last)
            if endpoint is not None and names is not None:
                response = await endpoint(Request({**scope, "path_params": names}, receive))
                await response(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def path_names(raw_path: bytes) -> tuple[str, dict[str, str] | None]:
    """The last part of a path, and its topic and group where it is /v1/topics/T/messages, /v1/topics/T/groups/G/last
    or /v1/publish, which has neither.

    Parts are split before they are decoded, so that `..%2Fx` is one odd name.
    """
    parts = raw_path.decode("latin-1").split("/")
    last = parts[-1]
    if parts == _PUBLISH:
        return last, {}
    if parts[:3] != ["", "v1", "topics"] or last == "publish":
        return last, None
    if len(parts) == _TOPIC_PARTS and last == "messages" and parts[3]:
        return last, {"topic": parts[3]}
    if len(parts) == _GROUP_PARTS and last != "messages" and parts[4] == "groups" and parts[3] and parts[5]:
        return last, {"topic": parts[3], "group": parts[5]}
    return last, None
