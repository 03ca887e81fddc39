"""Stores results by window: each is staged, renamed as a whole, then published by replacing one file atomically.

Readers follow `windows.json` and never see half a window, also after a power failure: it names tables that are synced.
A process killed between any two writes leaves only files that it does not name, and the next run removes them. It does
the same work into the same folders. No table format, whose jars would come with the package, and no database is needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from spark_reconcile.core.synced_files import Sync, sync_path, sync_tree, write_whole
from spark_reconcile.core.time_buckets import HOUR_MS, Span

INDEX: Final = "windows.json"
_FOLDER: Final = "windows"
_STAGING: Final = ".staging"
FORMAT: Final = 1

Checkpoint = Callable[[str], None]
"""Called before each write with its name: tests kill the process there."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window with published results. `open`: it has pending verdicts, so it is evaluated again. `late`: sources from
    which it was purged before its first evaluation.
    """

    fingerprint: str
    version: str
    judged_at_ms: int
    open: bool
    result: dict[str, Any]
    late: list[str] = []


class _Index(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    windows: dict[str, Window] = {}
    begun: dict[str, int] = {}
    """Since when each source was complete when a run first read it."""


class WindowStore:
    """The windows of one output folder. One process at a time may write it; see lock()."""

    def __init__(self, output: Path, *, checkpoint: Checkpoint = lambda _: None, sync: Sync = os.fsync) -> None:
        self._output = output
        self._sync = sync
        self._folder = output / _FOLDER
        self.checkpoint = checkpoint
        self._index = _read(output / INDEX)

    @property
    def windows(self) -> Mapping[int, Window]:
        """The published windows, by start time."""
        return {int(start): window for start, window in self._index.windows.items()}

    def begun(self, reaches: Mapping[str, int]) -> Mapping[str, int]:
        """Since when each source was complete when a run first read it; stored with the next published windows."""
        for name, reach_ms in reaches.items():
            self._index.begun[name] = min(reach_ms, self._index.begun.get(name, reach_ms))
        return dict(self._index.begun)

    def folder(self, start_ms: int) -> Path:
        """Returns the folder of a published window's tables."""
        window = self._index.windows[str(start_ms)]
        return self._folder / str(start_ms) / window.version

    def staging(self) -> Path:
        """Returns a new staging folder for a batch; removes remains of earlier processes and unreferenced versions."""
        stage = self._folder / _STAGING
        shutil.rmtree(stage, ignore_errors=True)
        self._sweep()
        try:
            stage.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write to {self._output}: {error.strerror}; name another [output] folder"
            ) from error
        return stage

    def publish(self, windows: Mapping[int, Window]) -> None:
        """Publish these windows, whose tables are in the staging folder as `<start>/`; replaces earlier versions."""
        stage = self._folder / _STAGING
        for start_ms, window in sorted(windows.items()):
            final = self._folder / str(start_ms) / window.version
            self.checkpoint(f"place {start_ms}")
            shutil.rmtree(final, ignore_errors=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            staged = stage / str(start_ms)
            staged.mkdir(exist_ok=True)  # a window without rows classified one by one
            sync_tree(staged, sync=self._sync)
            staged.rename(final)
            sync_path(final.parent, sync=self._sync)
        sync_path(self._folder, sync=self._sync)
        self._index.windows.update({str(start_ms): window for start_ms, window in windows.items()})
        self._write_index()
        self.checkpoint("sweep")
        shutil.rmtree(stage, ignore_errors=True)

    def _write_index(self) -> None:
        self.checkpoint("write index")
        index = msgspec.json.format(msgspec.json.encode(self._index, order="sorted"))
        write_whole(
            self._output / INDEX, index, sync=self._sync, before_shown=lambda: self.checkpoint("show index")
        )  # fmt: skip

    def _sweep(self) -> None:
        """Remove unreferenced folders: an earlier process's staging, and versions that were replaced."""
        if not self._folder.exists():
            return
        for window in self._folder.iterdir():
            shown = self._index.windows.get(window.name)
            for version in window.iterdir() if window.is_dir() else ():
                if shown is None or version.name != shown.version:
                    shutil.rmtree(version, ignore_errors=True)


def _read(path: Path) -> _Index:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except FileNotFoundError:
        return _Index()
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); move it away to begin anew") from error
    if index.format != FORMAT:
        raise ConfigurationError(f"{path} was written by another version (format {index.format}); move it away")
    return index


WINDOWS_MAX: Final = 24 * 366 * 2


def closed_windows(since_ms: int, until_ms: int, *, now_ms: int, grace_ms: int) -> list[int]:
    """Returns the hours that overlap [since, until) and ended more than the grace time ago, oldest first.

    Raises ConfigurationError for a range that is empty or too long.
    """
    if until_ms <= since_ms:
        raise ConfigurationError("--since is not before --until; name an earlier --since")
    first, last = since_ms // HOUR_MS, -(-until_ms // HOUR_MS)
    if last - first > WINDOWS_MAX:
        raise ConfigurationError(f"the span has {last - first:,} hours; at most {WINDOWS_MAX:,} are judged in one run")
    starts = [hour * HOUR_MS for hour in range(first, last)]
    return [start for start in starts if start + HOUR_MS + grace_ms <= now_ms]


def newest_closed(now_ms: int, *, grace_ms: int) -> int:
    """Returns the newest hour that ended more than the grace time ago."""
    return (now_ms - grace_ms) // HOUR_MS * HOUR_MS - HOUR_MS


def span_of(windows: Sequence[int], *, slack_ms: int) -> Span:
    """Returns the time range to read for these windows: extended at both ends, since rows and ids have other clocks."""
    return Span(since_ms=windows[0] - slack_ms, until_ms=windows[-1] + HOUR_MS + slack_ms)


def to_evaluate(windows: Sequence[int], shown: Mapping[int, Window], fingerprints: Mapping[int, str]) -> list[int]:
    """Returns the windows that were never evaluated, whose records changed since, or that were open."""
    return [start for start in windows if _stale(shown.get(start), fingerprints.get(start, ""))]


def batches(windows: Sequence[int], *, size: int) -> list[list[int]]:
    """Splits windows into batches of so many, which are evaluated together."""
    return [list(windows[start : start + size]) for start in range(0, len(windows), size)]


def _stale(shown: Window | None, fingerprint: str) -> bool:
    return shown is None or shown.open or shown.fingerprint != fingerprint
