"""Whoever decodes what others can write, or what a disk can spoil, says so in its own way: never with the decoder's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from broker_adapter.http.metadata import parse_document
from outbox_broker.backup.manifest import read_manifest
from outbox_broker.cluster.znode_records import LeaderRecord, OwnerRecord, decode, decode_config
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.folder_format import format_of
from outbox_broker.log.restored_folder import restored
from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.ledger_manifest import decode_node, replay
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, InvalidMessage, OutboxError, UsageError
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import Delivery, Message
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable
from spark_reconcile.repair.plan_file import read_plan
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.runs.lost_evidence_check import read_totals

TOO_DEEP = b'{"what no version knows": ' + b"[" * 100_000
type_of_read = Callable[[Path, bytes], object]


def note_of_cordon(folder: Path, data: bytes) -> object:
    (folder / "cordoned").write_bytes(data)
    cordon = Cordon(FolderAnnotations(folder, storage=DiskStorage()), clock=ManualClock())
    cordon.load()
    return cordon.note is not None


def note_of_restore(folder: Path, data: bytes) -> object:
    (folder / "restored").write_bytes(data)
    return restored(FolderAnnotations(folder, storage=DiskStorage()))


def format_of_folder(folder: Path, data: bytes) -> object:
    (folder / "format").write_bytes(data)
    return format_of(folder)


def kept_ms(folder: Path, data: bytes) -> object:
    (folder / "judged.json").write_bytes(data)
    return EvidenceRetention(folder / "judged.json", clock=ManualClock()).age_ms(Purgeable.BROKER, keep_ms=1_000)


def body_of_delivery(_: Path, data: bytes) -> object:
    message = Message(id="m", topic="orders", body=data)
    return Delivery(message=message, receipt="m.1", attempt=1).json()


def read_of(name: str, reader: Callable[[Path], object]) -> type_of_read:
    """A reader of a file in the folder, or of the folder that has it."""

    def read(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return reader(folder)

    return read


def signed_manifest(folder: Path, data: bytes) -> object:
    """A manifest that is whole, and that this release does not know."""
    signature = json.dumps({"sha256": hashlib.sha256(data).hexdigest()}, separators=(",", ":")).encode()
    (folder / "manifest.jsonl").write_bytes(data + b"\n" + signature + b"\n")
    return read_manifest(folder)


@pytest.mark.parametrize("is_deep", [False, True], ids=["not_utf_8", "too_deep"])
@pytest.mark.parametrize(
    ("read", "begin", "told"),
    [
        (note_of_cordon, b'{"since_ms": 1, "reason": "', True),
        (format_of_folder, b'{"format": 1, "opened_by": 1, "release": "', None),
        (kept_ms, b'{"written_at_ms": 1, "needed_since_ms": {"', 2_000),
        (body_of_delivery, b'{"order": "', InvalidMessage),
        (lambda _, data: parse_document(data), b'{"exported_at_ms": 1, "topics": [], "source": "', UsageError),
        (lambda _, data: decode(data, OwnerRecord, path="/owners/1"), b'{"node": "', ConfigurationError),
        (lambda _, data: decode(data, LeaderRecord, path="/leader"), b'{"node": "', ConfigurationError),
        (lambda _, data: decode_config(data, path="/"), b'{"format": "', ConfigurationError),
        (lambda _, data: decode_node(data, cluster="c", shard="0"), b'{"format": 1, "cluster": "', ConfigurationError),
        (lambda _, data: replay([data], ledger=7), b"", SegmentDamaged),
        (read_of("plan", lambda folder: read_plan(folder / "plan")), b'{"repair_id": "', ConfigurationError),
        (read_of("windows.json", WindowStore), b'{"format": "', ConfigurationError),
        (read_of("totals.json", read_totals), b'{"sources": {"', ConfigurationError),
        (note_of_restore, b'{"at_ms": 1, "backup_at_ms": 1, "', ConfigurationError),
        (read_of("manifest.jsonl", read_manifest), b'{"format": 1, "release": "', SegmentDamaged),
        (signed_manifest, b'{"format": 1, "release": "', ConfigurationError),
    ],
    ids=[
        "cordon", "folder_format", "retention_hold", "body", "metadata", "owner", "leader", "cluster", "shard",
        "manifest", "plan", "windows", "totals", "restored", "backup", "signed_backup",
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_told_by_its_reader(
    read: type_of_read, begin: bytes, told: object, is_deep: bool, tmp_path: Path
) -> None:
    data = TOO_DEEP if is_deep else begin + b'\xff"'
    if isinstance(told, type) and issubclass(told, OutboxError):
        with pytest.raises(told):
            read(tmp_path, data)
    else:
        assert read(tmp_path, data) == told
