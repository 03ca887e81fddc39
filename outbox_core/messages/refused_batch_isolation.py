"""Finds the message for which a broker refuses a batch, so that its neighbours are stored and it alone is refused.

The only place that splits a refused batch: for the relay (the sender, and the compensator) and for delay services, on
every broker. An adapter does not split. It raises what the broker said of the batch, with the results that it knows by
then (BrokerError.answered), which hold and are not asked for again.
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
    """What became of a batch: results by place in it. A place without a result was not sent, or is in doubt: because of
    the `outage`, or, without one, because there was no time for another request. `refusals` are the errors behind the
    results of messages that were refused alone, or with all of their topic.
    """

    results: Mapping[int, PublishResult]
    refusals: Mapping[int, BrokerRefused | InvalidMessage]
    outage: BrokerError | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Places of a batch that are sent next. `one_by_one`: the first of them alone, and the others likewise, until the
    message at fault is found.
    """

    places: Sequence[int]
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
        """Returns the places to send next; none when all is decided, or a broker's outage ended it."""
        if self.outage is not None or not self._waiting:
            return ()
        part = self._waiting.pop()
        if part.one_by_one and len(part.places) > 1:
            self._waiting.append(_Part(part.places[1:], one_by_one=True))
            return part.places[:1]
        return part.places

    def accept(self, places: Sequence[int], results: Sequence[PublishResult]) -> None:
        """Take a part's results."""
        self.results.update(zip(places, results, strict=True))

    def refuse(self, places: Sequence[int], error: BrokerError | InvalidMessage) -> None:
        """Take the error of a part. What was answered before it is settled first."""
        if isinstance(error, BrokerError):
            self.results.update({places[at]: result for at, result in error.answered.items()})
        left = [place for place in places if place not in self.results]
        if isinstance(error, NotAuthenticated) or not isinstance(error, BrokerRefused | InvalidMessage):
            self.outage = error
        elif isinstance(error, NotAuthorized | NotSupported):
            self._part_by_topic(left, error)
        elif len(left) > 1:
            self._part(left, error)
        elif left:
            self._end(left, PublishStatus.REJECTED, error)
            self._send_rest_together()

    def _part_by_topic(self, places: Sequence[int], error: BrokerRefused) -> None:
        topics: defaultdict[str, list[int]] = defaultdict(list)
        for place in places:
            topics[self._messages[place].topic].append(place)
        if len(topics) == 1:
            self._end(places, PublishStatus.DEFERRED, error)  # an operator can grant it, or correct the URL
        else:
            self._waiting += [_Part(of_topic) for of_topic in reversed(topics.values())]

    def _part(self, places: Sequence[int], error: BrokerRefused | InvalidMessage) -> None:
        if isinstance(error, BrokerRefused) and error.in_doubt:
            self._waiting.append(_Part(places, one_by_one=True))
        else:
            middle = len(places) // 2
            self._waiting += [_Part(places[middle:]), _Part(places[:middle])]

    def _send_rest_together(self) -> None:
        """What stands behind a message that ended a batch in order was not looked at: it has no fault that is known."""
        if self._waiting and self._waiting[-1].one_by_one:
            self._waiting.append(_Part(self._waiting.pop().places))

    def _end(self, places: Sequence[int], status: PublishStatus, error: BrokerRefused | InvalidMessage) -> None:
        for place in places:
            self.results[place] = PublishResult(self._messages[place].id, status, str(error))
            self.refusals[place] = error


def publish_isolated(
    publish: Publish, messages: Sequence[Message], *, in_time: Callable[[], bool] = lambda: True
) -> IsolatedPublish:
    """Publish a batch, in parts where it is refused; raises no error of the broker's. `in_time` is asked before each
    request.
    """
    isolation = RefusedBatchIsolation(messages)
    while in_time() and (places := isolation.next_part()):
        try:
            results = publish([messages[place] for place in places])
        except (BrokerError, InvalidMessage) as error:
            isolation.refuse(places, error)
        else:
            isolation.accept(places, results)
    return IsolatedPublish(results=isolation.results, refusals=isolation.refusals, outage=isolation.outage)
