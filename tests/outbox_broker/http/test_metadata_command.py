"""`outbox broker export | import`: groups, settings and positions go to another broker, and no message is skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_broker.http.access_control import Access, load_tokens
from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served
from tests.fixtures.cutting_http_proxy import Point, cutting_http_proxy

TOPIC, GROUP = "orders", "billing"
SETTINGS = GroupConfig(ordered=True, filter="type = 'a'", max_attempts=5, backoff_initial_ms=7)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path, stack: ExitStack) -> str:
    """The URL of a broker of the test's own."""
    return stack.enter_context(served(tmp_path / "source")).url


@pytest.fixture
def target(tmp_path: Path, stack: ExitStack) -> str:
    """The URL of another one."""
    return stack.enter_context(served(tmp_path / "target")).url


@pytest.fixture
def old(source: str, stack: ExitStack) -> Broker:
    """A client of the first."""
    broker = connect(source)
    stack.callback(broker.close)
    return broker


@pytest.fixture
def new(target: str, stack: ExitStack) -> Broker:
    """A client of the other."""
    broker = connect(target)
    stack.callback(broker.close)
    return broker


def outbox(*arguments: str, url: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments, "--url", url])
    return int(ended.value.code or 0)


def exported(url: str, file: Path) -> dict[str, Any]:
    """The document that the command writes."""
    assert outbox("export", "--output", str(file), url=url) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def publish(broker: Broker, *ids: str) -> None:
    broker.publish([Message(id=one, topic=TOPIC, body=b"x", headers={"type": "a"}) for one in ids])


def publish_to(url: str, *ids: str) -> None:
    with closing(connect(url)) as broker:
        publish(broker, *ids)


def pulled_from(url: str) -> list[str]:
    with closing(connect(url)) as broker:
        return pulled(broker)


def pulled(broker: Broker, group: str = GROUP) -> list[str]:
    return [delivery.id for delivery in broker.pull(TOPIC, group)]


def test_groups_with_filters_and_settings_are_made_elsewhere(
    source: str, target: str, old: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.admin.declare_group(TOPIC, GROUP, SETTINGS)
    old.admin.declare_group(TOPIC, "audit", GroupConfig())
    old.admin.pause(TOPIC, "audit", paused=True)

    document = exported(source, tmp_path / "metadata.json")
    capsys.readouterr()
    assert outbox("import", str(tmp_path / "metadata.json"), "--yes", url=target) == 0

    assert (document["format"], document["version"]) == ("outbox-mq-metadata", 1)
    assert capsys.readouterr().out.splitlines() == [
        f"make {TOPIC}/audit, from the earliest message, paused",
        f"make {TOPIC}/{GROUP}, from the earliest message",
        "2 made, 0 changed, 0 kept as they were",
    ]
    client = AdminClient(target)
    assert client.group_config(TOPIC, GROUP) == SETTINGS
    assert (client.group(TOPIC, GROUP).paused, client.group(TOPIC, "audit").paused) == (False, True)


def test_a_second_import_changes_nothing(
    source: str, target: str, old: Broker, new: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.admin.declare_group(TOPIC, GROUP, GroupConfig(start="latest"))
    exported(source, tmp_path / "metadata.json")
    outbox("import", str(tmp_path / "metadata.json"), "--yes", url=target)
    publish(new, "m1")
    new.ack([delivery.receipt for delivery in new.pull(TOPIC, GROUP)])
    capsys.readouterr()

    assert outbox("import", str(tmp_path / "metadata.json"), "--json", url=target) == 0  # there is nothing to ask

    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["made"], outcome["changed"], outcome["kept"]) == (0, 0, 1)
    assert AdminClient(target).group(TOPIC, GROUP).resume_offset == 1


@pytest.mark.parametrize(
    ("policy", "came"),
    [("earliest", ["m1", "m2", "m3"]), ("latest", []), ("copy-where-contents-match", ["m2", "m3"])],
)
@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("point", [Point.BEFORE, Point.BEFORE_ANSWER])
def test_a_repeat_finishes_an_import_that_was_cut_at_any_request(
    source: str, old: Broker, tmp_path: Path, policy: str, came: list[str], paused: bool, point: Point
) -> None:
    publish(old, "m1", "m2", "m3")
    old.ack([old.pull(TOPIC, GROUP, max_messages=1)[0].receipt])
    old.admin.pause(TOPIC, GROUP, paused=paused)
    exported(source, tmp_path / "metadata.json")
    command = ["import", str(tmp_path / "metadata.json"), "--positions", policy, "--yes"]

    uncut, cuts = False, 0
    while not uncut:
        with served(tmp_path / f"target-{cuts}") as server, cutting_http_proxy(server.url) as proxy:
            publish_to(server.url, "m1", "m2", "m3")
            proxy.cut(*[None] * cuts, point)
            uncut = outbox(*command, url=proxy.url) == 0
            assert uncut or outbox(*command, url=server.url) == 0

            group = AdminClient(server.url).group(TOPIC, GROUP)
            assert (group.paused, group.settings.start) == (paused, "latest" if policy == "latest" else "earliest")
            assert outbox(*command, url=server.url) == 0
            AdminClient(server.url).pause(TOPIC, GROUP, paused=False)
            assert pulled_from(server.url) == came, f"cut at request {cuts}"
        cuts += 1

    assert cuts > 3


def test_what_contradicts_is_refused_as_a_whole_unless_it_may_be_overwritten(
    source: str, target: str, old: Broker, new: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.admin.declare_group(TOPIC, GROUP, SETTINGS)
    old.admin.declare_group(TOPIC, "audit", GroupConfig())
    exported(source, tmp_path / "metadata.json")
    publish(new, "m1", "m2")
    new.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=3))
    new.ack([new.pull(TOPIC, GROUP, max_messages=1)[0].receipt])
    capsys.readouterr()

    assert outbox("import", str(tmp_path / "metadata.json"), "--yes", url=target) == 2

    assert "orders/billing has filter null, not \"type = 'a'\"" in capsys.readouterr().err
    assert AdminClient(target).topic(TOPIC).groups == [GROUP]
    assert outbox("import", str(tmp_path / "metadata.json"), "--yes", "--overwrite", url=target) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 made, 1 changed, 0 kept as they were"
    assert AdminClient(target).group_config(TOPIC, GROUP) == SETTINGS
    assert pulled(new) == ["m2"]  # its position is its own


