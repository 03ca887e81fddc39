"""A data folder is asked for its format before anything in it is touched; what is not opened stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.message import Message
from outbox_core.runtime.command import main

TOPIC, GROUP = "orders", "billing"
IS_OF_FILES = True
NEWER = {"format": 1_000, "opened_by": 1_000, "release": "9.0"}
OLDER = {"format": 0, "opened_by": 0, "release": "0.0"}
type_of_open = Callable[..., Engine]


def say(folder: Path, **content: object) -> None:
    (folder / "format").write_text(json.dumps(content))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def used(open_engine: type_of_open, folder: Path) -> Path:
    """A folder with a message."""
    engine = open_engine()
    engine.publisher.publish([Message(id="m1", topic=TOPIC, body=b"")])
    engine.close()
    return folder


def outbox(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("content", "cure"),
    [(NEWER, r"release 9\.0.*restore the backup that was taken before the upgrade"), (OLDER, r"drain it with release")],
)
def test_a_folder_of_another_format_is_refused_and_left_as_it_is(
    used: Path, open_engine: type_of_open, content: dict[str, object], cure: str
) -> None:
    say(used, **content)
    before = contents(used)

    with pytest.raises(ConfigurationError, match=cure):
        open_engine()

    assert contents(used) == before


def test_a_folder_of_a_later_format_that_hinders_nothing_is_opened_and_stays_of_that_format(
    used: Path, open_engine: type_of_open
) -> None:
    say(used, format=1_000, opened_by=1, release="9.0")

    engine = open_engine()

    assert [delivery.id for delivery in engine.puller.pull(TOPIC, GROUP)] == ["m1"]
    assert json.loads((used / "format").read_text())["format"] == 1_000


@pytest.mark.parametrize("left", [None, b"", b'{"form'])
def test_a_folder_that_does_not_say_its_format_is_opened_and_says_it_then(
    used: Path, open_engine: type_of_open, left: bytes | None
) -> None:
    (used / "format").unlink()
    if left is not None:
        (used / "format").write_bytes(left)

    engine = open_engine()

    assert [delivery.id for delivery in engine.puller.pull(TOPIC, GROUP)] == ["m1"]
    assert json.loads((used / "format").read_text())["format"] == 1


def test_the_command_asks_and_changes_nothing(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(used)

    assert outbox("folder", str(used)) == 0
    assert "has format 1" in capsys.readouterr().out
    assert outbox("folder", str(used), "--json") == 0
    assert json.loads(capsys.readouterr().out)["found"]["format"] == 1
    assert contents(used) == before


def test_the_command_fails_for_a_folder_that_is_not_opened(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(used, **NEWER)

    assert outbox("folder", str(used)) == 2
    assert "restore the backup" in capsys.readouterr().err


def test_the_command_says_that_a_folder_is_new_or_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("folder", str(tmp_path)) == 0
    assert "does not say its format" in capsys.readouterr().out
    assert outbox("folder", str(tmp_path / "nowhere")) == 2
    assert "there is no folder" in capsys.readouterr().err
