"""What the documents name is there: commands parse, code compiles, events and links exist. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import product, takewhile
from pathlib import Path

import click
import pytest
import typer

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("outbox_core", "outbox", "compensator", "outbox_broker", "broker_adapter", "spark_reconcile")
NAMED_BY_ENVIRONMENT = {"OUTBOX_DATABASE__URL": "sqlite:///shop.db", "OUTBOX_BROKER__URL": "http://127.0.0.1:1"}

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:\$ )?(outbox [a-z].*)$", re.MULTILINE)
_IN_PROSE = re.compile(r"(?<!`)`outbox ([a-z][^`]*)`(?!`)")
_EXAMPLE = re.compile(r"^(?: *Example:)? +(outbox [a-z].*)$", re.MULTILINE)
_EVENT = re.compile(
    r"`((?!test_)(?:[a-z]+_)+(?:added|anew|assigned|changed|damaged|failed|held|lost|missed|quarantined|refused|retried"
    r"|settled|space|stale|unavailable|up|weak))`"
)
_LINK = re.compile(r"\]\((?P<file>[^)#:]*)(?:#(?P<heading>[^)]+))?\)")


def blocks(languages: set[str]) -> Iterator[tuple[Path, str]]:
    """The pages' blocks of these languages."""
    for page in PAGES:
        for block in _BLOCK.finditer(page.read_text()):
            if block["language"] in languages:
                yield page, block["text"]


def all_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """A command, or those under it, by the words that call them."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, one in below.items():
        yield from all_commands(one, f"{name} {word}")


def every_command() -> dict[str, click.Command]:
    """All commands by their words, `outbox` left out."""
    rooms = {entry.name: typer.main.get_command(entry.load()) for entry in entry_points(group="outbox.commands")}
    return {name: one for room, command in rooms.items() for name, one in all_commands(command, room)}


def parse(line: str, commands: dict[str, click.Command]) -> None:
    """Let the real command read a line. Raises click's UsageError, or KeyError where there is no such command."""
    _, *words = takewhile(lambda word: word not in {">", ">>", "|"}, shlex.split(line.removesuffix("&"), comments=True))
    depth = next((depth for depth in (1, 2, 3) if " ".join(words[:depth]) in commands), 4)
    name = " ".join(words[:depth])
    with commands[name].make_context(name, words[depth:]):
        pass


def prose_commands(page: Path) -> Iterator[str]:
    """The commands in a page's sentences, `outbox` left out: one for each of `run|once`."""
    text = _BLOCK.sub("", page.read_text())
    for line in _IN_PROSE.findall(text):
        for words in product(*(word.split("|") for word in line.split())):
            yield " ".join(words)


def unknown_in(line: str, commands: dict[str, click.Command]) -> str:
    """The part of a line that no command has; of a line that names a group, its commands together. Empty: none."""
    words, prefix = line.split(), ""
    for word in takewhile(re.compile(r"[a-z][a-z-]*$").match, words):
        if prefix in commands:
            break
        prefix = f"{prefix} {word}".strip()
    meant = [command for name, command in commands.items() if f"{name} ".startswith(f"{prefix} ")]
    options = {option for command in meant for one in command.params for option in (*one.opts, *one.secondary_opts)}
    named = {word.partition("=")[0].rstrip(",.") for word in words if word.startswith("--")}
    return ", ".join(sorted(named - options)) if meant else prefix


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, click.Command]:
    """All commands, their URLs given by the environment."""
    for name, value in NAMED_BY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return every_command()


def test_every_command_line_of_the_documents_is_one_that_the_command_takes(commands: dict[str, click.Command]) -> None:
    lines = [line for _, text in blocks({"console", "sh", "bash"}) for line in _COMMAND.findall(text)]

    for line in lines:
        parse(line, commands)

    assert len(lines) > 15


def test_every_command_in_a_sentence_is_there_with_its_options(commands: dict[str, click.Command]) -> None:
    lines = [(page, line) for page in PAGES if page.parent.name != "decisions" for line in prose_commands(page)]

    wrong = [(page.name, line, reason) for page, line in lines if (reason := unknown_in(line, commands))]

    assert len(lines) > 60
    assert wrong == []


def test_every_example_of_a_help_page_is_one_that_the_command_takes(commands: dict[str, click.Command]) -> None:
    pages = {name: _EXAMPLE.findall(command.help or "") for name, command in commands.items()}

    for line in (line for lines in pages.values() for line in lines):
        parse(line, commands)

    assert {name for name, lines in pages.items() if not lines} == set()


def test_every_python_block_of_the_documents_compiles() -> None:
    found = list(blocks({"python"}))

    for page, text in found:
        compile(text, str(page), "exec")

    assert len(found) > 20


def test_every_event_that_the_documents_name_is_logged_or_counted_by_the_code() -> None:
    code = "\n".join(path.read_text() for room in SOURCES for path in (ROOT / room).rglob("*.py"))
    named = {
        (page.name, name)
        for page in PAGES
        if page.parent.name != "decisions"
        for name in _EVENT.findall(page.read_text())
    }

    assert len(named) > 30
    assert sorted((page, name) for page, name in named if f'"{name}"' not in code) == []


def test_every_link_between_documents_leads_to_a_file_and_a_heading() -> None:
    dead = []
    for page in PAGES:
        for link in _LINK.finditer(page.read_text()):
            target = (page.parent / link["file"]) if link["file"] else page
            if not target.exists() or (link["heading"] and link["heading"] not in _headings(target)):
                dead.append(f"{page.name}: {link[0]}")

    assert dead == []


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where the pages are shown."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
