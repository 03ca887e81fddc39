"""Files that only their owner may read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from outbox_core.common.private_files import write_private


@pytest.mark.parametrize("before", [None, b"longer than what follows"])
def test_a_private_file_is_its_owners_alone_also_where_it_was_not_before(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "private"
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o644)

    write_private(path, b"secret")

    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"secret", 0o600)
