"""A model of BookKeeper and ZooKeeper in memory, which loses, delays and reorders as they may. All from one seed.

Each append becomes a message to each of three bookies. Messages arrive in any order, late, or never; an entry is
confirmed when two bookies have it and all before it are confirmed. A recovery fences a majority, takes what it finds
there up to the first gap, and closes the ledger; a message that arrives at a fenced bookie is refused. A bookie that
restarts forgets the fences of deleted ledgers.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outbox_broker.segments.ledgers import (
    EntryMissing,
    LedgerDamaged,
    LedgerFailed,
    LedgerFenced,
    LedgerMissing,
    ManifestNode,
)
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.delay.failing_disk import Killed

BOOKIES = 3
ACK_QUORUM = 2


@dataclass(slots=True)
class Faults:
    """How often things go wrong; nothing does by default."""

    lost: float = 0.0
    """That a message to one bookie never arrives."""
    create_fails: float = 0.0
    unknown_outcome: float = 0.0
    """That a write of a node fails, though it may have happened."""
    disguised_fence: float = 0.0
    """That a fenced writer sees another error."""


@dataclass(slots=True)
class Calls:
    """Counts the calls to ledgers and nodes, by name; ends the calling process after so many."""

    counts: Counter[str] = field(default_factory=Counter)
    left: int | None = None
    """Calls until the process is killed; None: it is not. Once it was, it can call nothing any more."""

    def note(self, call: str) -> None:
        """Count a call. Raises Killed, in place of it."""
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= 1
        self.counts[call] += 1


@dataclass(slots=True)
class Bookie:
    """Entries by ledger, and the ledgers that it refuses writers of."""

    entries: dict[int, dict[int, bytes]] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    confirmed: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class LedgerMeta:
    """What the cluster knows of a ledger; `length` once it is closed."""

    metadata: Mapping[str, bytes]
    length: int | None = None


@dataclass(slots=True)
class Sent:
    """A message on its way to a bookie."""

    writer: MemoryWriter
    bookie: int
    number: int
    entry: bytes
    confirmed: int
    """How many entries the writer knew to be confirmed, which travels with the entry."""


class MemoryLedgers:
    """Ledgers of three bookies, and the nodes of shards: what outlives every process."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.bookies = [Bookie() for _ in range(BOOKIES)]
        self.ledgers: dict[int, LedgerMeta] = {}
        self.lengths: dict[int, list[int]] = {}
        """By ledger: how many bytes all entries up to each have, which travels with it."""
        self.network: list[Sent] = []
        self.writers: list[MemoryWriter] = []
        self.recovered: list[list[int]] = []
        self.fenced_writers = 0
        self.damaged: dict[tuple[int, int], bytes] = {}  # by ledger and number
        self.calls = Calls()
        self.read_segments: Counter[str] = Counter()
        self.read_sizes: list[tuple[int, int]] = []  # of each request: entries, bytes
        self._next = 1

    def begin_create(self, metadata: Mapping[str, bytes]) -> Callable[[], MemoryWriter]:
        with self.lock:
            self.calls.note("create")
            ledger_id, self._next = self._next, self._next + 1
            self.ledgers[ledger_id] = LedgerMeta(dict(metadata))
            writer = MemoryWriter(self, ledger_id)

        def created() -> MemoryWriter:
            with self.lock:
                self.calls.note("created")
                if self.happens(self.faults.create_fails):
                    raise LedgerFailed("-6: not enough bookies")
                self.writers.append(writer)
                return writer

        return created

    def recover(self, ledger_ids: Sequence[int]) -> list[int]:
        with self.lock:
            self.calls.note("recover")
            self.recovered.append(list(ledger_ids))
            return [self._recover(ledger_id) for ledger_id in ledger_ids]

    def confirmed(self, ledger_id: int) -> int:
        with self.lock:
            ledger = self._known(ledger_id)
            known = max(bookie.confirmed.get(ledger_id, 0) for bookie in self.bookies)
            return known if ledger.length is None else ledger.length

    def read(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        with self.lock:
            self.calls.note("read")
            self.read_segments[self._known(ledger_id).metadata.get("outbox-segment", b"").decode()] += last + 1 - first
            self._refuse_damaged(ledger_id, range(first, last + 1))
            found = [self._entry(ledger_id, number) for number in range(first, last + 1)]
            if any(entry is None for entry in found):
                raise EntryMissing(f"ledger {ledger_id} has no entries {first} to {last}")
            entries = [entry for entry in found if entry is not None]
            self.read_sizes.append((len(entries), sum(map(len, entries))))
            return entries

    def length_bytes(self, ledger_id: int, last: int) -> int:
        with self.lock:
            self.calls.note("length")
            self._known(ledger_id)
            self._refuse_damaged(ledger_id, [last])
            if self._entry(ledger_id, last) is None:
                raise EntryMissing(f"ledger {ledger_id} has no entry {last}")
            return self.lengths[ledger_id][last]

    def delete(self, ledger_ids: Sequence[int]) -> None:
        with self.lock:
            self.calls.note("delete")
            for ledger_id in ledger_ids:
                self.ledgers.pop(ledger_id, None)
                for bookie in self.bookies:
                    bookie.entries.pop(ledger_id, None)

    def find(self) -> Iterator[tuple[int, Mapping[str, bytes]]]:
        with self.lock:
            found = [(ledger_id, ledger.metadata) for ledger_id, ledger in self.ledgers.items()]
        yield from found

    # -- for tests ---------------------------------------------------------------------------------------------------

    def happens(self, probability: float) -> bool:
        """Draw whether a fault happens."""
        return probability > 0 and self.random.random() < probability

    def say_confirmed(self) -> None:
        """As the interval passed in which idle writers say to the bookies what is confirmed."""
        with self.lock:
            for writer in self.writers:
                for bookie in self.bookies:
                    known = bookie.confirmed.get(writer.ledger_id, 0)
                    bookie.confirmed[writer.ledger_id] = max(writer.confirmed, known)

    def restart_bookies(self) -> None:
        """As all bookies restarted: the fences of deleted ledgers are forgotten."""
        with self.lock:
            for bookie in self.bookies:
                bookie.fenced &= self.ledgers.keys()

    def flip_byte(self, ledger_id: int, number: int) -> None:
        """Lose an entry on all bookies, as its digest says when it is read."""
        with self.lock:
            self.network = [one for one in self.network if (one.writer.ledger_id, one.number) != (ledger_id, number)]
            for bookie in self.bookies:
                bookie.entries.get(ledger_id, {}).pop(number, None)

    def damage(self, ledger_id: int, number: int, *, at: int = -1) -> None:
        """Flip a bit of an entry on all bookies, so that none of its copies matches its checksum."""
        with self.lock:
            entry = self._entry(ledger_id, number)
            assert entry is not None
            changed = bytearray(entry)
            changed[at] ^= 1
            self.damaged[ledger_id, number] = bytes(changed)

    def send(self, writer: MemoryWriter, number: int, entry: bytes) -> None:
        """Put the messages of an append on the network."""
        confirmed, lengths = writer.confirmed, self.lengths.setdefault(writer.ledger_id, [])
        lengths.append((lengths[-1] if lengths else 0) + len(entry))
        self.network += [Sent(writer, bookie, number, entry, confirmed) for bookie in range(BOOKIES)]

    def deliver_one(self) -> None:
        """One message, any of them, arrives or is lost."""
        index = self.random.randrange(len(self.network))
        self.network[index], self.network[-1] = self.network[-1], self.network[index]
        sent = self.network.pop()
        ledger_id, bookie = sent.writer.ledger_id, self.bookies[sent.bookie]
        if self.happens(self.faults.lost):
            sent.writer.failures.setdefault(sent.number, []).append(LedgerFailed("-6: not enough bookies"))
        elif ledger_id in bookie.fenced:
            self.fenced_writers += 1
            is_disguised = self.happens(self.faults.disguised_fence)
            error = LedgerFailed("-6: not enough bookies") if is_disguised else LedgerFenced("-101: fenced")
            sent.writer.failures.setdefault(sent.number, []).append(error)
        else:
            bookie.entries.setdefault(ledger_id, {})[sent.number] = sent.entry
            bookie.confirmed[ledger_id] = max(sent.confirmed, bookie.confirmed.get(ledger_id, 0))
            sent.writer.stored[sent.number] = sent.writer.stored.get(sent.number, 0) + 1

    def _recover(self, ledger_id: int) -> int:
        ledger = self._known(ledger_id)
        for _ in range(self.random.randint(0, len(self.network))):
            self.deliver_one()
        if ledger.length is None:
            majority = self.random.sample(self.bookies, self.random.choice((ACK_QUORUM, BOOKIES)))
            for bookie in majority:
                bookie.fenced.add(ledger_id)
            number = 0
            while (entry := self._found_on(majority, ledger_id, number)) is not None:
                for bookie in self.bookies:
                    bookie.entries.setdefault(ledger_id, {})[number] = entry
                number += 1
            ledger.length = number
        return ledger.length

    def _refuse_damaged(self, ledger_id: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (found := self.damaged.get((ledger_id, number))) is not None:
                raise LedgerDamaged(f"entry {number} of ledger {ledger_id} is lost", found=found)

    def _known(self, ledger_id: int) -> LedgerMeta:
        if ledger_id not in self.ledgers:
            raise LedgerMissing(f"there is no ledger {ledger_id}")
        return self.ledgers[ledger_id]

    def _entry(self, ledger_id: int, number: int) -> bytes | None:
        length = self.ledgers[ledger_id].length
        return None if length is not None and number >= length else self._found_on(self.bookies, ledger_id, number)

    @staticmethod
    def _found_on(bookies: Sequence[Bookie], ledger_id: int, number: int) -> bytes | None:
        found = (bookie.entries.get(ledger_id, {}).get(number) for bookie in bookies)
        return next((entry for entry in found if entry is not None), None)


class MemoryWriter:
    """One writer's view of its ledger."""

    def __init__(self, cluster: MemoryLedgers, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.stored: dict[int, int] = {}
        self.failures: dict[int, list[LedgerFailed]] = {}
        self._cluster = cluster
        self._sent = 0
        self.confirmed = 0
        self._error: LedgerFailed | None = None
        self.is_released = False

    def append(self, entry: bytes) -> None:
        with self._cluster.lock:
            self._cluster.calls.note("append")
            self._refuse()
            self._cluster.send(self, self._sent, entry)
            self._sent += 1

    def confirm(self, count: int) -> None:
        with self._cluster.lock:
            self._cluster.calls.note("confirm")
            while self.confirmed < count:
                self._refuse()
                if self.stored.get(self.confirmed, 0) >= ACK_QUORUM:
                    self.confirmed += 1
                elif len(failures := self.failures.get(self.confirmed, [])) > BOOKIES - ACK_QUORUM:
                    self._error = next((one for one in failures if isinstance(one, LedgerFenced)), failures[0])
                else:
                    self._cluster.deliver_one()

    def begin_close(self) -> Callable[[], None]:
        with self._cluster.lock:
            self._cluster.calls.note("close")
            self.is_released = True

        def closed() -> None:
            with self._cluster.lock:
                self._cluster.calls.note("closed")
                ledger = self._cluster.ledgers.get(self.ledger_id)
                if ledger is None:
                    raise LedgerMissing(f"there is no ledger {self.ledger_id}")
                if ledger.length is None:
                    ledger.length = self.confirmed

        return closed

    def release(self) -> None:
        with self._cluster.lock:
            self.is_released = True

    def _refuse(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_released:
            raise LedgerFailed("-11: the ledger's handle is closed")


class MemoryManifests:
    """Nodes with versions."""

    def __init__(self, cluster: MemoryLedgers) -> None:
        self._cluster = cluster
        self.nodes: dict[str, ManifestNode] = {}

    def read(self, shard: str) -> ManifestNode | None:
        with self._cluster.lock:
            self._cluster.calls.note("read_node")
            return self.nodes.get(shard)

    def write(self, shard: str, value: bytes, *, version: int | None) -> int | None:
        with self._cluster.lock:
            self._cluster.calls.note("write_node")
            found = self.nodes.get(shard)
            is_unknown = self._cluster.happens(self._cluster.faults.unknown_outcome)
            if is_unknown and self._cluster.random.random() < 0.5:
                raise StorageFailed("the node's server did not answer")
            if (None if found is None else found.version) != version:
                return None
            self.nodes[shard] = ManifestNode(value, 0 if version is None else version + 1)
            if is_unknown:
                raise StorageFailed("the node's server did not answer")
            return self.nodes[shard].version

    def shards(self) -> Sequence[str]:
        with self._cluster.lock:
            return sorted(self.nodes)
