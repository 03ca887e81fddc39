"""Reads the version and the revision of the running build from the installation's metadata."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Final

_DISTRIBUTION: Final = "outbox-mq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """`version` and `revision` (the commit that was installed from a repository) are empty if unknown."""

    version: str
    revision: str
    python: str


@cache
def build() -> Build:
    """Returns the build of this process. It has a revision if it was installed from a repository (PEP 610)."""
    try:
        installed = distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        return Build(version="", revision="", python=platform.python_version())
    return Build(version=installed.version, revision=_revision(installed), python=platform.python_version())


def _revision(installed: Distribution) -> str:
    direct_url = json.loads(installed.read_text("direct_url.json") or "{}")
    return str(direct_url.get("vcs_info", {}).get("commit_id", ""))
