"""The demo with an engine of its own for the reminders, and what must hold of its figures. Not a test itself."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.outbox_demo.foreign_demo import BOOKINGS, SMALL, WAIT_SECONDS, WRONG


def run_delay_demo(
    folder: Path, delay: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `environment`: what is different from ours."""
    command = [sys.executable, "-m", "outbox", "demo", "--folder", str(folder), "--delay", delay, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env={**os.environ, **(environment or {})}
    )


def check_delay_demo(folder: Path, delay: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Each reminder was delivered, canceled, or waits, as the business's own rows say; returns what the demo said."""
    command = (*SMALL, "--json", *arguments)
    ended = run_delay_demo(folder, delay, *command, environment=environment)

    assert ended.returncode == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    paid, reminders = rows(folder, "demo_payment"), rows(folder, "demo_reminder")
    withdrawn = rows(folder, "demo_reminder WHERE is_withdrawn")
    assert figures["payments"] == paid >= BOOKINGS
    assert figures["reminders"] == reminders > paid, "no trip was moved"
    assert figures["messages"] == paid + reminders
    assert figures["delivered"] + figures["canceled"] + figures["pending"] == 2 * paid + reminders
    assert figures["canceled"] <= withdrawn > 0, "on a slow machine each cancel may come when its reminder has gone"
    assert figures["pending"] == waiting(folder) > 0
    assert figures["delivered"] == rows(folder, "demo_ticket") + rows(folder, "demo_notification")
    assert figures["rolled_back"] > 0
    assert [figures[name] for name in WRONG] == [0] * len(WRONG)
    assert "killed between commit and send" in ended.stderr
    assert "and a consumer killed; bookings go on without them" in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def rows(folder: Path, table: str) -> int:
    """Count rows of the business's database."""
    with closing(sqlite3.connect(folder / "business.db")) as connection:
        count: int = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
    return count


def waiting(folder: Path) -> int:
    """The reminders that are due later than now."""
    return rows(folder, f"demo_reminder WHERE NOT is_withdrawn AND due_at_ms > {time.time_ns() // 1_000_000}")


def with_program(program: str) -> dict[str, str]:
    """The environment of a machine that has this server installed."""
    return {"PATH": os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")])}
