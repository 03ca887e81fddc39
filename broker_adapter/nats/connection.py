"""Connects to one NATS server on an event loop, and pipelines messages. Does not interpret the answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import msgspec
from nats import errors as client_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from broker_adapter.nats.event_loop import ClientLoop
from outbox_core.common.errors import DECODE_ERRORS, NotAuthorized

T = TypeVar("T")

CLOSE_SECONDS_MAX: Final = 0.5
_STATUS: Final = "Status"
_NO_RESPONDERS: Final = "503"
_FORBIDDEN: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"")


class NotEncrypted(client_errors.Error):
    """The URL asks for TLS, and the server does not offer it."""

    def __str__(self) -> str:
        return "the server offers no TLS; configure its `tls` block, or use nats://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`window`: unanswered messages of one batch on the wire. After `quiet_s` without any answer, what is outstanding
    is in doubt. `connect_s` bounds each step of a connection's opening.
    """

    window: int = 256
    quiet_s: float = 2.0
    connect_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Credentials for a server, of one kind at most; `tls` None: plain text."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    creds_file: str | None = None
    nkey_file: str | None = None
    tls: ssl.SSLContext | None = None
    inbox_prefix: str = "_INBOX"


class NatsConnection:
    """One client of nats-py. It never reconnects by itself, so that nothing is sent that a caller has given up."""

    def __init__(self, loop: ClientLoop, *, limits: Limits) -> None:
        self._loop = loop
        self._limits = limits
        self._client = Client()
        self._waiting: dict[str, tuple[UnansweredBatch[Any], int]] = {}
        self._numbers = itertools.count()
        self._inbox = ""
        self._is_deaf = False
        self._reported: BaseException | None = None

    @classmethod
    async def open(cls, server: str, *, login: Login, limits: Limits, loop: ClientLoop) -> NatsConnection:
        """Connect to `nats://host:port` and log in. Raises exceptions of the client, OSError and TimeoutError."""
        connection = cls(loop, limits=limits)
        try:
            await connection._connect(server, login)
        except client_errors.NoServersError as error:
            await connection.close()
            raise connection._reported or error from error  # why the one server could not be reached
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Whether it can be used. One that may not receive answers never will: a server does not take up again what it
        refused, though its permissions have changed since.
        """
        return self._client.is_connected and not self._is_deaf

    @property
    def max_payload(self) -> int:
        """Bytes of headers and body together that this server takes."""
        return self._client.max_payload

    @property
    def version(self) -> str:
        """The server's."""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def exchange(
        self, frames: Sequence[NatsFrame], shape: type[T], *, deadline: float
    ) -> list[T | NoAnswerReason]:
        """Send in this order, as many at a time as the window has room for; an answer each.

        Ends early where the server is silent; what is outstanding then may have arrived, or arrive yet. Raises
        NotAuthorized where this user may not receive answers.
        """
        self._check_hears()
        exchange = UnansweredBatch(frames, shape)
        subjects: list[str] = []
        try:
            async with asyncio.timeout_at(deadline):
                for index, frame in enumerate(frames):
                    await exchange.room(self._limits.window - 1, quiet_s=self._limits.quiet_s)
                    subjects.append(f"{self._inbox}.{next(self._numbers)}")
                    self._waiting[subjects[-1]] = exchange, index
                    exchange.sent(index)
                    await self._send(frame, reply=subjects[-1], deadline=deadline)
                await exchange.room(0, quiet_s=self._limits.quiet_s)
        except TimeoutError:
            pass  # what has no answer is silent
        except (client_errors.Error, OSError):
            exchange.lose()
        finally:
            for subject in subjects:
                self._waiting.pop(subject, None)
        self._check_hears()
        return exchange.answers

    async def is_alive(self, *, deadline: float) -> bool:
        """Whether the server answers a ping. Close the connection where it does not: the client is broken then."""
        try:
            async with asyncio.timeout_at(min(deadline, self._loop.time() + self._limits.quiet_s)):
                await self._client.flush()
        except (client_errors.Error, OSError):
            return False
        return self.is_open

    async def close(self) -> None:
        """Send what is under way, for a moment, then cut. Idempotent."""
        try:
            with contextlib.suppress(client_errors.Error, OSError):
                async with asyncio.timeout(CLOSE_SECONDS_MAX):
                    await self._client.close()
        finally:
            self._loop.cut_connections()
            await asyncio.sleep(0)  # the transport's own end, so that it is not left open

    async def _connect(self, server: str, login: Login) -> None:
        await self._client.connect(
            server,
            name="outbox-mq",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=self._limits.connect_s,  # type: ignore[arg-type]
            flush_timeout=self._limits.quiet_s,
            inbox_prefix=login.inbox_prefix,
            tls=login.tls,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            **_secrets(login, self._released),
        )
        self._check_encrypted(login)
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_message)
        # A refusal of the subscription comes before the second answer: nothing is sent whose own answer could not be
        # received. The client may send the first ping before the subscription.
        async with asyncio.timeout(self._limits.quiet_s):
            for _ in range(2):
                await self._client.flush()

    def _check_encrypted(self, login: Login) -> None:
        if login.tls is not None and not self._loop.is_encrypted:
            raise NotEncrypted

    def _check_hears(self) -> None:
        if self._is_deaf:
            raise NotAuthorized(
                f"this user may not receive answers of JetStream: allow it to subscribe to {self._inbox}.>, or name "
                "what it may with ?inbox_prefix="
            )

    def _released(self, secret: str, login: Login) -> str:
        """Called by the client as it logs in: a password goes to nobody who took the TLS away."""
        if login.tls is not None and not self._loop.is_encrypted:
            raise NotEncrypted
        return secret

    async def _send(self, frame: NatsFrame, *, reply: str, deadline: float) -> None:
        headers = None if frame.headers is None else dict(frame.headers)
        await self._client.publish(frame.subject, frame.body, reply=reply, headers=headers)
        if self._loop.time() > deadline:  # the client swallows the cancellation that a time-out is
            raise TimeoutError

    async def _on_message(self, message: Msg) -> None:
        exchange, index = self._waiting.get(message.subject, (None, 0))
        if exchange is None:
            return
        if message.headers is not None and message.headers.get(_STATUS) == _NO_RESPONDERS:
            exchange.refused(index)
        else:
            exchange.answered(index, message.data)

    async def _on_error(self, error: Exception) -> None:
        """Reports of the client: why it cannot connect, and what this user may not do."""
        self._reported = error
        refusal = _FORBIDDEN.search(str(error))
        if refusal is None:
            return
        operation, subject = refusal.groups()
        self._is_deaf = self._is_deaf or operation == "subscription"
        for exchange in self._under_way():
            exchange.lose() if self._is_deaf else exchange.forbid(subject)

    async def _on_closed(self) -> None:
        for exchange in self._under_way():
            exchange.lose()

    def _under_way(self) -> set[UnansweredBatch[Any]]:
        return {exchange for exchange, _ in self._waiting.values()}


