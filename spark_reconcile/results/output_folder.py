"""The output folder: results are staged, then renamed as a whole, then named by the manifest."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.errors import OutputFailed
from spark_reconcile.core.synced_files import write_whole

MANIFEST: Final = "manifest.json"
RUN_ID: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
_STAGING: Final = ".staging-"
_DAY_SECONDS: Final = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class Staging:
    """A run that is being written; readers of the manifest do not see it."""

    run_id: str
    folder: Path
    final: Path

    def table(self, name: str) -> str:
        """Returns the path to which Spark writes a table."""
        return str(self.folder / name)

    def publish(self, headline: Mapping[str, Any]) -> Path:
        """Publish the run: first its folder under its own name, then the manifest that names it as the newest."""
        self.folder.rename(self.final)
        manifest = self.final.parent / MANIFEST
        write_whole(manifest, json.dumps({"newest": self.run_id, **headline}, indent=2).encode())
        return self.final


@contextmanager
def staging(output: Path, *, now_ms: int) -> Iterator[Staging]:
    """Returns a new folder for one run; removes it if the run was not published, and remains of killed runs.

    The caller must be the only writer of `output`. Raises ConfigurationError if the folder cannot be created.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ms / 1000))
    run_id = f"{stamp}-{secrets.token_hex(3)}"
    folder = output / f"{_STAGING}{run_id}"
    for leftover in output.glob(f"{_STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {output}: {error.strerror}; name another [output] folder") from error
    try:
        yield Staging(run_id, folder, output / run_id)
    except OSError as error:
        raise OutputFailed(
            f"cannot write to {output}: {error.strerror or error}; free space or repair the disk, and run again"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_runs(output: Path, *, keep_days: float | None, newest: str) -> None:
    """Remove the folders of runs that were written so many days ago, but for the newest; None: keep all.

    Ages are those of the files, as a run may be given another time than now. What cannot be removed stays for the next
    run.
    """
    if keep_days is None:
        return
    kept_since = time.time() - keep_days * _DAY_SECONDS
    with suppress(OSError):
        for run in [run for run in output.iterdir() if RUN_ID.fullmatch(run.name) and run.name != newest]:
            if run.stat().st_mtime < kept_since:
                removed = output / f"{_STAGING}{run.name}"
                run.rename(removed)  # a run that a kill leaves half removed is nobody's result
                shutil.rmtree(removed, ignore_errors=True)
