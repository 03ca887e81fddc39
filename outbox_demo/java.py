"""Finds the Java that runs the demo's servers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError

VERSION_MIN: Final = 17
ANSWER_SECONDS_MAX: Final = 60
_CURE: Final = f"install Java {VERSION_MIN} or later, or set JAVA_HOME"
_VERSION: Final = re.compile(r'version "(\d+)')


def find_java(environment: Mapping[str, str]) -> Path:
    """Returns the program `java`: that of JAVA_HOME, or else the one on the PATH. Raises ConfigurationError."""
    home = environment.get("JAVA_HOME")
    program = shutil.which("java", path=str(Path(home) / "bin") if home else environment.get("PATH"))
    if program is None:
        location = f"at JAVA_HOME, which is {home}" if home else "on the PATH"
        raise ConfigurationError(f"there is no Java {location}: {_CURE}")
    answer = subprocess.run(  # noqa: S603 - the user's own Java
        [program, "-version"], capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX, check=False
    )
    version = _VERSION.search(answer.stderr)
    if version is None or int(version[1]) < VERSION_MIN:
        raise ConfigurationError(f"{program} is not Java {VERSION_MIN} or later: {_CURE}")
    return Path(program)


def java_home(java: Path) -> Path:
    """Returns the JAVA_HOME of a program `java`, which may be a link."""
    return java.resolve().parents[1]
