"""The one connection of an event loop: opened when it is needed, to the next server where one cannot be reached."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from nats import errors as client_errors

from broker_adapter.nats.connection import Limits, Login, NatsConnection
from broker_adapter.nats.errors import exception_for
from broker_adapter.nats.event_loop import ClientLoop
from outbox_core.common.errors import BrokerUnavailable, NotAuthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsServers:
    """The addresses of a cluster or a single server, as `nats://host:port`; `place` is shown in messages."""

    addresses: tuple[str, ...]
    place: str
    login: Login
    limits: Limits = field(default_factory=Limits)


class FailoverConnection:
    """Connects on one event loop, whose coroutines share the connection."""

    def __init__(self, servers: NatsServers, *, loop: ClientLoop, random: Random) -> None:
        self._servers = servers
        self._loop = loop
        self._addresses = random.sample(servers.addresses, len(servers.addresses))
        self._lock = asyncio.Lock()
        self._connection: NatsConnection | None = None

    async def connected(self, *, deadline: float) -> NatsConnection:
        """An open connection. Raises NotAuthenticated, and BrokerUnavailable where no server can be reached."""
        async with self._lock:
            if self._connection is not None:
                if self._connection.is_open:
                    return self._connection
                await self._connection.close()
                self._connection = None
            error = BrokerUnavailable(f"NATS at {self._servers.place} was not asked: no time was left")
            for _ in self._servers.addresses:
                try:
                    async with asyncio.timeout_at(deadline):
                        self._connection = await self._open_next()
                    return self._connection
                except NotAuthorized:
                    raise
                except BrokerUnavailable as refused:
                    error = refused
                except TimeoutError:
                    break
            raise error

    async def drop(self, connection: NatsConnection) -> None:
        """End a connection that is broken."""
        async with self._lock:
            if self._connection is connection:  # else another batch was quicker, and this would cut the next one
                self._connection = None
                await connection.close()

    async def _open_next(self) -> NatsConnection:
        address = self._addresses.pop(0)
        self._addresses.append(address)
        try:
            return await NatsConnection.open(
                address, login=self._servers.login, limits=self._servers.limits, loop=self._loop
            )
        except (client_errors.Error, OSError) as error:
            raise exception_for(error, what=f"NATS at {address.partition('://')[2]} cannot be used") from error
