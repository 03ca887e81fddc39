"""The command `outbox broker`: runs a broker, and administers one that runs.

`serve` and `token` are the broker's own (outbox_broker/server/cli.py). All else asks a running broker by AdminClient,
a command an operation, by noun: topic, group, message, schedule, and dead, in dead_letter_cli.py. What Redis timers
know of topics, groups and dead letters is administered by the same commands, through their adapter.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from broker_adapter.http import dead_letter_cli, operations_cli, recurring_cli, store_cli
from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.shared_cli import (
    AsJson,
    Connection,
    Group,
    Limit,
    Topic,
    Yes,
    confirm,
    connected,
    headers_of,
    print_done,
    print_json,
    print_lines,
    print_table,
)
from outbox_broker.server import cli as server_cli
from outbox_core.common.errors import BrokerCordoned, BrokerRefused, BrokerUnavailable, UsageError
from outbox_core.messages.broker_port import GroupSettingsReader
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import PULL_MESSAGES_MAX
from outbox_core.messages.message import CancelStatus, GroupConfig, Message, Record
from outbox_core.protocol.wire import GroupStall
from outbox_core.protocol.wire_conversion import group_settings_of, json_record
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="Run the broker, and administer one.")
topic_app: Final = typer.Typer(no_args_is_help=True, help="List, show, purge and delete topics.")
group_app: Final = typer.Typer(no_args_is_help=True, help="Declare, show, move and delete consumer groups.")
message_app: Final = typer.Typer(no_args_is_help=True, help="Publish messages, and look at those that are stored.")
schedule_app: Final = typer.Typer(no_args_is_help=True, help="Scheduled messages, and recurring ones.")
app.add_typer(server_cli.app)
app.add_typer(store_cli.app, name="store")
app.add_typer(operations_cli.app)
app.add_typer(topic_app, name="topic")
app.add_typer(group_app, name="group")
app.add_typer(message_app, name="message")
app.add_typer(schedule_app, name="schedule")
schedule_app.command("add")(recurring_cli.add)
schedule_app.add_typer(recurring_cli.app, name="recurring")
app.add_typer(dead_letter_cli.app, name="dead")

_PREVIEW_CHARS: Final = 80
_BODY_STDIN: Final = "-"
_GROUP_FIGURES: Final = ("backlog", "in_flight", "dead", "redriving", "position", "oldest_unacked_age_ms")
_STALL_REASONS: Final = {
    "paused": "it is paused: outbox broker group resume",
    "no_consumer": "no consumer asks for its messages",
    "consumers_busy": "its consumers hold others, and ask for no more",
    "group_in_flight_limit": "it holds as many messages unsettled as it may (group_in_hand_max)",
    "broker_in_flight_limit": "all groups together have as many messages in flight as they may (in_hand_max)",
    "key_order": "all that waits is behind an earlier message of its key",
    "retry_later": "all that waits is not to be delivered before its next attempt's time",
}
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")

Ids = Annotated[list[str], typer.Argument(help="Ids of messages.")]
Force = Annotated[bool, typer.Option("--force", help="Also where it is in use.")]


@app.callback()
def _broker() -> None:
    """Run the broker, and administer one."""


@app.command()
@connected
def check(
    connection: Connection,
    live: Annotated[bool, typer.Option("--live/--ready", help="Ask only whether the process is alive.")] = False,
) -> None:
    """Exit 0 where a broker can serve. For probes where there is no curl.

    Example: outbox broker check --ready --url http://127.0.0.1:7788
    """
    client = connection.client()
    status, content = client.request("GET", "/livez" if live else "/readyz")
    text = content.decode("utf-8", "replace")
    if status != HTTPStatus.OK:
        raise BrokerUnavailable(f"{client.shown_url} is not ready: {text[:500]}")
    print(escaped(text, but="\n"))


# -- topics ------------------------------------------------------------------------------------------------------------


@topic_app.command("list")
@connected
def list_topics(connection: Connection, as_json: AsJson = False) -> None:
    """Print the names of topics.

    A line for each that the token covers.

    Example: outbox broker topic list
    """
    with connection.admin() as admin:
        topics = admin.topics()
    if as_json:
        print_json(topics)
    else:
        print_lines(map(escaped, topics), none="no topics")


@topic_app.command("show")
@connected
def show_topic(connection: Connection, topic: Topic, as_json: AsJson = False) -> None:
    """Print a topic's figures and groups.

    For each consumer group, what waits for it.

    Example: outbox broker topic show orders
    """
    client = connection.client()
    answer = client.topic(topic)
    groups = {group: client.figures(topic, group) for group in answer.groups}
    if as_json:
        print_json({"topic": topic, "figures": answer.figures, "groups": groups})
        return
    _print_figures(answer.figures)
    _print_groups(groups)


@topic_app.command("delete")
@connected
def delete_topic(
    connection: Connection, topic: Topic, force: Force = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a topic. Its messages are delivered to nobody any more.

    One that has consumer groups, scheduled or recurring messages is deleted by --force alone: with its groups and its
    recurring messages, and what it has scheduled is canceled.

    Examples:

      outbox broker topic delete orders

      outbox broker topic delete orders --force --yes
    """
    with connection.admin() as admin:
        if not yes:
            figures = admin.figures(topic)
            confirm(
                f"Delete the topic {topic}, with {figures['stored']} messages stored, {figures['scheduled']} scheduled,"
                f" {figures['backlog']} for its consumer groups to get, and {figures['dead']} dead letters?"
            )
        admin.delete_topic(topic, force=force)
    print_done({"topic": topic, "deleted": True}, f"{topic} deleted", as_json=as_json)


