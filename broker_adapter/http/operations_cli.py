"""The commands of `outbox broker` on a broker as a whole: cordon, uncordon, status, drain."""

from __future__ import annotations

import sys
import threading
import time
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.shared_cli import AsJson, Connection, connected, print_done, print_json, print_table
from outbox_core.common.errors import BrokerUnavailable, UsageError
from outbox_core.protocol.wire import StatusAnswer
from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="Cordon and drain a broker.")

_PROGRESS_S: Final = 2.0
_POLL_S: Final = 0.5


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


def _drained(client: AdminClient, *, timeout_ms: int | None) -> StatusAnswer:
    """Ask until nothing is left or the time is up; returns the last answer. A broker that restarts is asked again."""
    pause, begun_s, said_s = threading.Event(), time.monotonic(), -_PROGRESS_S
    while True:
        is_last = timeout_ms is not None and (time.monotonic() - begun_s) * 1000 >= timeout_ms
        try:
            answer = client.status(limit=1)
        except BrokerUnavailable:
            if is_last:
                raise
        else:
            if answer.drained or is_last:
                return answer
            if time.monotonic() - said_s >= _PROGRESS_S:
                said_s = time.monotonic()
                print(f"left: {_left_text(answer)}", file=sys.stderr)
        pause.wait(_POLL_S)


def _left_text(answer: StatusAnswer) -> str:
    return (
        f"{answer.ready} ready, {answer.in_flight} in flight, {answer.scheduled} scheduled; {answer.dead} dead letters"
    )


def _duration_ms(text: str) -> int:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
