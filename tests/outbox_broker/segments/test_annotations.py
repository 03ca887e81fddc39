"""Annotations: what an owner left is there for the owners after it, in a folder and on ledgers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.log.annotations import Annotations, FolderAnnotations
from outbox_broker.log.storage import DiskStorage
from outbox_core.journal.block import SegmentKind
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster


@pytest.fixture(params=["folder", "ledgers"])
def succeed(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Annotations]:
    """Makes the next owner; returns its annotations."""
    if request.param == "folder":
        return lambda: FolderAnnotations(tmp_path, storage=DiskStorage())
    cluster = LedgerCluster()
    return lambda: cluster.open(manifest_changes_max=1).annotations


def test_the_next_owners_find_what_was_set_and_no_more_what_was_removed(succeed: Callable[[], Annotations]) -> None:
    first = succeed()
    assert first.get("cordoned") is None
    first.set("cordoned", b"a")
    first.set("restored", b"b")
    first.set("cordoned", "ü".encode())
    assert first.get("cordoned") == "ü".encode()

    second = succeed()
    assert (second.get("cordoned"), second.get("restored")) == ("ü".encode(), b"b")
    second.set("cordoned", None)
    second.set("cordoned", None)
    assert second.get("cordoned") is None

    third = succeed()
    assert (third.get("cordoned"), third.get("restored")) == (None, b"b")


def test_they_outlive_another_manifest_of_the_same_owner() -> None:
    cluster = LedgerCluster()
    owner = cluster.open(manifest_changes_max=1)
    owner.annotations.set("cordoned", b"a")
    for name in ("a-1", "a-2", "a-3"):
        writer = owner.create(name, kind=SegmentKind.BUCKET)
        writer.append(b"x")
        writer.seal()
    owner.annotations.set("restored", b"b")

    successor = cluster.open()

    assert (successor.annotations.get("cordoned"), successor.annotations.get("restored")) == (b"a", b"b")
    assert len(successor.list()) == 3