def _secrets(login: Login, released: Callable[[str, Login], str]) -> Mapping[str, Any]:
    """The client's options for a login."""
    if login.creds_file is not None:
        return {"user_credentials": login.creds_file}
    if login.nkey_file is not None:
        return {"nkeys_seed": login.nkey_file}
    if login.token is not None:
        token = login.token
        return {"token": lambda: released(token, login)}
    if login.user is not None:
        user, password = login.user, login.password or ""
        return {"user": lambda: user, "password": lambda: released(password, login)}
    return {}


class NoAnswerReason(StrEnum):
    """Why a message has no answer."""

    NO_RESPONDERS = "no stream takes it"
    FORBIDDEN = "this user may not publish to it"
    SILENT = "the server did not answer"
    LOST = "the connection was lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsFrame:
    """A message, or a request, as it goes over the wire."""

    subject: str
    body: bytes
    headers: Mapping[str, str] | None = None


class UnansweredBatch(Generic[T]):
    """Which messages of a batch NATS has not answered yet, and the answers. Of one event loop; sends nothing. An answer
    of another shape is not for them, and ignored.
    """

    def __init__(self, frames: Sequence[NatsFrame], shape: type[T]) -> None:
        self.answers: list[T | NoAnswerReason] = [NoAnswerReason.LOST] * len(frames)
        self._frames = frames
        self._decode = msgspec.json.Decoder(shape).decode
        self._outstanding: set[int] = set()
        self._progress = asyncio.Event()

    def sent(self, index: int) -> None:
        """A message is about to be written to the connection."""
        self.answers[index] = NoAnswerReason.SILENT
        self._outstanding.add(index)

    def answered(self, index: int, data: bytes) -> None:
        """The reply to a message has come."""
        if index not in self._outstanding:
            return
        try:
            self._settle(index, self._decode(data))
        except DECODE_ERRORS:
            return

    def refused(self, index: int) -> None:
        """The server knows nobody who takes the message."""
        if index in self._outstanding:
            self._settle(index, NoAnswerReason.NO_RESPONDERS)

    def forbid(self, subject: str) -> None:
        """The server lets this user not publish to a subject, given in lower case, as the client gives it."""
        for index in [index for index in self._outstanding if self._frames[index].subject.lower() == subject]:
            self._settle(index, NoAnswerReason.FORBIDDEN)

    def lose(self) -> None:
        """The connection has ended."""
        for index in list(self._outstanding):
            self._settle(index, NoAnswerReason.LOST)

    async def room(self, outstanding_max: int, *, quiet_s: float) -> None:
        """Wait until no more than so many are outstanding. Raises TimeoutError after `quiet_s` without an answer."""
        while len(self._outstanding) > outstanding_max:
            self._progress.clear()
            async with asyncio.timeout(quiet_s):
                await self._progress.wait()

    def _settle(self, index: int, answer: T | NoAnswerReason) -> None:
        self.answers[index] = answer
        self._outstanding.discard(index)
        self._progress.set()
