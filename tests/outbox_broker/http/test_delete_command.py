"""`outbox broker topic delete | topic purge | group delete`: asks, refuses what is in use unless forced, says what was
done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own."""
    with served(tmp_path / "data") as server:
        yield server.url


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    """A client of it, with a message that its group holds."""
    made = connect(url)
    made.publish([Message(id="a", topic=TOPIC, body=b"")])
    made.pull(TOPIC, GROUP)
    yield made
    made.close()


def outbox(*arguments: str, url: str = "") -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments, *(["--url", url] if url else [])])
    return int(ended.value.code or 0)


def test_what_is_in_use_is_deleted_by_force_alone(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("group", "delete", TOPIC, GROUP, "--yes", url=url) == 1
    assert "stop its consumers, or force" in capsys.readouterr().err
    assert outbox("topic", "delete", TOPIC, "--yes", url=url) == 1
    assert "1 consumer groups" in capsys.readouterr().err

    assert outbox("group", "delete", TOPIC, GROUP, "--yes", "--force", url=url) == 0
    assert capsys.readouterr().out == f"{TOPIC}/{GROUP} deleted\n"
    assert outbox("topic", "delete", TOPIC, "--yes", url=url) == 0
    assert capsys.readouterr().out == f"{TOPIC} deleted\n"
    assert broker.admin.topics() == []
    assert outbox("topic", "delete", TOPIC, "--yes", url=url) == 1
    assert "there is no topic orders" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("group", "delete"), ("group", "show")], ids=" ".join)
def test_a_name_of_dots_is_refused_before_it_makes_the_path_of_another_thing(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert (
        outbox(*command, TOPIC, "..", *(["--yes", "--force"] if command == ("group", "delete") else []), url=url) != 0
    )
    assert "consumer group" in capsys.readouterr().err
    assert broker.admin.topics() == [TOPIC]


def test_what_was_done_is_told_as_json(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("group", "delete", TOPIC, GROUP, "--yes", "--force", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out) == {"topic": TOPIC, "group": GROUP, "deleted": True}
    assert outbox("topic", "delete", TOPIC, "--yes", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out) == {"topic": TOPIC, "deleted": True}


def test_nothing_is_deleted_where_nobody_can_be_asked(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("group", "delete", TOPIC, GROUP, "--force", url=url) == 2
    assert outbox("topic", "delete", TOPIC, "--force", url=url) == 2

    assert "nothing was done: say --yes" in capsys.readouterr().err
    assert broker.admin.figures(TOPIC, GROUP)["in_flight"] == 1


@pytest.mark.parametrize(("answer", "is_deleted"), [(True, True), (False, False)])
def test_a_person_is_asked_and_told_what_goes(
    url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, answer: bool, is_deleted: bool
) -> None:
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)

    outbox("group", "delete", TOPIC, GROUP, "--force", url=url)
    outbox("topic", "delete", TOPIC, "--force", url=url)

    assert [one.partition(",")[0] for one in asked] == [
        f"Delete the consumer group {GROUP} of {TOPIC}", f"Delete the topic {TOPIC}",
    ]  # fmt: skip
    assert "1 in flight" in asked[0]
    assert (broker.admin.topics() == []) is is_deleted


@pytest.mark.parametrize("command", ["topic delete", "group delete"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox(*command.split(), "--help") == 0

    shown = capsys.readouterr().out
    assert f"outbox broker {command} orders" in shown
    assert "--force" in shown


def test_a_purge_says_what_it_removed_and_what_it_kept(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    now_ms = time.time_ns() // 1_000_000
    broker.publish(
        [
            Message(id="b", topic=TOPIC, body=b""),
            Message(id="later", topic=TOPIC, body=b"", deliver_at_ms=now_ms + 3_600_000),
        ]
    )

    assert outbox("topic", "purge", TOPIC, "--yes", url=url) == 0

    assert capsys.readouterr().out == (
        f"{TOPIC} purged: 1 waiting messages and 1 in flight removed from 1 consumer groups, 0 scheduled canceled, "
        "0 dead letters discarded; kept: 0 dead letters, 1 scheduled\n"
    )
    assert broker.pull(TOPIC, GROUP) == []
    assert outbox("topic", "purge", TOPIC, "--scheduled", "--yes", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out) == {
        "topic": TOPIC, "groups": 1, "waiting": 0, "in_flight": 0, "scheduled_canceled": 1, "scheduled_kept": 0,
        "dead_discarded": 0, "dead_kept": 0,
    }  # fmt: skip


def test_a_purge_discards_dead_letters_where_that_is_asked(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.admin.declare_group("other", GROUP, GroupConfig(max_attempts=1))
    broker.publish([Message(id="b", topic="other", body=b"")])
    broker.nack([delivery.receipt for delivery in broker.pull("other", GROUP)])

    assert outbox("topic", "purge", "other", "--dead", "--yes", "--json", url=url) == 0

    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["dead_discarded"], outcome["dead_kept"]) == (1, 0)
    assert broker.admin.figures("other", GROUP)["dead"] == 0


def test_a_purge_that_nobody_said_yes_to_does_nothing(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.publish([Message(id="b", topic=TOPIC, body=b"")])

    assert outbox("topic", "purge", TOPIC, url=url) == 2

    assert "say --yes" in capsys.readouterr().err
    assert [delivery.id for delivery in broker.pull(TOPIC, GROUP)] == ["b"]


def test_a_purge_of_an_unknown_topic_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("topic", "purge", "nowhere", "--yes", url=url) == 1
    assert "there is no topic nowhere" in capsys.readouterr().err
