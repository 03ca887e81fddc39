"""BookKeeper's official Java client, run in this process by JPype.

What JPype asks of us: one JVM a process; every client closed before the interpreter ends, since its threads keep the
JVM alive; on the main thread no wait in Java without an end, since an interrupt is delivered between waits only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jpype

OPERATION_SECONDS_MAX = 300
INTERRUPTIBLE_MS = 200
# A bookie that is merely slow, on a busy machine, is not a lost one. A killed one is noticed by its connection.
REQUEST_SECONDS_MAX = 60
SESSION_MS = 30_000
PASSWORD = b"a password"
NOT_ENOUGH_BOOKIES = "BKNotEnoughBookiesException"
POLL_SECONDS = 0.01


class LedgerError(Exception):
    """A refusal by BookKeeper; `reason` is the name of its exception, as `BKLedgerFencedException`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def connected(metadata_uri: str) -> Iterator[LedgerClient]:
    """A client with connections and a ZooKeeper session of its own, closed afterwards."""
    config = jpype.JClass("org.apache.bookkeeper.conf.ClientConfiguration")()
    config.setMetadataServiceUri(metadata_uri)
    config.setZkTimeout(SESSION_MS)
    config.setAddEntryTimeout(REQUEST_SECONDS_MAX)
    config.setReadEntryTimeout(REQUEST_SECONDS_MAX)
    # A dead bookie is replaced only when the ack quorum is in danger, so three bookies do without a spare.
    config.setDelayEnsembleChange(True)
    java_client = jpype.JClass("org.apache.bookkeeper.client.api.BookKeeper").newBuilder(config).build()
    try:
        yield LedgerClient(java_client)
    finally:
        java_client.close()


class LedgerClient:
    """Creates, opens, lists and deletes ledgers."""

    def __init__(self, java_client: Any) -> None:
        self._java_client = java_client

    def create(self, metadata: Mapping[str, bytes] | None = None) -> LedgerWriter:
        """Make a ledger whose entries go to three bookies and are acknowledged when two of them have it."""
        operation = self._java_client.newCreateLedgerOp().withEnsembleSize(3).withWriteQuorumSize(3)
        operation = operation.withAckQuorumSize(2).withPassword(PASSWORD).withCustomMetadata(_java_map(metadata or {}))
        return LedgerWriter(_result(operation.execute()))

    def wait_until_ledgers_can_be_made(self) -> None:
        """Wait until this client knows of enough bookies: ZooKeeper tells it later than others that one came back."""
        deadline = time.monotonic() + OPERATION_SECONDS_MAX
        while True:
            try:
                writer = self.create()
            except LedgerError as error:
                if error.reason != NOT_ENOUGH_BOOKIES or time.monotonic() > deadline:
                    raise
            else:
                writer.close()
                self.delete(writer.ledger_id)
                return
            threading.Event().wait(POLL_SECONDS)

    def recover(self, ledger_id: int, *, password: bytes = PASSWORD) -> list[bytes]:
        """Fence the ledger's writer, close the ledger, and read every entry."""
        operation = self._java_client.newOpenLedgerOp().withLedgerId(ledger_id).withPassword(password)
        return self._read(_result(operation.withRecovery(True).execute()))

    def read(self, ledger_id: int) -> list[bytes]:
        """Read every entry of a closed ledger."""
        operation = self._java_client.newOpenLedgerOp().withLedgerId(ledger_id).withPassword(PASSWORD)
        return self._read(_result(operation.withRecovery(False).execute()))

    def is_closed(self, ledger_id: int) -> bool:
        """Whether a writer or a recovery has set the ledger's last entry."""
        return bool(self._metadata(ledger_id).isClosed())

    def custom_metadata(self, ledger_id: int) -> dict[str, bytes]:
        """What the ledger was created with."""
        entries = self._metadata(ledger_id).getCustomMetadata().entrySet()
        return {str(entry.getKey()): bytes(entry.getValue()) for entry in entries}

    def ensembles(self, ledger_id: int) -> list[list[str]]:
        """The bookies of each part of a ledger, the last one last."""
        found = self._metadata(ledger_id).getAllEnsembles().values()
        return [[str(bookie) for bookie in ensemble] for ensemble in found]

    def ledger_ids(self) -> list[int]:
        """All ledgers of the cluster."""
        with contextlib.closing(_result(self._java_client.newListLedgersOp().execute())) as ledgers:
            ids = ledgers.iterator()
            return [int(ids.next()) for _ in iter(ids.hasNext, False)]

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger with its entries."""
        _result(self._java_client.newDeleteLedgerOp().withLedgerId(ledger_id).execute())

    def _metadata(self, ledger_id: int) -> Any:
        return _result(self._java_client.getLedgerMetadata(ledger_id))

    def _read(self, reader: Any) -> list[bytes]:
        last_entry_id = int(reader.getLastAddConfirmed())
        if last_entry_id < 0:
            return []
        with contextlib.closing(_result(reader.readAsync(0, last_entry_id))) as entries:
            return [bytes(entry.getEntryBytes()) for entry in entries]


class LedgerWriter:
    """The one writer of a ledger."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def ledger_id(self) -> int:
        """The id that readers open the ledger by."""
        return int(self._handle.getId())

    @property
    def bookie_ids(self) -> list[str]:
        """The bookies that the last entries were sent to."""
        return [str(bookie) for bookie in self._handle.getLedgerMetadata().getAllEnsembles().lastEntry().getValue()]

    def append(self, *bodies: bytes) -> None:
        """Append entries; returns when all are acknowledged."""
        for append in self.send(bodies):
            append.check()

    def send(self, bodies: Iterable[bytes]) -> list[PendingAppend]:
        """Append entries without waiting for their acknowledgements."""
        return [PendingAppend(self._handle.appendAsync(body)) for body in bodies]

    def close(self) -> None:
        """Set the ledger's last entry."""
        _result(self._handle.closeAsync())


class PendingAppend:
    """An entry that was sent and may be acknowledged later."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def is_acknowledged(self) -> bool:
        """Wait for the outcome."""
        _await(self._future)
        return not self._future.isCompletedExceptionally()

    def check(self) -> None:
        """Wait for the outcome; raise if the entry was refused."""
        if not self.is_acknowledged():
            _result(self._future)


def _java_map(values: Mapping[str, bytes]) -> Any:
    java_map = jpype.JClass("java.util.HashMap")()
    for name, value in values.items():
        java_map.put(jpype.JString(name), jpype.JArray(jpype.JByte)(value))
    return java_map


def _result(future: Any) -> Any:
    """Wait for a future's value; raise LedgerError where BookKeeper refused."""
    _await(future)
    try:
        return future.get()
    except jpype.JClass("java.util.concurrent.ExecutionException") as error:
        raise LedgerError(str(error.getCause().getClass().getSimpleName())) from error


def _await(future: Any) -> None:
    # The wait returns nothing, since every boxed number that Java returns to Python leaks a little (JPype 1.7.1).
    java_future = jpype.JClass("java.util.concurrent.CompletableFuture")
    milliseconds = jpype.JClass("java.util.concurrent.TimeUnit").MILLISECONDS
    deadline = time.monotonic() + OPERATION_SECONDS_MAX
    while not future.isDone():
        if time.monotonic() > deadline:
            raise TimeoutError("BookKeeper did not answer in time")
        with contextlib.suppress(jpype.JClass("java.util.concurrent.ExecutionException")):
            java_future.allOf(future).completeOnTimeout(None, INTERRUPTIBLE_MS, milliseconds).get()
