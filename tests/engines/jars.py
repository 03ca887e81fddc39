"""Where the jars of an engine are: the folder that `./scripts/test --engines` fetched them into."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.fixtures.local_server import servers_folder


def fetched_jars(pom: Path) -> Path:
    """The folder of jars that a pom resolves to, which is named by the pom's content."""
    engine = pom.parent.name
    key = hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    folder = servers_folder().parent / "engines" / f"{engine}-{key}"
    if not folder.is_dir():
        pytest.fail(f"the jars of {engine} are not there. Run ./scripts/test --engines {engine}", pytrace=False)
    return folder
