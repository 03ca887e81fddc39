"""Recurring messages over HTTP: by the commands, by the admin client, and for tokens of some topics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_broker.http.access_control import Access, load_tokens
from outbox_core.common.errors import InUse, InvalidMessage, InvalidRequest, NotAuthorized
from outbox_core.messages.limits import RECURRING_BODY_BYTES_MAX
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served

DAILY = RecurringMessage(
    topic="reports", cron="0 6 * * *", tz="Europe/Berlin", key="all", headers={"kind": "pdf"}, body=b"daily"
)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own."""
    with served(tmp_path / "data") as server:
        yield server.url


@pytest.fixture
def client(url: str) -> AdminClient:
    return AdminClient(url)


def schedule(*arguments: str, url: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", "schedule", *arguments, "--url", url])
    return int(ended.value.code or 0)


def test_one_is_added_listed_paused_and_deleted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add = ["add", "daily", "--topic", "reports", "--cron", "0 6 * * *", "--tz", "Europe/Berlin", "--key", "all"]
    assert schedule(*add, "--header", "kind=pdf", "--body", "daily", url=url) == 0
    assert schedule(*add, "--header", "kind=pdf", "--body", "daily", url=url) == 0, "the same again"
    assert "daily added, next 20" in capsys.readouterr().out

    assert schedule("recurring", "list", url=url) == 0
    assert "0 6 * * *" in capsys.readouterr().out
    assert schedule("recurring", "show", "daily", "--runs", "2", "--json", url=url) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["body"], shown["headers"], shown["key"]) == ("daily", {"kind": "pdf"}, "all")
    first, second = (datetime.fromtimestamp(one / 1000, UTC) for one in shown["next_ms"])
    assert first.hour in (4, 5)
    assert (second - first).total_seconds() in (82_800, 86_400, 90_000)

    assert schedule("recurring", "pause", "daily", url=url) == 0
    assert schedule("recurring", "show", "daily", url=url) == 0
    assert "paused\ttrue\n" in capsys.readouterr().out
    assert schedule("recurring", "resume", "daily", url=url) == 0
    assert schedule("recurring", "delete", "daily", url=url) == 2, "without a terminal it does not ask"
    assert schedule("recurring", "delete", "daily", "--yes", url=url) == 0
    assert schedule("recurring", "show", "daily", url=url) == 1
    capsys.readouterr()
    assert schedule("recurring", "list", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_body_comes_from_a_file_as_it_is(url: str, client: AdminClient, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\x00\xff")

    add = ["add", "raw", "--topic", "reports", "--cron", "0 6 * * *", "--body-file", str(tmp_path / "body")]
    assert schedule(*add, url=url) == 0
    assert schedule(*add, "--body", "x", url=url) == 2
    assert schedule(*add[:-1], str(tmp_path / "none"), url=url) == 2

    answer = client.recurring_message("raw")
    assert answer is not None
    assert (answer.body, answer.encoding) == ("AP8=", "base64")


def test_a_name_that_another_one_has_is_refused(url: str, client: AdminClient) -> None:
    client.add_recurring("daily", DAILY)
    client.add_recurring("daily", DAILY)

    with pytest.raises(InUse, match="delete it first"):
        client.add_recurring("daily", RecurringMessage(topic="reports", cron="0 7 * * *"))
    assert schedule("add", "daily", "--topic", "reports", "--cron", "0 7 * * *", url=url) == 1


def test_what_is_wrong_is_said_in_words(client: AdminClient) -> None:
    with pytest.raises(InvalidMessage, match="recurring message"):
        client.add_recurring("a/b", DAILY)
    with pytest.raises(InvalidRequest, match="five fields"):
        client.add_recurring("daily", RecurringMessage(topic="reports", cron="daily"))
    with pytest.raises(InvalidRequest, match="no time zone 'Mars'"):
        client.add_recurring("daily", RecurringMessage(topic="reports", cron="0 6 * * *", tz="Mars"))
    assert list(client.recurring()) == []


def test_a_body_of_controls_is_taken_up_to_the_bound(client: AdminClient) -> None:
    largest = RecurringMessage(topic="reports", cron="0 6 * * *", body=b"\x01" * RECURRING_BODY_BYTES_MAX)

    client.add_recurring("large", largest)

    answer = client.recurring_message("large")
    assert answer is not None
    assert answer.encoding == "base64"


def test_many_are_listed_page_by_page(client: AdminClient) -> None:
    names = [f"r{number:02}" for number in range(12)]
    for name in names:
        client.add_recurring(name, DAILY)

    status, content = client.request("GET", "/v1/recurring?limit=5&after=r04")

    assert status == 200
    assert [one["name"] for one in json.loads(content)["recurring"]] == names[5:10]
    assert json.loads(content)["next"] == "r09"
    assert [one.name for one in client.recurring()] == names


def test_a_token_of_some_topics_sees_and_changes_those_of_its_own(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        "\n".join(
            f'[[tokens]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f"roles = {json.dumps(roles)}\ntopics = {json.dumps(topics)}\ntopics_max = 2\n"
            for name, roles, topics in [
                ("all", ["admin"], ["*"]), ("own", ["admin"], ["own.*"]), ("reader", ["read"], ["*"]),
            ]
        )
    )  # fmt: skip
    with ExitStack() as stack:
        url = stack.enter_context(served(tmp_path / "data", access=Access(tokens=load_tokens(tokens)))).url
        everybody, own, reader = (AdminClient(url, token=name) for name in ("all", "own", "reader"))
        everybody.add_recurring("other", DAILY)

        own.add_recurring("mine", RecurringMessage(topic="own.a", cron="0 6 * * *", body=b"secret"))
        with pytest.raises(NotAuthorized):
            own.add_recurring("theirs", DAILY)
        assert own.recurring_message("other") is None
        assert [one.name for one in own.recurring()] == ["mine"]
        for refused in (own.delete_recurring, lambda name: own.pause_recurring(name, paused=True)):
            with pytest.raises(Exception, match="no recurring message other"):
                refused("other")
        with pytest.raises(NotAuthorized):
            reader.delete_recurring("mine")
        own.add_recurring("mine-2", RecurringMessage(topic="own.b", cron="0 6 * * *"))
        with pytest.raises(InvalidRequest, match="topics_max"):
            own.add_recurring("mine-3", RecurringMessage(topic="own.c", cron="0 6 * * *"))

        shown = reader.recurring_message("mine")
        assert shown is not None
        assert (shown.body, shown.headers) == (None, None)


def test_how_many_there_are_is_a_metric(client: AdminClient) -> None:
    client.add_recurring("daily", DAILY)

    _, content = client.request("GET", "/metrics")

    lines = content.decode().splitlines()
    assert "broker_recurring_messages 1.0" in lines
    assert {"# TYPE broker_recurring_fired_total counter", "# TYPE broker_recurring_missed_total counter"} <= set(lines)
