"""A guide's blocks as a reader pastes them: files written, commands typed into one real shell. Not the tests of it.

A ```console block has commands after `$ ` and what they print below them; `...` stands for any text. A block of another
language that begins with `# name` is a file.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS_MAX = 540.0
CLOSE_SECONDS_MAX = 60.0
BETWEEN_REPEATS_SECONDS = 0.1
ASKS = ("outbox status", "outbox messages list", "curl ")
"""Commands that only look, so that they may be typed again until what they show has come about."""

_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[-1]).read().decode())"
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>[\w.-]+\.\w+)\n")


@dataclass(frozen=True, slots=True)
class Typed:
    """A command and the lines that it is said to print."""

    command: str
    prints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A file and its text."""

    name: str
    text: str


def steps(text: str) -> Iterator[Typed | Written]:
    """What a reader of these paragraphs does, in order. Raises ValueError for a block that nobody could do."""
    for block in _BLOCK.finditer(text):
        if block["language"] == "console":
            yield from _typed(block["text"])
        else:
            named = _FILE.match(block["text"])
            if named is None:
                raise ValueError(f"a {block['language']} block does not begin with `# name`: {block['text'][:60]!r}")
            yield Written(named["name"], block["text"])


def section(guide: str, number: int) -> str:
    """The section `## N. ...` of a guide."""
    return re.split(r"^## ", guide, flags=re.MULTILINE)[number].removeprefix(f"{number}. ")


def _typed(block: str) -> Iterator[Typed]:
    head, *commands = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if head:
        raise ValueError(f"a console block begins with {head!r}, not with a command")
    for one in commands:
        command, *prints = one.rstrip("\n").split("\n")
        yield Typed(command, tuple(prints))


class Terminal:
    """One shell with job control in one folder, and all that it and its background jobs print."""

    def __init__(self, folder: Path, *, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._said = threading.Condition()
        self._lines: list[str] = []
        self._commands = 0
        # Commands come by a descriptor of their own, so that no program that they start reads the next one.
        reads, writes = os.pipe()
        self._keyboard = os.fdopen(writes, "w")
        try:
            self._shell = subprocess.Popen(
                ["bash", "--norc", f"/dev/fd/{reads}"], cwd=folder, env=dict(environment), text=True, process_group=0,
                pass_fds=[reads], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        finally:
            os.close(reads)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.status("set -m")  # each job in a process group of its own, which a Ctrl-C reaches, as at a terminal

    @property
    def text(self) -> str:
        """All that was printed so far."""
        with self._said:
            return "\n".join(self._lines)

    def do(self, step: Typed | Written) -> list[str]:
        """Do it; the lines that it should have printed and did not."""
        if isinstance(step, Written):
            (self._folder / step.name).write_text(step.text)
            return []
        if step.command.startswith(ASKS):
            return self._ask(step)
        start = len(self._lines)
        self.status(step.command)
        return self._missing(step.prints, start, seconds=ANSWER_SECONDS_MAX)

    def status(self, command: str) -> int:
        """Type a command and wait until the shell takes the next one; its exit status."""
        self._commands += 1
        mark = f"end of command {self._commands}: "
        self._keyboard.write(f"{command}\nprintf '\\n{mark}%d\\n' $?\n")
        self._keyboard.flush()
        with self._said:
            assert self._said.wait_for(lambda: self._find(mark), timeout=ANSWER_SECONDS_MAX), self.text
            return int(self._find(mark)[0].removeprefix(mark))

    def close(self) -> None:
        """End the shell and whatever still runs in it."""
        if self._shell.poll() is None:
            self._keyboard.write("kill -9 $(jobs -p) 2>/dev/null; exit\n")
        self._keyboard.close()
        try:
            self._shell.wait(CLOSE_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        self._reader.join(CLOSE_SECONDS_MAX)
        assert self._shell.stdout is not None
        self._shell.stdout.close()

    def _ask(self, step: Typed) -> list[str]:
        """Type it again until it shows what it should."""
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        while True:
            start = len(self._lines)
            self.status(step.command)
            missing = self._missing(step.prints, start, seconds=BETWEEN_REPEATS_SECONDS)
            if not missing or time.monotonic() > deadline:
                return missing

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            with self._said:
                self._lines.append(line.rstrip())
                self._said.notify_all()

    def _find(self, mark: str) -> list[str]:
        return [line for line in self._lines if line.startswith(mark)]

    def _missing(self, expected: tuple[str, ...], start: int, *, seconds: float) -> list[str]:
        """What of the expected lines has not been printed since `start`, `seconds` from now."""
        deadline = time.monotonic() + seconds
        with self._said:
            while missing := _not_printed(expected, self._lines[start:]):
                if not self._said.wait(max(0.0, deadline - time.monotonic())):
                    break
            return missing


def _not_printed(expected: tuple[str, ...], lines: list[str]) -> list[str]:
    """The expected lines that no line is; in any order, since background jobs print when they come to it."""
    rest, missing = list(lines), []
    for one in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in one.split("...")))
        found = next((line for line in rest if pattern.fullmatch(line)), None)
        if found is None:
            missing.append(one)
        else:
            rest.remove(found)
    return missing


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """A terminal in which `outbox` and `python` are this checkout's; nothing of it runs on afterwards."""
    commands = folder / "commands"
    commands.mkdir(parents=True)
    _command(commands / "outbox", f"{sys.executable} -m outbox")
    _command(commands / "python", sys.executable)
    if shutil.which("curl") is None:
        _command(commands / "curl", f'{sys.executable} -c "{_GET}"')
    # Without PYTHONUNBUFFERED, which writes a line in pieces, between which another job's line may come.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHON"))}
    paths = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    place = folder / "reader"
    place.mkdir()
    opened = Terminal(place, environment={**kept, **paths})
    try:
        yield opened
    finally:
        opened.close()


def _command(path: Path, starts: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {starts} "$@"\n')
    path.chmod(0o755)
