"""Installs the bindings of the storage engines into a folder of their own. The project does not depend on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.harness.report import talk

LIBRARIES: Final = {"rocksdict": "0.3.29", "lmdb": "3.0.0"}


def libraries_folder() -> Path:
    """Returns the folder that a contestant's process adds to its path; fills it once. Raises RuntimeError with pip's
    words.
    """
    wanted = [f"{name}=={version}" for name, version in LIBRARIES.items()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "outbox-mq" / "benchmark-storage" / "-".join([sys.implementation.cache_tag or "python", *wanted])
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        talk.print(f"installing the storage engines: {', '.join(wanted)}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
        done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise RuntimeError(f"pip install failed: {done.stderr.strip()[-2000:]}")
        (folder / "complete").touch()
    return folder
