"""A batch of due messages, as parallel lists, in order: no message is an object on its way to the log. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import TypeVar

from outbox_broker.schedule.sorted_run import Columns, Entry, StoredRun, TimedMessage, is_marked

Value = TypeVar("Value")


@dataclass(slots=True)
class DueBatch:
    """Due messages ordered by due time, then arrival; settled by DelayStore.fired(number)."""

    number: int = 0
    dues: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def messages(self) -> list[TimedMessage]:
        """The messages as objects, created on each access."""
        return list(map(TimedMessage, self.dues, self.ids, self.topics, self.payloads))

    def entries(self) -> Iterator[Entry]:
        """Yields the messages as in-memory entries."""
        return map(Entry, self.dues, self.seqs, self.ids, self.topics, self.payloads)

    def add_entry(self, entry: Entry) -> None:
        """Append a message from memory."""
        self.dues.append(entry.due_ms)
        self.seqs.append(entry.seq)
        self.ids.append(entry.id)
        self.topics.append(entry.topic)
        self.payloads.append(entry.payload)

    def add_piece(
        self, columns: Columns, stored: StoredRun, *, gone: bytes | bytearray | None, start: int, stop: int
    ) -> None:
        """Append a range of a run, without the messages whose bits mark them as gone."""
        part = slice(start, stop)
        alive = None if gone is None else [not is_marked(gone, index) for index in range(start, stop)]
        names = columns.topics
        self.dues += _alive(columns.due[part], alive)
        self.seqs += _alive(columns.seq[part], alive)
        self.ids += _alive(stored.ids[part], alive)
        self.payloads += _alive(stored.payloads[part], alive)
        if len(names) == 1:
            self.topics += names * (len(self.ids) - len(self.topics))
        else:
            self.topics += [names[topic_number] for topic_number in _alive(columns.topic[part], alive)]

    def sort(self) -> None:
        """Sort messages that come from several sources."""
        keys = list(zip(self.dues, self.seqs, strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        if order != list(range(len(keys))):
            self._pick(order)

    def without(self, gone: set[int]) -> DueBatch:
        """Returns a copy without the messages at these indexes."""
        left = DueBatch(self.number, self.dues, self.seqs, self.ids, self.topics, self.payloads)
        left._pick([at for at in range(len(self)) if at not in gone])
        return left

    def by_topic(self) -> Iterable[tuple[str, Sequence[str], Sequence[bytes]]]:
        """Returns each topic with its ids and payloads in order."""
        names = dict.fromkeys(self.topics)
        if len(names) == 1:
            return [(self.topics[0], self.ids, self.payloads)]
        places: dict[str, list[int]] = {name: [] for name in names}
        for at, topic in enumerate(self.topics):
            places[topic].append(at)
        return [(name, _picked(self.ids, at), _picked(self.payloads, at)) for name, at in places.items()]

    def _pick(self, order: list[int]) -> None:
        self.dues, self.seqs = _picked(self.dues, order), _picked(self.seqs, order)
        self.ids, self.topics = _picked(self.ids, order), _picked(self.topics, order)
        self.payloads = _picked(self.payloads, order)


def _alive(column: Iterable[Value], alive: list[bool] | None) -> Iterable[Value]:
    return column if alive is None else compress(column, alive)


def _picked(column: list[Value], order: list[int]) -> list[Value]:
    if len(order) < 2:
        return [column[at] for at in order]
    return list(itemgetter(*order)(column))
