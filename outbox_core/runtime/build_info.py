"""Which build of the project runs here, by what its installation noted."""

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
    """`version` and `revision` (the commit that was installed from a repository) are empty where nobody noted them."""

    version: str
    revision: str
    python: str


@cache
def build() -> Build:
    """The build of this process. A revision is noted where the installer was given a repository (PEP 610)."""
    try:
        found = distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        return Build(version="", revision="", python=platform.python_version())
    return Build(version=found.version, revision=_revision(found), python=platform.python_version())


def _revision(found: Distribution) -> str:
    noted = json.loads(found.read_text("direct_url.json") or "{}")
    return str(noted.get("vcs_info", {}).get("commit_id", ""))
