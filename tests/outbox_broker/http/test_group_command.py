"""`outbox broker group ...` on a server that runs: changes what is named, tells figures, says what was refused."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE

import msgspec
import pytest

from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.messages.message import DeadLetter
from outbox_core.protocol.wire_conversion import json_dead_letter
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served
from tests.fixtures.fork_server import fork_server

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


def test_a_dead_letter_that_was_named_and_is_not_there_is_told_by_the_exit_status(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "m1", "m2", "m3", reason="broken")
    named = ("--id", "m1", "--id", "none")

    assert outbox("dead", "discard", *named, "--dry-run", url=url) == 1
    assert outbox("dead", "discard", *named, "--why", "gone", "--yes", url=url) == 1
    assert outbox("dead", "redrive", *named, url=url) == 1
    assert outbox("dead", "redrive", "--id", "m2", "--id", "m2", url=url) == 0
    assert outbox("dead", "discard", "--id", "m3", "--why", "gone", "--yes", url=url) == 0
    assert outbox("dead", "redrive", url=url) == 0
    assert outbox("dead", "discard", "--all", "--why", "gone", "--yes", url=url) == 0

    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"would discard 1 dead letters of {TOPIC}/{GROUP}", "1 discarded", "0 redriven", "1 redriven", "1 discarded",
        "0 redriven", "0 discarded",
    ]  # fmt: skip
    assert said.err.splitlines() == ["of the other ids this group has no dead letters"] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("declare", "--filter", "type ="),
        ("declare", "--max-attempts", "0"),
        ("seek", "--to-offset", "99"),
        ("dead", "list", "--after", "nowhere"),
        ("dead", "redrive", "--per-second", "0"),
    ],
)
def test_what_the_broker_finds_wrong_is_a_usage_error_as_what_the_command_line_finds(
    url: str, broker: Broker, arguments: tuple[str, ...]
) -> None:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig())

    assert outbox(*arguments, url=url) == 2


def test_what_is_not_there_is_no_usage_error(url: str) -> None:
    assert outbox("pause", url=url) == 1


def with_dead(broker: Broker) -> list[DeadLetter]:
    """LETTERS dead letters; returns them as they are listed."""
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    broker.publish([Message(id=f"m{number}", topic=TOPIC, body=b"") for number in range(LETTERS)])
    broker.nack([one.receipt for one in broker.pull(TOPIC, GROUP, max_messages=LETTERS)], reason="broken")
    return broker.admin.dead(TOPIC, GROUP, limit=LETTERS)[0]


def test_a_redrive_that_is_waited_for_shows_its_progress(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    with_dead(broker)
    capsys.readouterr()

    assert outbox("dead", "redrive", "--rate", str(LETTERS // 2), "--wait", "--progress", "json", url=url) == 0

    said = capsys.readouterr()
    objects = [json.loads(line) for line in said.err.splitlines()]
    assert said.out == f"{LETTERS} redriven\n"
    assert {(one["operation"], one["total"], one["done"] + one["waiting"]) for one in objects} == {
        ("redrive", LETTERS, LETTERS)
    }
    assert (objects[-1]["done"], objects[-1]["left_ms"]) == (LETTERS, 0)
    assert broker.admin.figures(TOPIC, GROUP)["redriving"] == 0


def test_a_redrive_is_stopped_by_a_command_of_its_own(
    url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    before = with_dead(broker)
    outbox("dead", "redrive", "--rate", "1", url=url)
    capsys.readouterr()

    assert outbox("dead", "redrive", "--stop", "--json", url=url) == 0

    stopped = json.loads(capsys.readouterr().out)["stopped"]
    assert 0 < stopped < LETTERS
    assert broker.admin.dead(TOPIC, GROUP, limit=LETTERS)[0] == before[-stopped:]
    assert outbox("dead", "redrive", "--stop", url=url) == 0
    assert capsys.readouterr().out == "stopped: 0 are dead letters again\n"
    for option in (["--wait"], ["--rate", "1"], ["--id", "m1"]):
        assert outbox("dead", "redrive", "--stop", *option, url=url) == 2


@pytest.mark.processes
def test_an_interrupt_stops_the_redrive_that_is_waited_for(url: str, broker: Broker) -> None:
    before = with_dead(broker)
    program, *arguments = (
        "tests.outbox_broker.http.interruptible_command",
        *("broker", "dead", "redrive", TOPIC, GROUP, "--rate", "1", "--wait", "--progress", "json", "--url", url),
    )

    with fork_server().start(program, *arguments, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)

    figures = broker.admin.figures(TOPIC, GROUP)
    assert 0 < first["waiting"] < LETTERS
    assert process.returncode == 130
    assert said == f"stopped: {figures['dead']} are dead letters again\n"
    assert (figures["redriving"], figures["dead"] + figures["backlog"]) == (0, LETTERS)
    assert broker.admin.dead(TOPIC, GROUP, limit=LETTERS)[0] == before[-figures["dead"] :]


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
    assert outbox("declare", "--filter", "type =", url=url) == 2
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


def test_dead_letters_are_edited_after_they_were_counted(
    url: str, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", "b", "c", reason="no region")
    die(broker, "d", "e", reason="time out")
    why = ("--why", "typo")
    content, lines = tmp_path / "body", tmp_path / "letters.jsonl"
    content.write_bytes(b"\xff")
    capsys.readouterr()
    [letter] = [one for one in broker.admin.dead(TOPIC, GROUP)[0] if one.id == "e"]
    shown = msgspec.json.encode(json_dead_letter(letter)).replace(b'"body":"', b'"body":"more ')
    lines.write_bytes(shown + b'\n\n{"id": "unknown", "remove_headers": ["a"]}\n')

    assert outbox("dead", "edit", "--reason", "region", "--header", "region=eu", *why, url=url) == 2
    assert "say --yes" in capsys.readouterr().err
    assert outbox("dead", "edit", "--id", "a", "--body-file", str(content), *why, "--yes", url=url) == 0
    assert outbox("dead", "edit", "--reason", "region", "--header", "region=eu", *why, "--yes", "--json", url=url) == 0
    by_id, count, by_reason = capsys.readouterr().out.splitlines()
    assert outbox("dead", "edit", "--from", str(lines), *why, "--yes", url=url) == 1
    from_file = capsys.readouterr().out.splitlines()

    assert (by_id.split("\t")[0::2], count) == (["a", "edited"], "1 edited")
    assert [one["id"] for one in json.loads(by_reason)["results"]] == ["b", "c"]
    assert [line.split("\t")[0::2] for line in from_file[:2]] == [["e", "edited"], ["unknown", "not_dead"]]
    assert [letter.id for letter in broker.admin.dead(TOPIC, GROUP)[0]] == ["d"]
    came = {one.headers["outbox-edited-from"]: one for one in broker.pull(TOPIC, GROUP)}
    assert came.keys() == {"a", "b", "c", "e"}
    assert came["a"].body == b"\xff"
    assert came["b"].headers["region"] == came["c"].headers["region"] == "eu"
    assert came["e"].body == b"more " + letter.body


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--header", "a=b"), "say which"),
        (("--id", "a", "--all", "--header", "a=b"), "say which"),
        (("--id", "a"), "say what to change"),
        (("--id", "a", "--body", "x", "--body-file", "x"), "not by both"),
        (("--all", "--body", "x"), "for one --id"),
        (("--id", "a", "--id", "b", "--body", "x"), "for one --id"),
        (("--id", "a", "--body-file", "/nowhere"), "cannot be read"),
        (("--from", "/nowhere"), "cannot be read"),
        (("--to-ms", "1", "--header", "a=b"), "a time alone"),
        (("--id", "a", "--header", "a=b", "--why", ""), "say why"),
    ],
)
def test_an_edit_that_does_not_say_which_or_what_is_not_sent(
    options: tuple[str, ...], told: str, url: str, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", reason="no")
    capsys.readouterr()

    assert outbox("dead", "edit", "--yes", "--why", "typo", *options, url=url) != 0

    assert told in " ".join(capsys.readouterr().err.split())
    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 1


def test_a_file_without_lines_edits_nothing(
    url: str, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", reason="no")
    lines = tmp_path / "letters.jsonl"
    lines.write_text("\n")
    capsys.readouterr()

    assert outbox("dead", "edit", "--yes", "--why", "typo", "--from", str(lines), url=url) == 0

    assert capsys.readouterr().out == "0 edited\n"
    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 1


def test_a_line_that_is_no_edit_is_named_before_anything_is_sent(
    url: str, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die(broker, "a", reason="no")
    lines = tmp_path / "letters.jsonl"
    lines.write_text('{"id": "a", "body": "x"}\n{"id": "a", "bodi": "x"}\n')
    capsys.readouterr()

    assert outbox("dead", "edit", "--yes", "--why", "typo", "--from", str(lines), url=url) == 2

    assert "line 2 of" in " ".join(capsys.readouterr().err.split())
    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 1
