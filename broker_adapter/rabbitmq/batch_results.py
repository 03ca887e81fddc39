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
from outbox_core.common.errors import BrokerRefused
from outbox_core.messages.message import Message, PublishResult, PublishStatus

PIPELINED_BYTES: Final = 64 * 1024
"""A body up to this size is sent with others before it is known that the server takes such a size."""


class RabbitMqBatchResults:
    """Messages, the results that are known, and the frames that have none yet, in order."""

    def __init__(self, messages: Sequence[Message], *, frame_bytes_max: int, addresses: str) -> None:
        """`frame_bytes_max`: what all properties of a message must fit in; `addresses`: the servers', for errors."""
        self.pending: dict[int, AmqpFrame] = {}
        """By the message's index in the batch."""
        self._messages = messages
        self._addresses = addresses
        self._results: dict[int, PublishResult] = {}
        for index, message in enumerate(messages):
            frame = frame_of(message)
            refusal = refusal_of(message)
            if refusal is None and header_bytes(frame) > frame_bytes_max:
                refusal = f"the headers are too large for the server's frame_max of {frame_bytes_max:,} bytes; raise it"
            if refusal is None:
                self.pending[index] = frame
            else:
                self._settle(index, PublishStatus.REJECTED, refusal)

    def next_run(self, *, confirmed_bytes_max: int) -> Mapping[int, AmqpFrame]:
        """The frames to send next, by index: those that are sent together, or one by itself.

        A server ends the channel for a message that is too large, and all that it did not confirm yet is in doubt: so
        one that is larger than any that it took before is sent when nothing else is under way.
        """
        together: dict[int, AmqpFrame] = {}
        for index, frame in self.pending.items():
            if len(frame.body) > max(PIPELINED_BYTES, confirmed_bytes_max):
                return together or {index: frame}
            together[index] = frame
        return together

    def settle(self, run: Mapping[int, AmqpFrame], answer: Answer) -> None:
        """Take the answer to a run.

        Raises NotAuthorized, StorageFailed and BrokerUnavailable for what is not about single messages, BrokerRefused
        for a message of several, which the server did not name; each with the results that are known.
        """
        for index, outcome in zip(run, answer.outcomes, strict=True):
            topic = self._messages[index].topic
            match outcome:
                case ConfirmOutcome.CONFIRMED:
                    self._settle(index, PublishStatus.STORED)
                case ConfirmOutcome.RETURNED:
                    text = f"no queue takes the topic {topic}; {CURES[spec.NO_ROUTE]}"
                    self._settle(index, PublishStatus.DEFERRED, text)
                case ConfirmOutcome.NACKED:
                    self._settle(index, PublishStatus.DEFERRED, f"a queue refused the topic {topic}: {NACK_CURE}")
                case None:
                    pass
        if answer.refusal is not None:
            self._refuse([index for index in run if index in self.pending], answer.refusal)

    def answered(self) -> dict[int, PublishResult]:
        """The results that are known, by index. After a message that waits, none of its key is reported as stored: it
        is sent again behind that one.
        """
        waiting: dict[tuple[str, str], str] = {}
        results: dict[int, PublishResult] = {}
        for index, result in sorted(self._results.items()):
            message = self._messages[index]
            results[index] = result
            if message.key is not None:
                order_key = message.topic, message.key
                if result.status is PublishStatus.DEFERRED:
                    waiting.setdefault(order_key, message.id)
                elif order_key in waiting and result.status is PublishStatus.STORED:
                    text = f"an older message of its key waits: {waiting[order_key]}"
                    results[index] = PublishResult(message.id, PublishStatus.DEFERRED, text)
        return results

    def in_order(self) -> list[PublishResult]:
        """All results, once nothing is pending."""
        return list(self.answered().values())

    def _refuse(self, indexes: Sequence[int], refusal: ChannelClosedByBroker) -> None:
        code, text = refusal.reply_code, refusal.reply_text
        match treatment_of(code):
            case Treatment.DEFERRED:  # the exchange, which is that of all
                for index in indexes:
                    self._settle(index, PublishStatus.DEFERRED, explained(code, text))
            case Treatment.REJECTED if len(indexes) == 1:
                self._settle(indexes[0], PublishStatus.REJECTED, explained(code, text))
            case Treatment.REJECTED:
                # The server took them in order up to the one that it refuses, and ended the channel with what it had
                # not confirmed yet: any of these may be stored.
                error = BrokerRefused(f"RabbitMQ at {self._addresses}: {explained(code, text)}")
                error.in_doubt = True
                raise error.with_answered(self.answered()) from refusal
            case _:
                raise exception_for_code(code, text, addresses=self._addresses).with_answered(
                    self.answered()
                ) from refusal

    def _settle(self, index: int, status: PublishStatus, error: str | None = None) -> None:
        self._results[index] = PublishResult(self._messages[index].id, status, error)
        self.pending.pop(index, None)