@topic_app.command("purge")
@connected
def purge_topic(
    connection: Connection,
    topic: Topic,
    scheduled: Annotated[bool, typer.Option("--scheduled", help="Cancel what is scheduled, too.")] = False,
    dead: Annotated[bool, typer.Option("--dead", help="Discard the dead letters, too.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove what waits in a topic. None of its groups gets what is stored in it now.

    Receipts of what is in flight become stale. Dead letters are kept without --dead, and scheduled messages without
    --scheduled. Messages leave the disk with their segments; until then whoever reads the topic without a group sees
    them, and so does a group that is made later and starts at the earliest.

    Examples:

      outbox broker topic purge orders

      outbox broker topic purge orders --scheduled --dead --yes
    """
    client = connection.client()
    if not yes:
        answer = client.topic(topic)
        figures = answer.figures
        of_scheduled, of_dead = "canceled" if scheduled else "kept", "discarded" if dead else "kept"
        confirm(
            f"Remove {figures['backlog']} waiting messages and {figures['in_flight']} in flight from the "
            f"{len(answer.groups)} consumer groups of {topic}? {figures['dead']} dead letters are {of_dead}, and "
            f"{figures['scheduled']} scheduled messages are {of_scheduled}."
        )
    purged = client.purge_topic(topic, scheduled=scheduled, dead=dead)
    text = (
        f"{topic} purged: {purged.waiting} waiting messages and {purged.in_flight} in flight removed from "
        f"{purged.groups} consumer groups, {purged.scheduled_canceled} scheduled canceled, "
        f"{purged.dead_discarded} dead letters discarded; kept: "
        f"{purged.dead_kept} dead letters, {purged.scheduled_kept} scheduled"
    )
    print_done({"topic": topic, **msgspec.to_builtins(purged)}, text, as_json=as_json)


# -- consumer groups ---------------------------------------------------------------------------------------------------


@group_app.command("list")
@connected
def list_groups(connection: Connection, topic: Topic, as_json: AsJson = False) -> None:
    """Print what waits for each group of a topic.

    And why nothing is delivered, of those in which messages wait.

    Examples:

      outbox broker group list orders

      outbox broker group list orders --json
    """
    client = connection.client()
    groups = {group: client.group(topic, group) for group in client.topic(topic).groups}
    if as_json:
        print_json(
            {
                name: {**answer.figures, "paused": answer.paused, "stall": answer.stall}
                for name, answer in groups.items()
            }
        )
        return
    _print_groups({name: answer.figures for name, answer in groups.items()})
    for name, answer in groups.items():
        if answer.stall is not None:
            print(f"{escaped(name)}: {_stall_text(answer.stall)}")
        elif answer.paused:
            print(f"{escaped(name)}: it is paused")


@group_app.command("show")
@connected
def show_group(connection: Connection, topic: Topic, group: Group, as_json: AsJson = False) -> None:
    """Print a group's figures and settings.

    And why nothing is delivered, if messages wait: it is paused, no consumer asks, it has as many in flight as it may,
    or all that waits is behind its key or waits for another attempt.

    Example: outbox broker group show orders billing
    """
    with connection.admin() as admin:
        figures = admin.figures(topic, group)
        config = admin.group_config(topic, group) if isinstance(admin, GroupSettingsReader) else None
        answer = admin.group(topic, group) if isinstance(admin, AdminClient) else None
    stall = None if answer is None else answer.stall
    settings = {} if config is None else msgspec.to_builtins(group_settings_of(config))
    if as_json:
        shown = {"topic": topic, "group": group, "figures": dict(figures), "settings": settings, "stall": stall}
        print_json(shown if answer is None else {**shown, "paused": answer.paused})
        return
    _print_figures(figures)
    if answer is not None:
        print(f"paused\t{str(answer.paused).lower()}")
    if stall is not None:
        print(f"stalled\t{_stall_text(stall)}")
    for name, setting in settings.items():
        print(f"{name}\t{escaped(msgspec.json.encode(setting).decode())}")


@group_app.command()
@connected
def declare(
    connection: Connection,
    topic: Topic,
    group: Group,
    ordered: Annotated[bool | None, typer.Option(help="One message of a key at a time, in order.")] = None,
    filter_: Annotated[str | None, typer.Option("--filter", help="What the group wants; '' for everything.")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Attempts before a message is a dead letter.")] = None,
    start: Annotated[str | None, typer.Option(help="earliest or latest, for a group that is new.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a group, or change its settings. Those that are not named stay as they are.

    Example: outbox broker group declare orders billing --filter "region = 'eu'" --max-attempts 5
    """
    client = connection.client()
    config = client.group_config(topic, group)
    options = {"ordered": ordered, "max_attempts": max_attempts, "start": start}
    changes: dict[str, Any] = {name: option for name, option in options.items() if option is not None}
    if start is not None:
        changes["start_at_ms"] = None
    if filter_ is not None:
        changes["filter"] = filter_ or None
    client.declare_group(topic, group, replace(config or GroupConfig(), **changes))
    print_done({"topic": topic, "group": group, "is_new": config is None}, f"{topic}/{group} declared", as_json=as_json)


@group_app.command()
@connected
def seek(
    connection: Connection,
    topic: Topic,
    group: Group,
    to_ms: Annotated[int | None, typer.Option(help="To what became ready at this time, milliseconds.")] = None,
    to_offset: Annotated[int | None, typer.Option(help="To this offset of the topic.")] = None,
    as_json: AsJson = False,
) -> None:
    """Move a group to a time or an offset.

    Example: outbox broker group seek orders billing --to-offset 0
    """
    if (to_ms is None) == (to_offset is None):
        raise UsageError("give --to-ms or --to-offset, one of them")
    with connection.admin() as admin:
        admin.seek(topic, group, to_ms=to_ms, to_offset=to_offset)
        backlog = admin.figures(topic, group)["backlog"]
    print_done(
        {"topic": topic, "group": group, "backlog": backlog},
        f"{topic}/{group} moved: {backlog} messages are ahead of it",
        as_json=as_json,
    )


@group_app.command()
@connected
def pause(connection: Connection, topic: Topic, group: Group, as_json: AsJson = False) -> None:
    """Pause deliveries to a group.

    What is in flight may still be settled.

    Example: outbox broker group pause orders billing
    """
    _pause(connection, topic, group, paused=True, as_json=as_json)


@group_app.command()
@connected
def resume(connection: Connection, topic: Topic, group: Group, as_json: AsJson = False) -> None:
    """Resume deliveries to a group.

    Example: outbox broker group resume orders billing
    """
    _pause(connection, topic, group, paused=False, as_json=as_json)


def _pause(connection: Connection, topic: str, group: str, *, paused: bool, as_json: bool) -> None:
    with connection.admin() as admin:
        admin.pause(topic, group, paused=paused)
    text = f"{topic}/{group} {'is paused' if paused else 'goes on'}"
    print_done({"topic": topic, "group": group, "paused": paused}, text, as_json=as_json)


@group_app.command("delete")
@connected
def delete_group(
    connection: Connection, topic: Topic, group: Group, force: Force = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a consumer group. Its position and its dead letters go; messages stay for the other groups.

    One whose consumers run is deleted by --force alone; a consumer that goes on makes a new group of this name.

    Examples:

      outbox broker group delete orders billing

      outbox broker group delete orders billing --force --yes
    """
    with connection.admin() as admin:
        if not yes:
            figures = admin.figures(topic, group)
            confirm(
                f"Delete the consumer group {group} of {topic}, which has {figures['backlog']} messages to get, "
                f"{figures['in_flight']} in flight and {figures['dead']} dead letters?"
            )
        admin.delete_group(topic, group, force=force)
    print_done(
        {"topic": topic, "group": group, "deleted": True}, f"{topic}/{group} deleted", as_json=as_json
    )  # fmt: skip


# -- messages ----------------------------------------------------------------------------------------------------------


@message_app.command("publish")
@connected
def publish(
    connection: Connection,
    topic: Topic,
    body: Annotated[str, typer.Option(help="The body, as text; - reads standard input, as bytes.")] = "",
    message_id: Annotated[str | None, typer.Option("--id", help="Its id; a repeat is a duplicate.")] = None,
    key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    delay_ms: Annotated[int | None, typer.Option(min=0, help="Deliver so much later.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish one message.

    Prints its id and what became of it; exits with 1 if it was not stored.

    Examples:

      outbox broker message publish orders --body '{"order_id": 17}' --header type=card

      outbox broker message publish reports --body - --id report-5
    """
    content = sys.stdin.buffer.read() if body == _BODY_STDIN else body.encode()
    now_ms = time.time_ns() // 1_000_000
    message = Message(
        id=new_message_id() if message_id is None else message_id, topic=topic, key=key,
        headers=headers_of(header or ()), body=content, created_at_ms=now_ms,
        deliver_at_ms=None if delay_ms is None else now_ms + delay_ms,
    )  # fmt: skip
    try:
        [result] = connection.client().publish([message])
    except BrokerCordoned:
        raise  # which says that nothing was stored
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"{error}; it may be stored: repeat it with --id {message.id}") from error
    text = f"{escaped(result.id)}\t{result.status}" + (f"\t{escaped(result.error)}" if result.error else "")
    print_done({"id": result.id, "status": result.status, "error": result.error}, text, as_json=as_json)
    if not result.status.is_success:
        raise typer.Exit(1)


@message_app.command("peek")
@connected
def peek(
    connection: Connection,
    topic: Topic,
    offset: Annotated[int | None, typer.Option(min=0, help="From this offset on; without, the newest.")] = None,
    limit: Limit = 10,
    as_json: AsJson = False,
) -> None:
    """Show messages of a topic.

    With the beginning of their bodies; no group gets fewer by it. Needs a token with the role consume.

    Examples:

      outbox broker message peek orders

      outbox broker message peek orders --offset 0 --limit 100 --json
    """
    client = connection.client()
    end = client.read(topic, start="latest", max_messages=1).next_offset
    position = max(0, end - limit) if offset is None else offset
    messages: list[Record] = []
    while len(messages) < limit and position < end:  # an answer has few where they are large
        read = client.read(topic, offset=position, max_messages=limit - len(messages))
        if read.next_offset <= position:
            break
        messages += read.messages
        position = read.next_offset
    if as_json:
        print_json({"messages": list(map(json_record, messages)), "next_offset": position})
        return
    _print_messages(messages)
    if position < end:
        print(f"more: --offset {position}")


@message_app.command("find")
@connected
def find(
    connection: Connection,
    topic: Topic,
    message_id: Annotated[list[str] | None, typer.Option("--id", help="Its id; may be repeated.")] = None,
    key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="A header, NAME=VALUE; may be repeated: all of them.")
    ] = None,
    offset: Annotated[int, typer.Option(min=0, help="Look from this offset on.")] = 0,
    limit: Limit = 10,
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: AsJson = False,
) -> None:
    """Find messages by id, key or headers.

    It reads the topic, oldest first, to its end or to the limit; by ids, until each is found. Says every two seconds
    how far it is. Exits with 1 if there is none, or none of one of the ids.

    Examples:

      outbox broker message find orders --id order-17

      outbox broker message find orders --key 17 --header type=card --offset 1000000
    """
    wanted_ids, wanted_headers = frozenset(message_id or ()), headers_of(header or ())
    if not wanted_ids and key is None and not wanted_headers:
        raise UsageError("say what to look for: --id, --key or --header")

    def is_wanted(message: Record) -> bool:
        return (
            (not wanted_ids or message.id in wanted_ids)
            and (key is None or message.key == key)
            and wanted_headers.items() <= dict(message.headers).items()
        )

    found: list[Record] = []
    missing_ids = set(wanted_ids)
    for message in _read_all(connection.client(), topic, offset=offset, form=progress):
        if is_wanted(message):
            found.append(message)
            missing_ids.discard(message.id)
        if len(found) == limit or (wanted_ids and not missing_ids):
            break
    if as_json:
        print_json(list(map(json_record, found)))
    else:
        _print_messages(found)
    if missing_ids or not found:
        raise typer.Exit(1)


def _read_all(client: AdminClient, topic: str, *, offset: int, form: ProgressForm) -> Iterator[Record]:
    """Yields all messages from an offset to the end that the topic has now; shows how far it is."""
    begin, end = offset, client.read(topic, start="latest", max_messages=1).next_offset
    with Progress("find", form=form, steady=True) as progress:
        while offset < end:
            read = client.read(topic, offset=offset, max_messages=PULL_MESSAGES_MAX)
            if read.next_offset <= offset:
                return
            yield from read.messages
            offset = read.next_offset
            progress.update(offset - begin, end - begin, note=f"read to offset {offset:,}")


# -- the schedule ------------------------------------------------------------------------------------------------------


@schedule_app.command("list")
@connected
def list_scheduled(
    connection: Connection,
    topic: Annotated[str | None, typer.Option(help="Only of this topic.")] = None,
    bucket: Annotated[str, typer.Option(help="Count by minute, hour or day.")] = "hour",
    as_json: AsJson = False,
) -> None:
    """Count scheduled messages by due time.

    A line for each bucket of time (UTC, tab, count).

    Ask a broker, or a delay service.

    Example: outbox broker schedule list --topic orders --bucket day
    """
    counts = connection.client().scheduled(topic, bucket=bucket)
    if as_json:
        print_json(list(counts))
        return
    print_lines((f"{utc_text(count.at_ms)}\t{count.messages}" for count in counts), none="nothing is scheduled")


@schedule_app.command("show")
@connected
def show_scheduled(
    connection: Connection, message_id: Annotated[str, typer.Argument(help="Its id.")], as_json: AsJson = False
) -> None:
    """Say when and where a message is due.

    Exits with 1 if it is not scheduled.

    Example: outbox broker schedule show trip-17
    """
    message = connection.client().scheduled_message(message_id)
    if message is None:
        raise BrokerRefused(f"no message is scheduled under the id {message_id}")
    if as_json:
        print_json(message)
        return
    refused = f"\trefused: {escaped(message.refused)}" if message.refused else ""
    print(f"{utc_text(message.deliver_at_ms)}\t{escaped(message.topic)}\t{escaped(message.id)}{refused}")


@schedule_app.command("cancel")
@connected
def cancel(connection: Connection, ids: Ids, yes: Yes = False, as_json: AsJson = False) -> None:
    """Cancel scheduled messages.

    They are never delivered. Those that a delay service's target refused are canceled, too. Exits with 1 if one was
    not canceled: it was delivered before (too_late), or no such message is scheduled (unknown).

    Example: outbox broker schedule cancel trip-17 trip-18 --yes
    """
    if not yes:
        confirm(f"Cancel {len(ids)} scheduled messages for good?")
    outcomes = connection.client().cancel(ids)
    if as_json:
        print_json(outcomes)
    else:
        print_lines(f"{escaped(outcome.id)}\t{outcome.status}" for outcome in outcomes)
    if any(outcome.status is not CancelStatus.CANCELED for outcome in outcomes):
        raise typer.Exit(1)


@schedule_app.command("refused")
@connected
def list_refused(connection: Connection, as_json: AsJson = False) -> None:
    """List what a target refused for good.

    Of a delay service: topic, id and reason; at most a thousand of each process, or shard of a cluster.

    Example: outbox broker schedule refused --url http://delay:7799
    """
    messages = connection.client().refused()
    if as_json:
        print_json(messages)
        return
    print_lines(
        (f"{escaped(message.topic)}\t{escaped(message.id)}\t{escaped(message.reason)}" for message in messages),
        none="nothing was refused",
    )


@schedule_app.command("retry")
@connected
def retry_refused(connection: Connection, ids: Ids, as_json: AsJson = False) -> None:
    """Send refused messages once more.

    To the target of a delay service, after the cause is removed. Exits with 1 if one was not sent.

    Example: outbox broker schedule retry 01J9Z 01J9Y --url http://delay:7799
    """
    outcomes = connection.client().retry_refused(ids)
    if as_json:
        print_json(outcomes)
    else:
        texts = ((outcome.id, outcome.status, outcome.error) for outcome in outcomes)
        print_lines("\t".join(escaped(text) for text in parts if text) for parts in texts)
    if any(outcome.status != "sent" for outcome in outcomes):
        raise typer.Exit(1)


# -- output ------------------------------------------------------------------------------------------------------------


def _print_figures(figures: Mapping[str, int]) -> None:
    for name, figure in figures.items():
        print(f"{escaped(name)}\t{figure}")


def _stall_text(stall: GroupStall) -> str:
    """Returns in words why nothing is delivered; a reason of a newer broker by its name."""
    reason = _STALL_REASONS.get(stall.reason, escaped(stall.reason))
    text = f"{reason}; since {utc_text(stall.since_ms)}, {stall.waiting} wait, {stall.in_flight} are in flight"
    return (
        text if stall.next_visible_ms is None else f"{text}, the next is visible at {utc_text(stall.next_visible_ms)}"
    )


def _print_groups(groups: Mapping[str, Mapping[str, int]]) -> None:
    """Print a table of groups, a line each."""
    if not groups:
        print("no consumer groups", file=sys.stderr)
        return
    rows = [
        [Text(escaped(group)), *(Text(str(figures.get(name, ""))) for name in _GROUP_FIGURES)]
        for group, figures in groups.items()
    ]
    print_table(["group", *_GROUP_FIGURES], rows)


def _print_messages(messages: Sequence[Record]) -> None:
    if not messages:
        print("no messages", file=sys.stderr)
        return
    rows = [
        [
            Text(escaped(message.id)), Text(escaped(message.key or "")), Text(utc_text(message.created_at_ms)),
            Text(escaped(_preview(message.body))),
        ]
        for message in messages
    ]  # fmt: skip
    print_table(["id", "key", "created", "body"], rows)


def _preview(body: bytes) -> str:
    """Returns the beginning of a body, as text if it is."""
    head = body[: 4 * _PREVIEW_CHARS]
    try:
        shown = _utf8_decoder().decode(head, final=len(head) == len(body))  # the cut may go through a character
    except UnicodeDecodeError:
        shown = repr(head)
    return shown if len(shown) <= _PREVIEW_CHARS and len(head) == len(body) else shown[:_PREVIEW_CHARS] + "..."
