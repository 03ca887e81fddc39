"""Tracks the result of each message of a batch that is published to JetStream. Sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from broker_adapter.nats.errors import CURES, ApiError, treatment_of
from broker_adapter.nats.message_conversion import frame_of, refusal_of, wire_bytes
from broker_adapter.nats.outstanding_publishes import NatsFrame, NoAnswerReason
from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import Message, PublishResult, PublishStatus


class PubAck(msgspec.Struct, frozen=True, gc=False):
    """JetStream's answer to a publish."""

    stream: str = ""
    duplicate: bool = False
    error: ApiError | None = None

    def __post_init__(self) -> None:
        if not self.stream and self.error is None:
            raise ValueError("the answer of a subscriber, and not of a stream")


class NatsBatchResults:
    """Messages, the results that are known, and the frames that have none yet, in order."""

    def __init__(self, messages: Sequence[Message], *, prefix: str) -> None:
        self.frames: dict[int, NatsFrame] = {}
        """By the message's index in the batch."""
        self.problem = ""
        """Why a message has no result yet."""
        self._messages = messages
        self._results: dict[int, PublishResult] = {}
        self._repeated: set[int] = set()
        for index, message in enumerate(messages):
            refusal = refusal_of(message)
            if refusal is None:
                self.frames[index] = frame_of(message, prefix=prefix)
            else:
                self._settle(index, PublishStatus.REJECTED, refusal)

    def reject_larger(self, max_payload: int) -> None:
        """Reject what is larger: a server ends the connection of a client that sends it more."""
        for index, frame in list(self.frames.items()):
            size = wire_bytes(frame)
            if size > max_payload:
                text = f"headers and body are too large: {size:,} bytes of max_payload {max_payload:,}"
                self._settle(index, PublishStatus.REJECTED, f"{text}; {CURES[Treatment.REJECTED]}")

    def settle_answered(self, answers: Sequence[PubAck | NoAnswerReason]) -> dict[str, NoAnswerReason]:
        """Take an answer for each frame, in order; returns why subjects have none.

        Raises StorageFailed where the server can store nothing, once all answers are taken.
        """
        unanswered: dict[str, NoAnswerReason] = {}
        full = ""
        for index, answer in zip(list(self.frames), answers, strict=True):
            if isinstance(answer, PubAck):
                full = self._settle_answered(index, answer) or full
            else:
                self._repeated.add(index)
                unanswered[self.frames[index].subject] = answer
                self.problem = f"{len(self.frames)} of {len(self._messages)} messages: {answer.value}"
        if full:
            raise StorageFailed(full)
        return unanswered

    def defer(self, subject: str, error: str) -> None:
        """Defer what has no result on a subject."""
        for index in [index for index, frame in self.frames.items() if frame.subject == subject]:
            self._settle(index, PublishStatus.DEFERRED, error)

    def answered(self) -> dict[int, PublishResult]:
        """The results that are known, by index."""
        return dict(self._results)

    def in_order(self) -> list[PublishResult]:
        """All results, once no frame is left."""
        return [self._results[index] for index in range(len(self._messages))]

    def _settle_answered(self, index: int, answer: PubAck) -> str | None:
        """Settle a message; returns why the server can store nothing, if that is the answer."""
        if answer.error is None:
            # What is sent twice here is mostly its own duplicate, and says nothing of an earlier call.
            is_duplicate = answer.duplicate and index not in self._repeated
            self._settle(index, PublishStatus.DUPLICATE if is_duplicate else PublishStatus.STORED)
            return None
        treatment = treatment_of(answer.error)
        origin = f"stream {answer.stream}" if answer.stream else "JetStream"
        error = f"{origin}: {answer.error.description} (error {answer.error.err_code}); {CURES[treatment]}"
        match treatment:
            case Treatment.REJECTED:
                self._settle(index, PublishStatus.REJECTED, error)
            case Treatment.DEFERRED:
                self._settle(index, PublishStatus.DEFERRED, error)
            case Treatment.STORAGE:
                return error
            case _:  # not now: it is published again
                self._repeated.add(index)
                self.problem = error
        return None

    def _settle(self, index: int, status: PublishStatus, error: str | None = None) -> None:
        self._results[index] = PublishResult(self._messages[index].id, status, error)
        self.frames.pop(index, None)
