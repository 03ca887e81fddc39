"""The output of a benchmark program: JSON on stdout, a table and progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

talk = Console(stderr=True)
_LIBRARIES = ("SQLAlchemy", "PyMySQL", "asyncmy", "requests", "msgspec", "outbox-mq")


def arguments(description: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """Returns a parser with the options that every program has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--server", choices=("mariadb", "mysql"), default="mariadb", help="which one to start")
    parser.add_argument("--url", help="a running server instead, with all privileges: mysql+pymysql://root@host/")
    parser.add_argument("--memory-mb", type=int, default=1024, help="its buffer pool and redo log, where we start it")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"medians of so many ({rounds})")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; figures mean nothing")
    return parser


def progress() -> Progress:
    """Returns a progress bar on stderr, removed at the end."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=talk, transient=True,
    )  # fmt: skip


def emit(name: str, *, chosen: argparse.Namespace, server: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Print the result as JSON."""
    options = {key: value for key, value in vars(chosen).items() if key != "url"}
    whole = {"benchmark": name, "options": options, "server": dict(server), "machine": machine(), **results}
    print(json.dumps(whole, indent=2, default=str))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stderr."""
    shown = Table(title=title)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        shown.add_row(*(_text(cell) for cell in row))
    talk.print(shown)


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": sys.version.split()[0],
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(cell: object) -> str:
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:,.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
        case int():
            return f"{cell:,}"
        case _:
            return str(cell)