@pytest.mark.parametrize(
    ("policy", "came"),
    [("earliest", ["m1", "m2", "m3"]), ("latest", []), ("copy-where-contents-match", ["m2", "m3"])],
)
def test_positions_go_by_policy_where_the_messages_are_the_same(
    source: str, target: str, old: Broker, new: Broker, tmp_path: Path, policy: str, came: list[str]
) -> None:
    publish(old, "m1", "m2", "m3")
    publish(new, "m1", "m2", "m3")
    first, second, third = old.pull(TOPIC, GROUP)
    old.ack([first.receipt, third.receipt])  # the second is still in flight: it is not passed over
    exported(source, tmp_path / "metadata.json")

    assert outbox("import", str(tmp_path / "metadata.json"), "--positions", policy, "--yes", url=target) == 0

    assert pulled(new) == came
    assert second.id == "m2"


def test_a_position_among_other_messages_is_not_taken(
    source: str, target: str, old: Broker, new: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(old, "m1", "m2")
    old.ack([delivery.receipt for delivery in old.pull(TOPIC, GROUP)])
    publish(new, "m1", "other", "m2")
    exported(source, tmp_path / "metadata.json")

    outbox(
        "import", str(tmp_path / "metadata.json"), "--positions", "copy-where-contents-match", "--yes", url=target
    )  # fmt: skip

    assert (
        "from the earliest message, since the message before offset 2 is not the same here" in capsys.readouterr().out
    )
    assert pulled(new) == ["m1", "other", "m2"]


def test_without_the_right_to_read_messages_a_position_cannot_be_recognised(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["broker", "token", "operator", "--role", "read"])
    made = capsys.readouterr()  # the entry, and the token itself
    (tmp_path / "tokens.toml").write_text(made.out)
    (tmp_path / "token").write_text(made.err.rpartition(": ")[2].strip())
    access = Access(tokens=load_tokens(tmp_path / "tokens.toml"))
    with served(tmp_path / "data") as open_server:
        broker = connect(open_server.url)
        publish(broker, "m1")
        broker.ack([delivery.receipt for delivery in broker.pull(TOPIC, GROUP)])
        broker.close()
    guarded = stack.enter_context(served(tmp_path / "data", access=access))

    options = ("--output", str(tmp_path / "m.json"), "--token-file", str(tmp_path / "token"))
    assert outbox("export", *options, url=guarded.url) == 0

    [topic] = json.loads((tmp_path / "m.json").read_text())["topics"]
    assert [(group["resume_offset"], group["before_id"]) for group in topic["groups"]] == [(1, None)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{}", "no export of a broker's metadata"),
        (b'{"format":"outbox-mq-metadata","version":2,"exported_at_ms":0,"source":"","topics":[]}', "has version 2"),
        (b'{"format":"other","version":1,"exported_at_ms":0,"source":"","topics":[]}', "no export"),
    ],
)
def test_what_is_no_document_of_this_version_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, why: str
) -> None:
    (tmp_path / "m.json").write_bytes(content)

    assert outbox("import", str(tmp_path / "m.json"), "--yes", url=target) == 2
    assert why in capsys.readouterr().err


