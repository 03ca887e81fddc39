"""Tracks which messages of a batch NATS has not answered yet, and the answers. Sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


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


class Exchange(Generic[T]):
    """The unanswered publishes of one event loop. An answer of another shape is not for them, and ignored."""

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
        except msgspec.DecodeError:
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
