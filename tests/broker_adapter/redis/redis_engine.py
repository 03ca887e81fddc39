"""A Redis server as the conformance tests of publishers ask for it, and streams read by the plain client."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import redis

from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.broker_adapter.redis.redis_server import HOST, PASSWORD, RedisServer

BULK_BYTES_MAX: Final = 1024 * 1024
"""The least that a server can be set to (proto-max-bulk-len)."""
READ_SECONDS_MAX: Final = 60
MORE_MS: Final = 50
_OWN_FIELDS: Final = {"id": "outbox-id", "created-at-ms": "outbox-created-at-ms"}
"""Fields of an entry that stand for headers on engines which have headers."""


class RedisEngine:
    """A durable server with a password and without replicas: one copy is enough, as the URL says."""

    makes_topics = True
    attribute_prefix = "ce-"
    too_large_bytes: int | None = BULK_BYTES_MAX + 1

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    @property
    def url(self) -> str:
        """The user is Redis's own, `default`."""
        return f"redis://:{PASSWORD}@{HOST}:{self.server.port}/?wait=0"

    @property
    def wrong_password_url(self) -> str | None:
        """The same user with another password."""
        return f"redis://default:wrong-password@{HOST}:{self.server.port}/?wait=0"

    def make_topic(self, topic: str) -> None:
        """The first XADD makes it."""

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """XREAD from the beginning."""
        with contextlib.closing(self.server.client) as client:
            return read_stream(client, f"outbox:{{{topic}}}", count=count)

    def poisons(self, topic: str) -> list[Poison]:
        """A value that is too large, and keys that hold something else."""
        other = f"{topic}.other"
        with contextlib.closing(self.server.client) as client:
            client.set(f"outbox:{{{other}}}", "no stream")
        return [
            Poison(topic=f"{topic}.poisoned", parts={"body": b"x" * (BULK_BYTES_MAX + 1)}, says="too large"),
            Poison(topic=other, beside=f"{topic}.beside", status=PublishStatus.DEFERRED, says="WRONGTYPE"),
        ]

    def kill(self) -> None:
        """By SIGKILL."""
        self.server.kill()

    def start(self) -> None:
        """Again."""
        self.server.start()


def read_stream(client: redis.Redis | redis.RedisCluster[Any], key: str, *, count: int) -> list[PlainMessage]:
    """Wait for `count` entries of a stream, and for more a moment longer."""
    entries: list[Any] = []
    deadline = time.monotonic() + READ_SECONDS_MAX
    while time.monotonic() < deadline:
        wait_ms = MORE_MS if len(entries) >= count else 1_000
        answer: Any = client.xread({key: entries[-1][0] if entries else "0"}, block=wait_ms)
        new = [entry for stream in (answer or []) for entry in stream[1]]
        entries += new
        if not new and len(entries) >= count:
            break
    return [plain_message(place, fields) for place, fields in entries]


def plain_message(place: bytes, fields: dict[bytes, bytes]) -> PlainMessage:
    """An entry's fields, as the guide says; `place` is its id in the stream, which begins with the server's time."""
    named = {name.decode(): value for name, value in fields.items()}
    key, kind = named.get("key"), named.get("content-type")
    headers = {name.removeprefix("h:"): value.decode() for name, value in named.items() if name.startswith("h:")}
    headers |= {header: named[field].decode() for field, header in _OWN_FIELDS.items() if field in named}
    return PlainMessage(
        id=named["id"].decode(),
        key=None if key is None else key.decode(),
        body=named["body"],
        content_type=None if kind is None else kind.decode(),
        headers=headers,
        stored_at_ms=int(place.partition(b"-")[0]),
    )
