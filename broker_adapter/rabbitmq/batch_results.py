"""A batch that is published to RabbitMQ, what may be sent together, and what is known of each message. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pika import spec
from pika.exceptions import ChannelClosedByBroker

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.rabbitmq.channel import Answer, ConfirmOutcome
from broker_adapter.rabbitmq.errors import CURES, NACK_CURE, exception_for_code, explained, treatment_of
from broker_adapter.rabbitmq.message_conversion import AmqpFrame, frame_of, header_bytes, refusal_of
from outbox_core.messages.message import Message, PublishResult, PublishStatus

PIPELINED_BYTES: Final = 64 * 1024
"""A body up to this size is sent with others before it is known that the server takes such a size."""


class RabbitMqBatchResults:
    """Messages, the results that are known, and the frames that have none yet, in order."""

    def __init__(self, messages: Sequence[Message], *, frame_bytes_max: int, place: str) -> None:
        """`frame_bytes_max`: what all properties of a message must fit in; `place`: the servers, for errors."""
        self.pending: dict[int, AmqpFrame] = {}
        """By the message's number in the batch."""
        self._messages = messages
        self._place = place
        self._results: dict[int, PublishResult] = {}
        self._alone: set[int] = set()
        for number, message in enumerate(messages):
            frame = frame_of(message)
            refusal = refusal_of(message)
            if refusal is None and header_bytes(frame) > frame_bytes_max:
                refusal = f"the headers are too large for the server's frame_max of {frame_bytes_max:,} bytes; raise it"
            if refusal is None:
                self.pending[number] = frame
            else:
                self._settle(number, PublishStatus.REJECTED, refusal)

    def next_run(self, *, confirmed_bytes_max: int) -> Mapping[int, AmqpFrame]:
        """The frames to send next, by number: those that are sent together, or one by itself.

        A server ends the channel for a message that is too large, and all that it did not confirm yet is in doubt: so
        one that is larger than any that it took before is sent when nothing else is under way.
        """
        together: dict[int, AmqpFrame] = {}
        for number, frame in self.pending.items():
            if number in self._alone or len(frame.body) > max(PIPELINED_BYTES, confirmed_bytes_max):
                return together or {number: frame}
            together[number] = frame
        return together

    def settle(self, run: Mapping[int, AmqpFrame], answer: Answer) -> None:
        """Take the answer to a run. What was in doubt because of one message stays pending, and is sent one by one.

        Raises NotAuthorized, StorageFailed and BrokerUnavailable for what is not about single messages.
        """
        for number, outcome in zip(run, answer.outcomes, strict=True):
            topic = self._messages[number].topic
            match outcome:
                case ConfirmOutcome.CONFIRMED:
                    self._settle(number, PublishStatus.STORED)
                case ConfirmOutcome.RETURNED:
                    text = f"no queue takes the topic {topic}; {CURES[spec.NO_ROUTE]}"
                    self._settle(number, PublishStatus.DEFERRED, text)
                case ConfirmOutcome.NACKED:
                    self._settle(number, PublishStatus.DEFERRED, f"a queue refused the topic {topic}: {NACK_CURE}")
                case None:
                    pass
        if answer.refusal is not None:
            self._refuse([number for number in run if number in self.pending], answer.refusal)

    def in_order(self) -> list[PublishResult]:
        """All results, once nothing is pending. After a message that waits, none of its key is reported as stored: it
        is sent again behind that one.
        """
        waiting: dict[tuple[str, str], str] = {}
        results = []
        for number, message in enumerate(self._messages):
            result = self._results[number]
            if message.key is not None:
                place = message.topic, message.key
                if result.status is PublishStatus.DEFERRED:
                    waiting.setdefault(place, message.id)
                elif place in waiting and result.status is PublishStatus.STORED:
                    text = f"an older message of its key waits: {waiting[place]}"
                    result = PublishResult(message.id, PublishStatus.DEFERRED, text)
            results.append(result)
        return results

    def _refuse(self, numbers: Sequence[int], refusal: ChannelClosedByBroker) -> None:
        code, text = refusal.reply_code, refusal.reply_text
        match treatment_of(code, text):
            case Treatment.DEFERRED:  # the exchange, which is that of all
                for number in numbers:
                    self._settle(number, PublishStatus.DEFERRED, explained(code, text))
            case Treatment.REJECTED if len(numbers) == 1:
                self._settle(numbers[0], PublishStatus.REJECTED, explained(code, text))
            case Treatment.REJECTED:
                self._alone.update(numbers)
            case _:
                raise exception_for_code(code, text, place=self._place) from refusal

    def _settle(self, number: int, status: PublishStatus, error: str | None = None) -> None:
        self._results[number] = PublishResult(self._messages[number].id, status, error)
        self.pending.pop(number, None)
