"""File systems for tests: small ones, and ones whose power can be cut. They need root and mounts: skipped without."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
_BLOCK_BYTES = 4096


def _run(*command: str | Path) -> str:
    # These live in sbin, which is not on everybody's PATH.
    program = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"there is no {command[0]} here")
    done = subprocess.run([program, *map(str, command[1:])], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {done.stderr.strip()[:200]}")
    return done.stdout


@contextmanager
def small_disk(folder: Path, *, size_mb: int) -> Iterator[Path]:
    """A file system in memory, of this size."""
    place = folder / "small"
    place.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=120)


@contextmanager
def filled(place: Path, *, share: float) -> Iterator[None]:
    """A file system of which this share is used, for the length of a block."""
    usage = shutil.disk_usage(place)
    ballast = place / "ballast"
    ballast.write_bytes(bytes(int(share * usage.total) - usage.used))
    try:
        yield
    finally:
        ballast.unlink()


class PoweredDisk:
    """An ext4 in a file, mounted; cut_power() loses what was not synced, as the machine's end would."""

    def __init__(self, folder: Path, *, size_mb: int) -> None:
        self._image, self.place = folder / "disk.img", folder / "disk"
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(size_mb << 20)
        # Nothing of the file system's own is left to be written for the first time later, when that may fail.
        _run(
            "mkfs.ext4", "-q", "-F", "-b", str(_BLOCK_BYTES), "-E", "nodiscard,lazy_journal_init=0,lazy_itable_init=0",
            self._image,
        )  # fmt: skip
        self.power_on()

    def power_on(self) -> None:
        _run("mount", "-o", "loop", self._image, self.place)

    def cut_power(self) -> None:
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def take_out(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True, capture_output=True, timeout=120)


@contextmanager
def powered_disk(folder: Path, *, size_mb: int = 64) -> Iterator[PoweredDisk]:
    """An ext4 that is there until the end of the test."""
    disk = PoweredDisk(folder, size_mb=size_mb)
    try:
        yield disk
    finally:
        disk.take_out()


class FailingDisk(PoweredDisk):
    """One whose device can be made to refuse new blocks: its image has holes, on a file system that can be filled.

    What the device has a place for, such as the file system's journal, it goes on writing: so a sync fails, and the
    file system stays writable.
    """

    def __init__(self, folder: Path, *, size_mb: int) -> None:
        super().__init__(folder, size_mb=size_mb)
        self._ballast = folder / "ballast"
        self.take_out()
        journal = _run("debugfs", "-R", "blocks <8>", self._image).split()
        with self._image.open("r+b") as file:
            for block in map(int, journal):
                file.seek(block * _BLOCK_BYTES)
                data = file.read(_BLOCK_BYTES)
                file.seek(-len(data), os.SEEK_CUR)
                file.write(data)
        self.power_on()

    def fail(self) -> None:
        """From now on, the device has no place for anything more."""
        os.sync()
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(bytes(_BLOCK_BYTES)):
                pass

    def mend(self) -> None:
        """From now on, it has."""
        self._ballast.unlink()


@contextmanager
def failing_disk(folder: Path, *, size_mb: int = 64) -> Iterator[FailingDisk]:
    """An ext4 that is there until the end of the test."""
    with small_disk(folder, size_mb=size_mb) as small:
        disk = FailingDisk(small, size_mb=size_mb)
        try:
            yield disk
        finally:
            disk.take_out()
