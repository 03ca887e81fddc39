"""The main job on a broker that is there already, and what must hold of its figures. Not a test itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

BOOKINGS: Final = 200
SMALL: Final = ("--bookings", str(BOOKINGS), "--flights", "5000")
"""A run that need not load the flights of the whole year, of which it books as many either way."""
WRONG: Final = ("lost", "phantom", "doubled", "early", "revived")
"""The figures that must be 0."""
WAIT_SECONDS: Final = 900  # more than the demo itself waits for one thing


def demo_command(folder: Path, url: str, *arguments: str) -> list[str]:
    """The demo on a broker."""
    return [sys.executable, "-m", "outbox", "demo", "--folder", str(folder), "--broker", url, *arguments]


def run_demo(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(demo_command(folder, url, *arguments), capture_output=True, text=True, timeout=WAIT_SECONDS)


def check_main_job(folder: Path, url: str) -> None:
    """Worker, delay service and consumer are killed, and everything that was paid has its effects once."""
    ended = run_demo(folder, url, *SMALL, "--json")

    assert ended.returncode == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    paid = figures["payments"]
    assert paid >= BOOKINGS
    assert (figures["messages"], figures["delivered"]) == (2 * paid, 3 * paid)
    assert figures["rolled_back"] > 0
    assert [figures[name] for name in WRONG] == [0] * len(WRONG)
    assert "killed between commit and send" in ended.stderr
    assert "delay service and a consumer killed" in ended.stderr
    assert "Traceback" not in ended.stderr
