"""`outbox broker topic | group | message | schedule | dead` show what a broker has, on a server that runs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.http.broker_cli import app
from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served

TOPIC = "orders"
HOUR_MS = 3_600_000
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own."""
    with served(tmp_path / "data") as server:
        yield server.url


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    """A client of it."""
    made = connect(url)
    yield made
    made.close()


def outbox(*arguments: str, url: str | None) -> int:
    """The exit status of `outbox broker`; without a URL, of a command that asks no broker."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments, *([] if url is None else ["--url", url])])
    return int(ended.value.code or 0)


def printed(capsys: Capture, *arguments: str, url: str) -> Any:
    """What the command prints as JSON."""
    capsys.readouterr()
    assert outbox(*arguments, "--json", url=url) == 0
    return json.loads(capsys.readouterr().out)


def publish(broker: Broker, count: int, **more: Any) -> None:
    broker.publish(
        [
            Message(id=f"m{number}", topic=TOPIC, key=f"k{number % 2}", body=b"%d" % number, **more)
            for number in range(count)
        ]
    )


def test_topics_and_their_groups_are_shown_with_what_waits(url: str, broker: Broker, capsys: Capture) -> None:
    assert outbox("topic", "list", url=url) == 0
    assert capsys.readouterr() == ("", "no topics\n")
    publish(broker, 3)
    broker.admin.declare_group(TOPIC, "billing", GroupConfig())
    broker.admin.declare_group(TOPIC, "late", GroupConfig(start="latest"))

    topics = printed(capsys, "topic", "list", url=url)
    topic = printed(capsys, "topic", "show", TOPIC, url=url)
    groups = printed(capsys, "group", "list", TOPIC, url=url)

    assert topics == [TOPIC]
    assert (topic["figures"]["stored"], list(topic["groups"])) == (3, list(groups))
    assert {name: figures["backlog"] for name, figures in groups.items()} == {"billing": 3, "late": 0}
    assert outbox("topic", "show", TOPIC, url=url) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stored", "3"] in lines
    assert [line[:2] for line in lines[-3:]] == [["group", "backlog"], ["billing", "3"], ["late", "0"]]


def test_a_message_is_published_with_all_that_is_said_of_it(
    url: str, broker: Broker, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--id", "m1", "--key", "k", "--header", "type=card", "--header", "note=a=b", "--body", "text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00")))

    assert outbox("message", "publish", TOPIC, *options, url=url) == 0
    assert outbox("message", "publish", TOPIC, *options, url=url) == 0
    assert outbox("message", "publish", TOPIC, "--body", "-", url=url) == 0
    assert outbox("message", "publish", TOPIC, "--header", "none", url=url) == 2
    assert outbox("message", "publish", TOPIC, "--delay-ms", str(10 * 365 * 24 * HOUR_MS), url=url) == 1

    lines = [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["m1", "stored"], ["m1", "duplicate"]]
    assert [status for _, status in lines[2:]] == ["stored", "rejected"]
    first, second = broker.pull(TOPIC, "g")
    assert (first.id, first.key, dict(first.headers)) == ("m1", "k", {"type": "card", "note": "a=b"})
    assert (first.body, second.body) == (b"text", b"\xff\x00")


def test_the_newest_messages_are_shown_or_those_from_an_offset_on(url: str, broker: Broker, capsys: Capture) -> None:
    publish(broker, 15)

    newest = printed(capsys, "message", "peek", TOPIC, url=url)
    oldest = printed(capsys, "message", "peek", TOPIC, "--offset", "0", "--limit", "2", url=url)

    assert [message["id"] for message in newest["messages"]] == [f"m{number}" for number in range(5, 15)]
    assert [(message["id"], message["body"]) for message in oldest["messages"]] == [("m0", "0"), ("m1", "1")]
    assert (newest["next_offset"], oldest["next_offset"]) == (15, 2)
    assert outbox("message", "peek", TOPIC, "--offset", "0", "--limit", "2", url=url) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "more: --offset 2"
    broker.publish(
        [Message(id="odd", topic=TOPIC, body=b"\x1b[2J" + b"x" * 500), Message(id="bin", topic=TOPIC, body=b"\xff")]
    )
    assert outbox("message", "peek", TOPIC, "--limit", "2", url=url) == 0
    _, odd, binary = capsys.readouterr().out.splitlines()
    assert r"\x1b[2Jxxx" in odd
    assert odd.rstrip().endswith("x...")
    assert r"b'\xff'" in binary


def test_messages_are_found_by_id_key_or_header(url: str, broker: Broker, capsys: Capture) -> None:
    publish(broker, 2_500, headers={"type": "card"})
    broker.publish([Message(id="last", topic=TOPIC, key="k1", headers={"type": "cash", "a": "b"}, body=b"")])

    by_id = printed(capsys, "message", "find", TOPIC, "--id", "m2400", "--id", "m7", url=url)
    by_key = printed(capsys, "message", "find", TOPIC, "--key", "k1", "--offset", "2490", "--limit", "3", url=url)
    by_header = printed(capsys, "message", "find", TOPIC, "--header", "a=b", "--header", "type=cash", url=url)

    assert [message["id"] for message in by_id] == ["m7", "m2400"]
    assert [message["id"] for message in by_key] == ["m2491", "m2493", "m2495"]
    assert [message["id"] for message in by_header] == ["last"]
    assert outbox("message", "find", TOPIC, "--id", "nobody", "--id", "m3", url=url) == 1
    assert "m3" in capsys.readouterr().out
    assert outbox("message", "find", TOPIC, "--id", "nobody", url=url) == 1
    assert "no messages" in capsys.readouterr().err
    assert outbox("message", "find", TOPIC, url=url) == 2
    assert "--id, --key or --header" in capsys.readouterr().err


def test_scheduled_messages_are_counted_shown_and_canceled(url: str, broker: Broker, capsys: Capture) -> None:
    assert outbox("message", "publish", TOPIC, "--id", "later", "--delay-ms", str(HOUR_MS), url=url) == 0

    counts = printed(capsys, "schedule", "list", "--topic", TOPIC, url=url)
    shown = printed(capsys, "schedule", "show", "later", url=url)

    assert [count["messages"] for count in counts] == [1]
    assert (shown["id"], shown["topic"]) == ("later", TOPIC)
    assert outbox("schedule", "cancel", "later", url=url) == 2
    assert "say --yes" in capsys.readouterr().err
    assert outbox("schedule", "cancel", "later", "none", "--yes", "--json", url=url) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"id": "later", "status": "canceled"}, {"id": "none", "status": "unknown"},
    ]  # fmt: skip
    assert outbox("schedule", "cancel", "later", "--yes", url=url) == 0, "it is canceled, as was asked"
    capsys.readouterr()
    assert outbox("schedule", "show", "later", url=url) == 1
    assert "no message is scheduled under the id later" in capsys.readouterr().err
    assert (
        outbox("schedule", "refused", url=url) == 1
    )  # a broker refuses nothing that is due: delay services have these
    assert capsys.readouterr().err


def test_one_dead_letter_is_shown_whole(url: str, broker: Broker, capsys: Capture) -> None:
    broker.admin.declare_group(TOPIC, "billing", GroupConfig(max_attempts=1))
    publish(broker, 3, headers={"type": "card"})
    broker.nack([delivery.receipt for delivery in broker.pull(TOPIC, "billing")], reason="no such account")
    capsys.readouterr()

    assert outbox("dead", "show", TOPIC, "billing", "m1", url=url) == 0
    letter = json.loads(capsys.readouterr().out)

    assert (letter["id"], letter["reason"], letter["body"]) == ("m1", "no such account", "1")
    assert (letter["key"], letter["headers"], letter["attempts"]) == ("k1", {"type": "card"}, 1)
    assert outbox("dead", "show", TOPIC, "billing", "other", url=url) == 1
    assert "no dead letter of the id other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("noun", "verb"),
    [(group.name, command.name or command.callback.__name__)
     for group in app.registered_groups if group.name and group.typer_instance
     for command in group.typer_instance.registered_commands if command.callback],
)  # fmt: skip
def test_each_command_has_an_example_and_json(noun: str, verb: str, capsys: Capture) -> None:
    asks_broker = noun != "store" or verb == "copy"
    assert outbox(noun, verb, "--help", url="http://127.0.0.1:9" if asks_broker else None) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert f"outbox broker {noun} {verb}" in shown
    assert ("--json" in shown) or "as JSON" in shown
    assert ("--token-file" in shown) is asks_broker


def test_large_messages_are_shown_as_many_as_are_asked_for(url: str, broker: Broker, capsys: Capture) -> None:
    for number in range(20):  # 80 MiB: more than an answer has
        broker.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x" * (4 * 1024 * 1024))])

    assert outbox("message", "peek", TOPIC, "--limit", "20", url=url) == 0

    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ids == [f"m{number}" for number in range(20)]


def test_json_has_nothing_that_a_terminal_takes_for_its_own(url: str, broker: Broker, capsys: Capture) -> None:
    body = "\x9b2J\x7f\N{RIGHT-TO-LEFT OVERRIDE}"
    broker.publish([Message(id="m1", topic=TOPIC, body=body.encode())])

    assert outbox("message", "peek", TOPIC, "--json", url=url) == 0

    printed_text = capsys.readouterr().out
    assert printed_text.isascii()
    assert "\x7f" not in printed_text
    assert json.loads(printed_text)["messages"][0]["body"] == body


def test_a_publish_without_an_answer_tells_its_id(capsys: Capture) -> None:
    assert outbox("message", "publish", TOPIC, url="http://127.0.0.1:9") == 1

    told = capsys.readouterr().err
    assert "no broker answers" in told
    assert "repeat it with --id " in told
