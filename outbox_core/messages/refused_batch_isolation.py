"""Finds the message for which a broker refuses a batch, so that its neighbours are stored and it alone is refused.

The only place that splits a refused batch: for the relay (the sender, and the compensator) and for delay services, on
every broker. An adapter does not split. It raises what the broker said of the batch, with the results that it knows by
then (BrokerError.answered), which hold and are not asked for again (decision 123).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outbox_core.common.errors import (
    BrokerError,
    BrokerRefused,
    InvalidMessage,
    NotAuthenticated,
    NotAuthorized,
    NotSupported,
)
from outbox_core.messages.message import Message, PublishResult, PublishStatus

Publish = Callable[[Sequence[Message]], Sequence[PublishResult]]
"""Broker.publish, or what wraps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedPublish:
    """What became of a batch: results by position in it. A position without a result was not sent, or is in doubt:
    because of the `outage`, or, without one, because there was no time for another request. `refusals` are the errors
    behind the results of messages that were refused alone, or with all of their topic.
    """

    results: Mapping[int, PublishResult]
    refusals: Mapping[int, BrokerRefused | InvalidMessage]
    outage: BrokerError | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions of a batch that are sent next. `one_by_one`: the first of them alone, and the others likewise, until
    the message at fault is found.
    """

    positions: Sequence[int]
    one_by_one: bool = False


class RefusedBatchIsolation:
    """Decides which part of a batch is sent next, and what each message's result is. Pure.

    A refused part is halved until the message at fault is alone: a batch of n with k of them takes fewer than
    2k * (log2(n) + 1) requests. Where those before it may be stored already (`in_doubt`), halves would store them once
    more each, so they go one by one: each of them is stored twice at most. A refusal of a topic parts by topics.
    Parts are sent in the order of the batch, but for those by topic, which keep the order of each topic.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.results: dict[int, PublishResult] = {}
        self.refusals: dict[int, BrokerRefused | InvalidMessage] = {}
        self.outage: BrokerError | None = None
        self._messages = messages
        self._waiting = [_Part(range(len(messages)))] if messages else []
        """A stack: the next part is the last."""

    def next_part(self) -> Sequence[int]:
        """Returns the positions to send next; none when all is decided, or a broker's outage ended it."""
        if self.outage is not None or not self._waiting:
            return ()
        part = self._waiting.pop()
        if part.one_by_one and len(part.positions) > 1:
            self._waiting.append(_Part(part.positions[1:], one_by_one=True))
            return part.positions[:1]
        return part.positions

    def accept(self, positions: Sequence[int], results: Sequence[PublishResult]) -> None:
        """Take a part's results."""
        self.results.update(zip(positions, results, strict=True))

    def refuse(self, positions: Sequence[int], error: BrokerError | InvalidMessage) -> None:
        """Take the error of a part. What was answered before it is settled first."""
        if isinstance(error, BrokerError):
            self.results.update({positions[at]: result for at, result in error.answered.items()})
        unanswered = [position for position in positions if position not in self.results]
        if isinstance(error, NotAuthenticated) or not isinstance(error, BrokerRefused | InvalidMessage):
            self.outage = error
        elif isinstance(error, NotAuthorized | NotSupported):
            self._part_by_topic(unanswered, error)
        elif len(unanswered) > 1:
            self._part(unanswered, error)
        elif unanswered:
            self._end(unanswered, PublishStatus.REJECTED, error)
            self._send_rest_together()

    def _part_by_topic(self, positions: Sequence[int], error: BrokerRefused) -> None:
        topics: defaultdict[str, list[int]] = defaultdict(list)
        for position in positions:
            topics[self._messages[position].topic].append(position)
        if len(topics) == 1:
            self._end(positions, PublishStatus.DEFERRED, error)  # an operator can grant it, or correct the URL
        else:
            self._waiting += [_Part(of_topic) for of_topic in reversed(topics.values())]

    def _part(self, positions: Sequence[int], error: BrokerRefused | InvalidMessage) -> None:
        if isinstance(error, BrokerRefused) and error.in_doubt:
            self._waiting.append(_Part(positions, one_by_one=True))
        else:
            middle = len(positions) // 2
            self._waiting += [_Part(positions[middle:]), _Part(positions[:middle])]

    def _send_rest_together(self) -> None:
        """What stands behind a message that ended a batch in order was not looked at: it has no fault that is known."""
        if self._waiting and self._waiting[-1].one_by_one:
            self._waiting.append(_Part(self._waiting.pop().positions))

    def _end(self, positions: Sequence[int], status: PublishStatus, error: BrokerRefused | InvalidMessage) -> None:
        for position in positions:
            self.results[position] = PublishResult(self._messages[position].id, status, str(error))
            self.refusals[position] = error


def publish_isolated(
    publish: Publish, messages: Sequence[Message], *, in_time: Callable[[], bool] = lambda: True
) -> IsolatedPublish:
    """Publish a batch, in parts where it is refused; raises no error of the broker's. `in_time` is asked before each
    request.
    """
    isolation = RefusedBatchIsolation(messages)
    while in_time() and (positions := isolation.next_part()):
        try:
            results = publish([messages[position] for position in positions])
        except (BrokerError, InvalidMessage) as error:
            isolation.refuse(positions, error)
        else:
            isolation.accept(positions, results)
    return IsolatedPublish(results=isolation.results, refusals=isolation.refusals, outage=isolation.outage)
