"""`outbox broker group ...` on a server that runs: changes what is named, tells figures, says what was refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served

TOPIC, GROUP = "orders", "billing"
LETTERS = 300
"""More than the seconds in which a test asks, at one per second."""


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


def outbox(*arguments: str, url: str) -> int:
    """The exit status of the command, of dead letters if it begins with that word, else of groups."""
    noun, verb, *rest = arguments if arguments[0] == "dead" else ("group", *arguments)
    with pytest.raises(SystemExit) as ended:
        main(["broker", noun, verb, TOPIC, GROUP, *rest, "--url", url])
    return int(ended.value.code or 0)


def test_a_group_is_declared_ordered_and_shown(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("declare", "--ordered", "--filter", "type = 'a'", url=url) == 0
    assert outbox("declare", "--max-attempts", "3", url=url) == 0
    capsys.readouterr()

    assert outbox("show", "--json", url=url) == 0

    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["ordered"], settings["filter"], settings["max_attempts"]) == (True, "type = 'a'", 3)


def test_a_filter_and_an_order_are_taken_away(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=True, filter="type = 'a'", max_attempts=5))

    assert outbox("declare", "--no-ordered", "--filter", "", url=url) == 0

    capsys.readouterr()
    outbox("show", "--json", url=url)
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["ordered"], settings["filter"], settings["max_attempts"]) == (False, None, 5)


def test_dead_letters_are_redriven_at_a_rate(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    broker.publish([Message(id=f"m{number}", topic=TOPIC, body=b"") for number in range(LETTERS)])
    broker.nack([one.receipt for one in broker.pull(TOPIC, GROUP, max_messages=LETTERS)])

    assert outbox("dead", "redrive", "--id", "m2", url=url) == 0
    assert outbox("dead", "redrive", "--per-second", "1", url=url) == 0

    assert capsys.readouterr().out == f"1 redriven\n{LETTERS - 1} redriven\n"
    assert broker.admin.figures(TOPIC, GROUP)["redriving"] > 0


def die(broker: Broker, *ids: str, reason: str) -> None:
    """Publish messages, and give up on them at the second attempt."""
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    broker.publish([Message(id=one, topic=TOPIC, body=b"what it carries") for one in ids])
    for said in ("too early", reason):
        broker.nack([one.receipt for one in broker.pull(TOPIC, GROUP, wait_ms=5_000)], delay_ms=0, reason=said)


def test_dead_letters_are_listed_with_how_their_attempts_went(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("declare", url=url) == 0
    assert outbox("dead", "list", url=url) == 0
    assert capsys.readouterr().err.endswith("no dead letters\n")
    die(broker, "m1", "m2", reason="no such \x1b[2J [b]account")

    assert outbox("dead", "list", "--limit", "1", url=url) == 0

    head, first, second, more = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["id", "attempts", "when", "reason"]
    assert first.split()[:2] == ["m1", "2"]
    assert r"no such \x1b[2J [b]account" in first
    assert (first.rstrip().endswith("1 x too early"), second.strip()) == (True, r"1 x no such \x1b[2J [b]account")
    assert outbox("dead", "list", *more.removeprefix("more: ").split(), url=url) == 0
    [_, first, _] = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["m2", "2"]


def test_dead_letters_are_listed_as_json_with_what_they_carry(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "m1", "m2", reason="broken")

    assert outbox("dead", "list", "--json", "--limit", "1", url=url) == 0

    page = json.loads(capsys.readouterr().out)
    [letter] = page["dead"]
    assert (letter["id"], letter["reason"], letter["body"]) == ("m1", "broken", "what it carries")
    assert letter["history"] == [{"reason": "too early", "attempts": 1}, {"reason": "broken", "attempts": 1}]
    assert page["next"] is not None


def test_a_group_is_moved_paused_and_resumed(url: str, broker: Broker) -> None:
    broker.publish([Message(id="m", topic=TOPIC, body=b"")])
    broker.ack([one.receipt for one in broker.pull(TOPIC, GROUP)])

    assert outbox("seek", "--to-offset", "0", url=url) == 0
    assert outbox("pause", url=url) == 0
    assert broker.pull(TOPIC, GROUP) == []
    assert outbox("resume", url=url) == 0

    assert [one.id for one in broker.pull(TOPIC, GROUP)] == ["m"]


def test_what_the_broker_refuses_is_said_in_its_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("declare", "--filter", "type =", url=url) == 1
    assert "at character" in capsys.readouterr().err
    assert outbox("show", url=url) == 1
    assert "there is no topic orders" in capsys.readouterr().err
    assert outbox("seek", url=url) == 2
    assert "--to-ms or --to-offset" in capsys.readouterr().err
    assert outbox("show", url="http://127.0.0.1:9") == 1
    assert "no broker answers" in capsys.readouterr().err


def test_a_token_is_read_from_its_file(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("show", "--token-file", str(tmp_path / "none"), url=url) == 2
    assert "cannot read the token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "https://127.0.0.1:1", "--ca-file", "missing.pem"], "missing.pem cannot be read: No such file"),
        (["--url", "https://127.0.0.1:1", "--ca-file", __file__], "test_group_command.py cannot be read"),
        (["--url", "http://127.0.0.1:1/\N{LATIN SMALL LETTER U WITH DIAERESIS}"], "no broker answers at"),
        (["--url", "http://127.0.0.1:1", "--timeout-ms", "-1"], "--timeout-ms"),
    ],
)
def test_what_cannot_be_asked_is_said_on_a_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["broker", "group", "show", TOPIC, GROUP, *options])

    assert ended.value.code in {1, 2}
    assert says in capsys.readouterr().err


def test_an_answer_of_another_service_is_said_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "16")
            self.end_headers()
            self.wfile.write(b'["not a broker"]')

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Does nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert outbox("show", url=f"http://127.0.0.1:{server.server_port}") == 1
        finally:
            server.shutdown()
            thread.join()

    assert "nothing of a broker's" in capsys.readouterr().err


def test_a_group_that_gets_nothing_says_why(url: str, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig())
    broker.publish([Message(id="m1", topic=TOPIC, body=b"")])
    outbox("pause", url=url)
    capsys.readouterr()

    assert outbox("show", "--json", url=url) == 0
    stall = json.loads(capsys.readouterr().out)["stall"]
    assert outbox("show", url=url) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["broker", "group", "list", TOPIC, "--json", "--url", url])
    listed = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["broker", "group", "list", TOPIC, "--url", url])
    lines = capsys.readouterr().out.splitlines()

    assert (stall["reason"], stall["waiting"], stall["in_flight"]) == ("paused", 1, 0)
    assert "\nstalled\tit is paused: outbox broker group resume; since " in shown
    assert listed[GROUP]["stall"] == stall
    assert listed[GROUP]["backlog"] == 1
    assert lines[-1].startswith(f"{GROUP}: it is paused")


def test_a_group_that_is_served_says_nothing_of_the_kind(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig())

    assert outbox("show", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out)["stall"] is None
    assert outbox("show", url=url) == 0
    assert "stalled" not in capsys.readouterr().out


def test_dead_letters_are_discarded_after_they_were_counted(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", "b", "c", reason="no such customer")
    die(broker, "d", reason="time out")
    why = ("--why", "deleted customers")

    assert outbox("dead", "discard", "--reason", "customer", "--dry-run", "--json", *why, url=url) == 0
    assert json.loads(capsys.readouterr().out)["would_discard"] == 3
    assert outbox("dead", "discard", "--reason", "customer", *why, url=url) == 2
    assert "say --yes" in capsys.readouterr().err
    assert outbox("dead", "discard", "--id", "a", *why, "--yes", url=url) == 0
    assert outbox("dead", "discard", "--reason", "customer", *why, "--yes", "--json", url=url) == 0

    by_id, by_reason = capsys.readouterr().out.splitlines()
    assert (by_id, json.loads(by_reason)["discarded"]) == ("1 discarded", 2)
    assert [letter.id for letter in broker.admin.dead(TOPIC, GROUP)[0]] == ["d"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "say which"),
        (("--id", "a", "--all"), "say which"),
        (("--to-ms", "1"), "a time alone"),
        (("--all", "--why", ""), "say --why"),
    ],
)
def test_a_discard_that_does_not_say_which_is_not_sent(
    options: tuple[str, ...], told: str, url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", reason="no")
    capsys.readouterr()

    assert outbox("dead", "discard", "--yes", "--why", "wrong", *options, url=url) != 0

    assert told in " ".join(capsys.readouterr().err.split())
    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 1
