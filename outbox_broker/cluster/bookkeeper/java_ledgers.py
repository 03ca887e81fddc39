"""Ledgers of a BookKeeper cluster, by the official Java client in this process."""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from outbox_broker.cluster.bookie_room import BookieSpace
from outbox_broker.cluster.bookie_tls import BookieTls
from outbox_broker.cluster.bookkeeper.java_entry_copies import JavaEntryCopies
from outbox_broker.cluster.bookkeeper.java_ledger_writer import JavaLedgerWriter
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.result_codes import ResultCode
from outbox_broker.cluster.bookkeeper.zone_placement import ZoneOptions, ZonePlacement
from outbox_broker.cluster.zone_file import ZONES_MIN
from outbox_broker.segments.ledgers import EntryMissing, LedgerFailed, LedgerFenced, LedgerMissing, Metadata
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_MISSING: Final = frozenset({ResultCode.NO_SUCH_LEDGER, ResultCode.NO_SUCH_LEDGER_METADATA})
_TOO_FEW_BOOKIES: Final = frozenset({ResultCode.NOT_ENOUGH_BOOKIES, ResultCode.NO_QUORUM_IN_TIME})
_REGISTRATIONS: Final = "org.apache.bookkeeper.discover.RegistrationClient"
_AT_ONCE_MAX: Final = 128
_READERS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BookKeeperOptions:
    """How ledgers are kept. `properties` are further settings of BookKeeper's client, by their names in its manual."""

    ensemble: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    password: bytes = b""
    tls: BookieTls | None = None
    """How to encrypt what goes to bookies; None: not at all."""
    zones: ZoneOptions | None = None
    """Over which zones the copies of an entry are spread; None: bookies are taken at random."""
    request_s_max: int = 2
    """After this a bookie that does not answer a request counts as failed."""
    operation_ms_max: int = 30_000
    """After this an operation fails, whatever the client still tries."""
    session_ms: int = 10_000
    confirmed_every_ms: int = 500
    """How often a writer without new entries says what is confirmed, to readers that do not fence it."""
    in_flight_bytes_max: int = 16 * 1024 * 1024
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigurationError if the quorums do not fit together."""
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble:
            raise ConfigurationError(
                f"an ensemble of {self.ensemble}, write quorum {self.write_quorum} and ack quorum {self.ack_quorum} "
                "do not fit: ensemble >= write quorum >= ack quorum >= 1"
            )
        if self.zones is None:
            return
        if self.write_quorum <= ZONES_MIN or self.ensemble % self.write_quorum:
            raise ConfigurationError(
                f"zones need a write quorum above {ZONES_MIN}, and an ensemble that is a multiple of it, "
                f"not {self.write_quorum} and {self.ensemble}"
            )


class _CopyDamaged(LedgerFailed):
    """A copy of an entry is damaged; the others are damaged, missing, or cannot be asked for."""


class JavaLedgers:
    """A client of one cluster. close() before the process ends; an exit of the interpreter does so too."""

    def __init__(self, runtime: JavaRuntime, metadata_uri: str, *, options: BookKeeperOptions | None = None) -> None:
        """Connect, as to `zk+longhierarchical://host:port;host:port/ledgers`. Raises ConfigurationError."""
        self._runtime = runtime
        self._options = options or BookKeeperOptions()
        self._guard = threading.Lock()
        self._readers: OrderedDict[int, Any] = OrderedDict()
        self._closed = False
        zones = self._options.zones
        self._zones = None if zones is None else ZonePlacement(runtime, zones)
        self.in_flight_bytes = 0
        self._client = self._connected(metadata_uri)
        self._digest = runtime.java_class("org.apache.bookkeeper.client.api.DigestType").CRC32C
        atexit.register(self.close)

    def begin_create(self, metadata: Metadata) -> Callable[[], JavaLedgerWriter]:
        """Begin to create a ledger; see the port."""
        options = self._options
        custom = self._runtime.java_class("java.util.HashMap")()
        for name, value in metadata.items():
            custom.put(self._runtime.string(name), self._runtime.byte_array(value))
        operation = self._open_client().newCreateLedgerOp().withEnsembleSize(options.ensemble)
        operation = operation.withWriteQuorumSize(options.write_quorum).withAckQuorumSize(options.ack_quorum)
        operation = operation.withDigestType(self._digest).withPassword(options.password).withCustomMetadata(custom)
        future = operation.execute()
        return lambda: JavaLedgerWriter(self, self._value(future, "create a ledger"))

    def recover(self, ledger_ids: Sequence[int]) -> list[int]:
        """Fence and close ledgers; see the port."""
        lengths: list[int] = []
        for ids in _windows(ledger_ids):
            futures = [self._opening(ledger_id, recovery=True) for ledger_id in ids]
            for ledger_id, future in zip(ids, futures, strict=True):
                handle = self._value(future, f"recover ledger {ledger_id}")
                lengths.append(int(handle.getLastAddConfirmed()) + 1)
                handle.closeAsync()
        return lengths

    def confirmed(self, ledger_id: int) -> int:
        """What is confirmed of a ledger; see the port. Each opening asks the bookies anew."""
        handle = self._value(self._opening(ledger_id, recovery=False), f"open ledger {ledger_id}")
        try:
            return int(handle.getLastAddConfirmed()) + 1
        finally:
            handle.closeAsync()

    def read(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """Entries of a ledger; see the port."""
        with self._read(ledger_id, first, last) as entries:
            return [bytes(entry.getEntryBytes()) for entry in entries]

    def length_bytes(self, ledger_id: int, last: int) -> int:
        """The length of a ledger up to an entry, which has it in its head; see the port."""
        with self._read(ledger_id, last, last) as entries:
            return int(entries.getEntry(last).getLength())  # not the entry's own, as its documentation says

    def delete(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers; see the port."""
        for ids in _windows(ledger_ids):
            with self._guard:
                handles = [reader for ledger_id in ids if (reader := self._readers.pop(ledger_id, None)) is not None]
            for handle in handles:
                handle.closeAsync()
            client = self._open_client()
            futures = [client.newDeleteLedgerOp().withLedgerId(ledger_id).execute() for ledger_id in ids]
            for ledger_id, future in zip(ids, futures, strict=True):
                with suppress(LedgerMissing):
                    self._value(future, f"delete ledger {ledger_id}")

    def find(self) -> Iterator[tuple[int, Metadata]]:
        """Every ledger with its metadata; see the port."""
        for ledger_id, metadata in self._all_metadata():
            yield ledger_id, _custom(metadata)

    def find_in_one_zone(self) -> Iterator[tuple[int, Metadata]]:
        """Every ledger some of whose entries have all their copies in one zone, with its metadata. Bookies that the
        zone file does not name count for no zone. Raises LedgerFailed.
        """
        if self._zones is None:
            return
        for ledger_id, metadata in self._all_metadata():
            copies = int(metadata.getWriteQuorumSize())
            ensembles = [[str(one) for one in ensemble] for ensemble in metadata.getAllEnsembles().values()]
            if any(self._zones.count(bookies) < ZONES_MIN for bookies in _write_sets(ensembles, copies)):
                yield ledger_id, _custom(metadata)

    def _all_metadata(self) -> Iterator[tuple[int, Any]]:
        ledgers = self._value(self._open_client().newListLedgersOp().execute(), "list the ledgers")
        try:
            ids = ledgers.iterator()
            found: list[int] = []
            while ids.hasNext():
                found.append(int(ids.next()))
        finally:
            ledgers.close()
        for some in _windows(found):
            client = self._open_client()
            futures = [client.getLedgerMetadata(ledger_id) for ledger_id in some]
            for ledger_id, future in zip(some, futures, strict=True):
                with suppress(LedgerMissing):
                    yield ledger_id, self._value(future, f"read the metadata of ledger {ledger_id}")

    def bookie_spaces(self) -> list[BookieSpace]:
        """Returns the disks of the bookies that answer. Raises LedgerFailed."""
        client = self._open_client()
        registered = client.getMetadataClientDriver().getRegistrationClient().getWritableBookies()
        writable = {str(one) for one in self._value(registered, "list the bookies").getValue()}
        try:
            spaces = {str(one.getKey()): one.getValue() for one in client.getBookieInfo().entrySet()}
        except self._runtime.java_class("java.lang.Exception") as error:
            raise LedgerFailed(f"cannot ask bookies for their disks: {error}") from None
        zones = self._options.zones
        known = {} if zones is None else zones.file.map.zones(spaces)
        return [
            BookieSpace(
                bookie=bookie, is_writable=bookie in writable, free_bytes=int(space.getFreeDiskSpace()),
                total_bytes=int(space.getTotalDiskSpace()), zone=known.get(bookie),
            )
            for bookie, space in spaces.items()
        ]  # fmt: skip

    def close(self) -> None:
        """Close the client, with all its connections; idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._readers.clear()
        atexit.unregister(self.close)
        if self._zones is not None:
            self._zones.close()
        self._client.close()

    # -- for the writers of this client ------------------------------------------------------------------------------

    def outcome(self, future: Any, action: str) -> LedgerFailed | None:
        """Wait for a future; returns its failure, None if it succeeded."""
        self._runtime.check_process()
        if not self._runtime.wait(future, timeout_ms=self._options.operation_ms_max):
            return self._time_out(action)
        return self._failure(future, action, missing=LedgerMissing)

    def failure(self, future: Any, action: str) -> LedgerFailed | None:
        """Returns the failure of a future that may not be done yet."""
        return self._failure(future, action, missing=LedgerMissing) if future.isDone() else None

    def has_room(self) -> bool:
        """Returns whether fewer bytes than the limit are on their way to the bookies."""
        return self.in_flight_bytes < self._options.in_flight_bytes_max

    def add_in_flight(self, size_bytes: int) -> None:
        """Count bytes that were sent (or, below zero, were confirmed)."""
        with self._guard:
            self.in_flight_bytes += size_bytes

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _connected(self, metadata_uri: str) -> Any:
        config = self._runtime.java_class("org.apache.bookkeeper.conf.ClientConfiguration")()
        config.setMetadataServiceUri(metadata_uri)
        config.setZkTimeout(self._options.session_ms)
        config.setAddEntryTimeout(self._options.request_s_max)
        config.setReadEntryTimeout(self._options.request_s_max)
        config.setExplictLacInterval(self._options.confirmed_every_ms)  # spelled so
        # While bookies die, an ensemble is changed only where its ack quorum is in danger: without this, one ledger's
        # metadata grew by hundreds of ensembles in seconds.
        config.setDelayEnsembleChange(True)
        if self._options.tls is not None:
            _set_tls(config, self._options.tls)
        if self._zones is not None:
            ack_s_max = 2 * self._options.request_s_max + 1  # a bookie fails, and another one does in its place
            self._zones.configure(config, write_quorum=self._options.write_quorum, ack_s_max=ack_s_max)
        for name, value in self._options.properties.items():
            config.setProperty(name, self._runtime.string(value))
        builder = self._runtime.java_class("org.apache.bookkeeper.client.api.BookKeeper").newBuilder(config)
        if self._zones is not None:
            builder = builder.dnsResolver(self._zones.resolver)
        try:
            client = builder.build()
        except self._runtime.java_class("java.lang.Exception") as error:
            raise ConfigurationError(
                f"no BookKeeper cluster answers at {metadata_uri}: {error}; check the address, and that "
                "`bookkeeper shell initnewcluster` was run for this path"
            ) from None
        self._keep_addresses(client.getMetadataClientDriver().getRegistrationClient())
        if self._zones is not None:
            self._zones.watch(client)
        return client

    def _keep_addresses(self, registrations: Any) -> None:
        """Have the list of read-only bookies read whenever that of the writable ones changed, and the other way round.

        A bookie that becomes read-only or writable has two registrations for a moment. When the earlier one ends,
        BookKeeper 4.18 forgets the bookie's address, and reads it again only with a list that has the bookie and
        changes: it would not connect to this bookie until another one comes or goes (apache/bookkeeper issue 4172).
        Whoever reads a list reads the addresses that are missing.
        """
        for watch, read in (
            (registrations.watchWritableBookies, "getReadOnlyBookies"),
            (registrations.watchReadOnlyBookies, "getWritableBookies"),
        ):
            watch(self._runtime.call_of(registrations, read, interface=f"{_REGISTRATIONS}$RegistrationListener"))

    def _open_client(self) -> Any:
        self._runtime.check_process()
        if self._closed:
            raise LedgerFailed("the BookKeeper client is closed")
        return self._client

    def _opening(self, ledger_id: int, *, recovery: bool) -> Any:
        operation = self._open_client().newOpenLedgerOp().withLedgerId(ledger_id).withDigestType(self._digest)
        return operation.withPassword(self._options.password).withRecovery(recovery).execute()

    def _reader(self, ledger_id: int) -> Any:
        with self._guard:
            found = self._readers.get(ledger_id)
            if found is not None:
                self._readers.move_to_end(ledger_id)
                return found
        found = self._value(self._opening(ledger_id, recovery=False), f"open ledger {ledger_id}")
        with self._guard:
            self._readers[ledger_id] = found
            old = self._readers.popitem(last=False)[1] if len(self._readers) > _READERS_MAX else None
        if old is not None:
            old.closeAsync()
        return found

    @contextmanager
    def _read(self, ledger_id: int, first: int, last: int) -> Iterator[Any]:
        action = f"read entries {first} to {last} of ledger {ledger_id}"
        reader = self._reader(ledger_id)
        future = reader.readUnconfirmedAsync(first, last)
        try:
            # Behind its end, a ledger that a bookie has in memory only is reported missing: it is not, it was opened.
            entries = self._value(future, action, missing=EntryMissing)
        except _CopyDamaged as error:
            future = self._open_client().getLedgerMetadata(ledger_id)
            metadata = self._value(future, f"read the metadata of ledger {ledger_id}")
            copies = JavaEntryCopies(self._runtime, self._client, timeout_ms=self._options.operation_ms_max)
            raise copies.damage(metadata, ledger_id, range(first, last + 1)) or error from None
        try:
            yield entries
        finally:
            entries.close()

    def _value(self, future: Any, action: str, *, missing: type[LedgerFailed] = LedgerMissing) -> Any:
        """Wait for a future; returns its value, which must not be a number. Raises LedgerFailed."""
        self._runtime.check_process()
        if not self._runtime.wait(future, timeout_ms=self._options.operation_ms_max):
            raise self._time_out(action)
        error = self._failure(future, action, missing=missing)
        if error is not None:
            raise error
        return future.getNow(None)

    def _failure(self, future: Any, action: str, *, missing: type[LedgerFailed]) -> LedgerFailed | None:
        error = self._runtime.failure(future)
        if error is None:
            return None
        code = int(error.getCode()) if hasattr(error, "getCode") else 0
        text = f"cannot {action}: {error.getClass().getSimpleName()} ({code})"
        if code == ResultCode.FENCED:
            return LedgerFenced(text)
        if code == ResultCode.DIGEST_MISMATCH:
            return _CopyDamaged(f"{text}: a copy does not match its checksum, and no whole one can be read now")
        if code == ResultCode.NO_SUCH_ENTRY:
            return EntryMissing(text)
        if code in _MISSING:
            return missing(text)
        if code == ResultCode.UNAUTHORIZED:
            return LedgerFailed(f"{text}: the password is not the one that the ledger was created with")
        return LedgerFailed(f"{text}{self._cure}" if code in _TOO_FEW_BOOKIES else text)

    def _time_out(self, action: str) -> LedgerFailed:
        return LedgerFailed(f"cannot {action}: no answer within {self._options.operation_ms_max} ms{self._cure}")

    @property
    def _cure(self) -> str:
        """Added where the cause may be TLS or zones: the client reports neither, only that bookies are missing."""
        causes = [
            text
            for text, is_used in (
                ("the bookies to which TLS fails, and why", self._options.tls is not None),
                ("the bookies of each zone", self._zones is not None),
            )
            if is_used
        ]
        return f"; `outbox delay status` shows {', and '.join(causes)}" if causes else ""


def _custom(metadata: Any) -> Metadata:
    """Returns what a ledger was created with, from its metadata of BookKeeper."""
    return {str(one.getKey()): bytes(one.getValue()) for one in metadata.getCustomMetadata().entrySet()}


def _write_sets(ensembles: Iterable[Sequence[str]], copies: int) -> Iterator[frozenset[str]]:
    """Yields the bookies that have the copies of an entry, each set of an ensemble once."""
    for bookies in ensembles:
        size = len(bookies)
        yield from {frozenset(bookies[(at + other) % size] for other in range(copies)) for at in range(size)}


def _windows(ids: Sequence[int]) -> Iterator[list[int]]:
    rest = iter(ids)
    while some := list(islice(rest, _AT_ONCE_MAX)):
        yield some


def _set_tls(config: Any, tls: BookieTls) -> None:
    """Have BookKeeper's client verify the bookies' certificates and names, which by itself it does not."""
    config.setTLSProviderFactoryClass("org.apache.bookkeeper.tls.TLSContextFactory")
    config.setTLSProvider("JDK")
    config.setHostnameVerificationEnabled(True)
    config.setTLSTrustStoreType("PEM")
    config.setTLSTrustStore(str(tls.ca_file))
    if tls.certificate is not None:
        config.setTLSClientAuthentication(True)
        config.setTLSKeyStoreType("PEM")
        config.setTLSCertificatePath(str(tls.certificate))
        config.setTLSKeyStore(str(tls.key))
