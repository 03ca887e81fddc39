"""The ports under segments on ledgers: replicated ledgers with one writer each, and the manifest nodes that name them.

Apache BookKeeper and ZooKeeper are the implementations (outbox_broker.cluster.bookkeeper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox_core.common.errors import StorageFailed

Metadata = Mapping[str, bytes]
"""What a ledger is created with, for the sweeper of orphans."""


class LedgerFailed(StorageFailed):
    """The ledger cluster did not confirm an operation: an append may have arrived; its writer accepts nothing more."""

    retryable = True


class LedgerFenced(LedgerFailed):
    """A recovery closed the ledger to its writer: proof of another writer. The absence of this error proves nothing."""

    retryable = False


class LedgerMissing(LedgerFailed):
    """There is no such ledger: it was deleted."""


class EntryMissing(LedgerFailed):
    """The ledger has no such entry, or not all entries of the range."""


class LedgerDamaged(LedgerFailed):
    """An entry is lost: no copy of it matches its checksum, and every bookie that keeps one has answered. `found` is
    what a damaged copy has.
    """

    retryable = False

    def __init__(self, why: str, *, found: bytes) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True, slots=True)
class ManifestNode:
    """The value of a shard's manifest node, and its version for the next compare-and-set."""

    value: bytes
    version: int


class LedgerWriter(Protocol):
    """The one writer of a ledger. Thread-safe. After a first error every later call raises the same error."""

    @property
    def ledger_id(self) -> int:
        """Identifies the ledger, within its cluster and for ever."""

    def append(self, entry: bytes) -> None:
        """Send an entry, in order, without waiting for its acknowledgement. Entries have up to 4 MiB + 1 KiB."""

    def confirm(self, count: int) -> None:
        """Return once the ledger's first `count` entries are durable on an ack quorum of bookies.

        Raises LedgerFenced if the error proves a fence, else LedgerFailed: entries not confirmed may be lost or not.
        """

    def begin_close(self) -> Callable[[], None]:
        """Begin to set the ledger's end at the last confirmed entry; the writer is released.

        Returns what waits until that is done, and raises LedgerFailed.
        """

    def release(self) -> None:
        """Release the writer without waiting for anything; the ledger's end is set by its recovery. Idempotent."""


class Ledgers(Protocol):
    """Ledgers of a cluster. Thread-safe. Every call has a deadline of the implementation's, and raises LedgerFailed."""

    def begin_create(self, metadata: Metadata) -> Callable[[], LedgerWriter]:
        """Begin to create a ledger; returns what waits for it, and raises LedgerFailed.

        A creation that failed may leave an empty ledger, which the sweeper deletes.
        """

    def recover(self, ledger_ids: Sequence[int]) -> list[int]:
        """Fence the writers of these ledgers, at once, and close the ledgers; returns the number of entries of each.

        Every acknowledged entry is among them; entries that were never acknowledged may be. A closed ledger stays as
        it is. Raises LedgerMissing if one of them was deleted.
        """

    def confirmed(self, ledger_id: int) -> int:
        """Returns how many of a ledger's first entries its bookies know to be confirmed. Does not fence its writer.

        Its writer may know of more by now. Raises LedgerMissing.
        """

    def read(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """Returns entries, from one number to another inclusive. Raises EntryMissing, LedgerMissing, LedgerDamaged if
        one of them is lost; LedgerFailed if a copy is damaged while another one cannot be asked for.
        """

    def length_bytes(self, ledger_id: int, last: int) -> int:
        """Returns how many bytes a ledger's entries have together, from the first one to this one inclusive, which is
        the only one that is read. Raises as read() does.
        """

    def delete(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers; a missing one is ignored."""

    def find(self) -> Iterator[tuple[int, Metadata]]:
        """Yields every ledger of the cluster with its metadata; those made or deleted meanwhile may be missing."""


class Manifests(Protocol):
    """One node a shard, changed by compare-and-set. Thread-safe. Raises StorageFailed if the outcome is unknown."""

    def read(self, shard: str) -> ManifestNode | None:
        """Returns the newest value; None if the shard was never opened. Never a stale value."""

    def write(self, shard: str, value: bytes, *, version: int | None) -> int | None:
        """Replace the value that has this version (None: create the node); returns the new version.

        Returns None, with nothing changed, if the node has another version.
        """

    def shards(self) -> Sequence[str]:
        """Returns the shards that have a node."""
