"""The commands of `outbox broker` on a broker as a whole: cordon, uncordon, status, drain; export, import."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.metadata import (
    MetadataDocument,
    PositionPolicy,
    StepKind,
    apply_step,
    export_topics,
    parse_document,
    plan_import,
)
from broker_adapter.http.shared_cli import (
    AsJson,
    Connection,
    Yes,
    confirm,
    connected,
    print_done,
    print_json,
    print_lines,
    print_table,
)
from outbox_core.common.errors import BrokerUnavailable, UsageError
from outbox_core.protocol.wire import StatusAnswer
from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="Cordon and drain a broker.")

_PROGRESS_S: Final = 2.0
_POLL_S: Final = 0.5
_REST: Final = 10
"""How many times as long as an answer took nothing is asked: a status visits every topic."""
_REST_MAX_S: Final = 10.0


@app.command()
@connected
def cordon(
    connection: Connection,
    reason: Annotated[str, typer.Option(help="Why; shown by status, and to publishers.")] = "",
    as_json: AsJson = False,
) -> None:
    """Have the broker take no new messages.

    Publishes are refused, scheduled ones too, and stay in their outboxes; deliveries, acknowledgements and what falls
    due go on. It outlasts a restart.

    Examples:

      outbox broker cordon --reason "moving to another machine"

      outbox broker cordon --url http://10.0.0.5:7788 --json
    """
    connection.client().cordon(reason=reason)
    print_done({"cordoned": True, "reason": reason}, "cordoned: no new messages are taken", as_json=as_json)


@app.command()
@connected
def uncordon(connection: Connection, as_json: AsJson = False) -> None:
    """Have the broker take new messages again.

    Example: outbox broker uncordon
    """
    connection.client().uncordon()
    print_done({"cordoned": False}, "uncordoned: new messages are taken", as_json=as_json)


@app.command()
@connected
def status(connection: Connection, as_json: AsJson = False) -> None:
    """Say whether new messages are taken, and what is left.

    Of all topics, then by topic and group: what is ready, in flight and scheduled, and dead letters.

    Examples:

      outbox broker status

      outbox broker status --json
    """
    client = connection.client()
    answer = client.status()
    topics, following = list(answer.topics), answer.next
    while following is not None:
        page = client.status(after=following)
        topics += page.topics
        following = page.next
    if as_json:
        print_json(msgspec.structs.replace(answer, topics=topics, next=None))
        return
    if answer.cordon is None:
        print("takes new messages")
    else:
        reason = f": {escaped(answer.cordon.reason)}" if answer.cordon.reason else ""
        print(f"cordoned since {utc_text(answer.cordon.since_ms)}{reason}")
    print("drained" if answer.drained else f"left: {_left_text(answer)}")
    rows = [
        [Text(escaped(topic.topic)), Text(escaped(name)), *(Text(str(count)) for count in counts)]
        for topic in topics
        for name, *counts in [
            *([("", "", "", topic.scheduled, "")] if topic.scheduled else []),
            *((group.group, group.ready, group.in_flight, "", group.dead) for group in topic.groups),
        ]
    ]
    if rows:
        print_table(["topic", "group", "ready", "in_flight", "scheduled", "dead"], rows)


@app.command()
@connected
def drain(
    connection: Connection,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing is left.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Wait so long at most, as 90s or 10m (without end).")] = None,
    reason: Annotated[str, typer.Option(help="Why; shown by status, and to publishers.")] = "",
    as_json: AsJson = False,
) -> None:
    """Cordon the broker, and say when nothing is left.

    Drained is what has nothing ready, in flight or scheduled; dead letters stay, and are counted. Says every few
    seconds what is left. Exits with 0 if the broker is drained, with 1 if it is not, or not in time; it stays cordoned.

    Examples:

      outbox broker drain --wait --timeout 10m

      outbox broker drain --json
    """
    client = connection.client()
    timeout_ms = None if timeout is None else _duration_ms(timeout)
    client.cordon(reason=reason)
    answer = _drained(client, timeout_ms=timeout_ms) if wait else client.status(limit=1)
    outcome = {
        "drained": answer.drained, "ready": answer.ready, "in_flight": answer.in_flight,
        "scheduled": answer.scheduled, "dead": answer.dead,
    }  # fmt: skip
    text = f"drained; {answer.dead} dead letters stay" if answer.drained else f"not drained: {_left_text(answer)}"
    print_done(outcome, text, as_json=as_json)
    if not answer.drained:
        raise typer.Exit(1)


@app.command("export")
@connected
def export_metadata(
    connection: Connection,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file (standard output).")] = None,
    as_json: AsJson = False,
) -> None:
    """Write groups, settings and positions as JSON.

    One document of topics and groups with their filters and settings, and where each group is.

    Of the topics that the token covers. With the role consume it notes by which messages positions are recognised.
    Messages, dead letters, what is scheduled and tokens are not in it.

    Examples:

      outbox broker export --output metadata.json

      outbox broker export --url http://10.0.0.5:7788 > metadata.json
    """
    client = connection.client()
    document = MetadataDocument(
        exported_at_ms=time.time_ns() // 1_000_000, source=client.shown_url, topics=list(export_topics(client))
    )
    if output is None:
        print_json(document)
        return
    unfinished = output.with_name(f"{output.name}.new")
    try:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        unfinished.replace(output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    topics, groups = len(document.topics), sum(len(topic.groups) for topic in document.topics)
    print_done(
        {"file": str(output), "topics": topics, "groups": groups},
        f"{topics} topics with {groups} consumer groups written to {output}",
        as_json=as_json,
    )


@app.command("import")
@connected
def import_metadata(
    connection: Connection,
    document: Annotated[Path, typer.Argument(help="The file that export wrote.")],
    positions: Annotated[
        PositionPolicy, typer.Option(help="Where groups begin that are made: earliest skips no message.")
    ] = PositionPolicy.EARLIEST,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Change groups that have other settings.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the consumer groups of an exported document.

    Says what it will do. A group that is there is kept with its position; if its settings differ, nothing is done,
    unless --overwrite changes them. Repeated, it does nothing more.

    Examples:

      outbox broker import metadata.json

      outbox broker import metadata.json --positions copy-where-contents-match --yes
    """
    client = connection.client()
    try:
        content = document.read_bytes()
    except OSError as error:
        raise UsageError(f"{document} cannot be read: {error.strerror}") from error
    steps = plan_import(client, parse_document(content), policy=positions, overwrite=overwrite)
    if not as_json:
        print_lines((escaped(step.text) for step in steps), none="the document has no consumer groups")
    changing = [step for step in steps if step.kind is not StepKind.KEEP]
    if changing and not yes:
        confirm(f"Make or change {len(changing)} consumer groups?")
    for step in changing:
        apply_step(client, step)
    counts = Counter(step.kind for step in steps)
    made, changed, kept = counts[StepKind.MAKE], counts[StepKind.CHANGE], counts[StepKind.KEEP]
    outcome: dict[str, object] = {"made": made, "changed": changed, "kept": kept}
    if as_json:
        outcome["steps"] = [
            {"kind": step.kind, "topic": step.topic, "group": step.group, "text": step.text} for step in steps
        ]
    print_done(outcome, f"{made} made, {changed} changed, {kept} kept as they were", as_json=as_json)


def _drained(client: AdminClient, *, timeout_ms: int | None) -> StatusAnswer:
    """Ask until nothing is left or the time is up; returns the last answer. A broker that restarts is asked again."""
    pause, begun_s, said_s = threading.Event(), time.monotonic(), -_PROGRESS_S
    while True:
        asked_s, rest_s = time.monotonic(), _POLL_S
        left_s = math.inf if timeout_ms is None else timeout_ms / 1000 - (asked_s - begun_s)
        is_last = left_s <= 0
        try:
            answer = client.status(limit=1)
        except BrokerUnavailable:
            if is_last:
                raise
        else:
            if answer.drained or is_last:
                return answer
            rest_s = min(max(_POLL_S, _REST * (time.monotonic() - asked_s)), _REST_MAX_S)
            if time.monotonic() - said_s >= _PROGRESS_S:
                said_s = time.monotonic()
                print(f"left: {_left_text(answer)}", file=sys.stderr)
        pause.wait(min(rest_s, left_s))


def _left_text(answer: StatusAnswer) -> str:
    return (
        f"{answer.ready} ready, {answer.in_flight} in flight, {answer.scheduled} scheduled; {answer.dead} dead letters"
    )


def _duration_ms(text: str) -> int:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