def test_an_import_that_nobody_said_yes_to_does_nothing_and_says_what_it_would(
    source: str, target: str, old: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.admin.declare_group(TOPIC, GROUP, GroupConfig())
    exported(source, tmp_path / "metadata.json")
    capsys.readouterr()

    assert outbox("import", str(tmp_path / "metadata.json"), url=target) == 2

    said = capsys.readouterr()
    assert said.out == f"make {TOPIC}/{GROUP}, from the earliest message\n"
    assert "say --yes" in said.err
    assert AdminClient(target).topics() == []


def test_the_document_goes_to_standard_output_where_no_file_is_named(
    source: str, old: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    old.admin.declare_group(TOPIC, GROUP, GroupConfig())

    assert outbox("export", "--json", url=source) == 0

    assert [topic["topic"] for topic in json.loads(capsys.readouterr().out)["topics"]] == [TOPIC]


DAILY = RecurringMessage(topic="reports", cron="0 6 * * *", tz="Europe/Berlin", key="all", body=b"\x00\xff")


def test_recurring_messages_go_along_and_a_repeat_changes_nothing(
    source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = AdminClient(source), AdminClient(target)
    old.add_recurring("daily", DAILY)
    old.add_recurring("idle", DAILY, paused=True)
    exported(source, tmp_path / "metadata.json")
    capsys.readouterr()

    for lines in (
        [
            "add the recurring message daily to reports", "add the recurring message idle to reports, paused",
            "2 made, 0 changed, 0 kept as they were",
        ],
        [
            "keep the recurring message daily", "keep the recurring message idle",
            "0 made, 0 changed, 2 kept as they were",
        ],
    ):  # fmt: skip
        assert outbox("import", str(tmp_path / "metadata.json"), "--yes", url=target) == 0
        assert capsys.readouterr().out.splitlines() == lines

    shown = [new.recurring_message(name) for name in ("daily", "idle")]
    assert [(one.tz, one.key, one.body, one.paused) for one in shown if one] == [
        ("Europe/Berlin", "all", "AP8=", False), ("Europe/Berlin", "all", "AP8=", True),
    ]  # fmt: skip


def test_recurring_messages_that_differ_are_refused_as_a_whole_unless_they_may_be_overwritten(
    source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = AdminClient(source), AdminClient(target)
    for name in ("daily", "idle", "new"):
        old.add_recurring(name, DAILY)
    exported(source, tmp_path / "metadata.json")
    new.add_recurring("daily", RecurringMessage(topic="reports", cron="0 7 * * *"))
    new.add_recurring("idle", DAILY, paused=True)
    capsys.readouterr()

    assert outbox("import", str(tmp_path / "metadata.json"), "--yes", url=target) == 2

    told = capsys.readouterr().err.replace("\n", " ")
    assert (
        "daily has another cron, has another tz, has another key, has another body; the recurring message idle" in told
    )
    assert "idle is paused" in told
    assert new.recurring_message("new") is None
    assert outbox("import", str(tmp_path / "metadata.json"), "--yes", "--overwrite", url=target) == 0
    assert "1 made, 2 changed, 0 kept as they were" in capsys.readouterr().out
    assert [(one.name, one.cron, one.paused) for one in new.recurring()] == [
        (name, "0 6 * * *", False) for name in ("daily", "idle", "new")
    ]
