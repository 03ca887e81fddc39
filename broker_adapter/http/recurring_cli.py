"""The commands of `outbox broker schedule` on recurring messages: `add`, and `recurring list|show|pause|resume|delete`.

`schedule list|show|cancel` are of messages that come once, by their ids; a recurring message has a name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.shared_cli import (
    AsJson,
    Connection,
    Yes,
    confirm,
    connected,
    headers_of,
    print_done,
    print_json,
    print_table,
    read_file,
)
from outbox_core.common.errors import BrokerRefused, UsageError
from outbox_core.messages.limits import RECURRING_CATCH_UP_MAX, RECURRING_RUNS_MAX
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.protocol.wire import RecurringAnswer
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="List, show, pause and delete recurring messages.")

_BODY_STDIN: Final = "-"
Name = Annotated[str, typer.Argument(help="Its name.")]


@connected
def add(
    connection: Connection,
    name: Annotated[str, typer.Argument(help="A name for it, of the characters that topics have.")],
    cron: Annotated[str, typer.Option(help="Minute, hour, day, month and weekday, as '0 6 * * mon-fri'.")],
    topic: Annotated[str, typer.Option(help="The topic that it is published to.")],
    tz: Annotated[str, typer.Option(help="The time zone of these, as Europe/Berlin.")] = "UTC",
    key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    body: Annotated[str | None, typer.Option(help="The body, as text; - reads standard input, as bytes.")] = None,
    body_file: Annotated[Path | None, typer.Option(help="The body, from a file.")] = None,
    catch_up: Annotated[
        int,
        typer.Option(min=1, max=RECURRING_CATCH_UP_MAX, help="Of occurrences that were missed, the newest so many."),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Add a message that comes again and again.

    The broker publishes it at each time of a cron expression. Each occurrence is published once, whatever is restarted
    or dies meanwhile; its id and its header outbox-recurring-at tell which one it is, and created_at when it came. In
    spring a time that does not exist is moved by what the clock is put forward; in autumn one that comes twice occurs
    the first time. Weekdays are 0 or 7 for Sunday, to 6, or names. Adding the same again changes nothing; another one
    of its name is refused.

    Examples:

      outbox broker schedule add daily-report --topic reports --cron "0 6 * * *" --tz Europe/Berlin --body daily

      outbox broker schedule add invoices --topic billing --cron "30 4 1 * *" --body-file invoices.json --catch-up 3
    """
    message = RecurringMessage(
        topic=topic, cron=cron, tz=tz, key=key, headers=headers_of(header or ()), body=_body(body, body_file),
        catch_up=catch_up,
    )  # fmt: skip
    client = connection.client()
    client.add_recurring(name, message)
    answer = _known(client, name, runs=1)
    following = utc_text(answer.next_ms[0]) if answer.next_ms else "when it is resumed"
    print_done(
        {"name": name, "topic": topic, "next_ms": answer.next_ms}, f"{name} added, next {following}", as_json=as_json
    )


@app.command("list")
@connected
def list_recurring(connection: Connection, as_json: AsJson = False) -> None:
    """List recurring messages.

    When each comes next, and why what is due could not be published; of those on topics that the token covers.

    Examples:

      outbox broker schedule recurring list

      outbox broker schedule recurring list --json
    """
    answers = list(connection.client().recurring())
    if as_json:
        print_json(answers)
        return
    if not answers:
        print("no recurring messages", file=sys.stderr)
        return
    rows = [
        [Text(escaped(text)) for text in (answer.name, answer.topic, answer.cron, answer.tz, _state(answer))]
        for answer in answers
    ]
    print_table(["name", "topic", "cron", "tz", "next"], rows)


@app.command("show")
@connected
def show_recurring(
    connection: Connection,
    name: Name,
    runs: Annotated[int, typer.Option(min=1, max=RECURRING_RUNS_MAX, help="How many of its next occurrences.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print a recurring message, and when it comes next.

    Its key, headers and body for a token with the role consume or admin. Exits with 1 if there is none of this name.

    Examples:

      outbox broker schedule recurring show daily-report

      outbox broker schedule recurring show daily-report --runs 20 --json
    """
    answer = _known(connection.client(), name, runs=runs)
    if as_json:
        print_json(answer)
        return
    fields = {
        "name": answer.name, "topic": answer.topic, "cron": answer.cron, "tz": answer.tz,
        "catch_up": str(answer.catch_up), "paused": str(answer.paused).lower(), "key": answer.key,
        "added": utc_text(answer.added_at_ms), "fired_to": utc_text(answer.fired_to_ms), "failure": answer.failure,
        "body": answer.body,
    }  # fmt: skip
    for field, text in fields.items():
        if text is not None:
            print(f"{field}\t{escaped(text)}")
    for header, value in (answer.headers or {}).items():
        print(f"header\t{escaped(header)}={escaped(value)}")
    for next_ms in answer.next_ms:
        print(f"next\t{utc_text(next_ms)}")


@app.command("pause")
@connected
def pause_recurring(connection: Connection, name: Name, as_json: AsJson = False) -> None:
    """Pause a recurring message. Nothing of it is published until it is resumed.

    Example: outbox broker schedule recurring pause daily-report
    """
    connection.client().pause_recurring(name, paused=True)
    print_done({"name": name, "paused": True}, f"{name} is paused", as_json=as_json)


@app.command("resume")
@connected
def resume_recurring(connection: Connection, name: Name, as_json: AsJson = False) -> None:
    """Resume a recurring message. Of what it missed the newest is published at once, or as many as --catch-up said.

    Example: outbox broker schedule recurring resume daily-report
    """
    connection.client().pause_recurring(name, paused=False)
    print_done({"name": name, "paused": False}, f"{name} goes on", as_json=as_json)


@app.command("delete")
@connected
def delete_recurring(connection: Connection, name: Name, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a recurring message. What it has published stays.

    Examples:

      outbox broker schedule recurring delete daily-report

      outbox broker schedule recurring delete daily-report --yes
    """
    client = connection.client()
    if not yes:
        answer = _known(client, name, runs=1)
        confirm(
            f"Delete the recurring message {name}, which publishes to {answer.topic} at {answer.cron!r}, {answer.tz}?"
        )
    client.delete_recurring(name)
    print_done({"name": name, "deleted": True}, f"{name} deleted", as_json=as_json)


def _known(client: AdminClient, name: str, *, runs: int) -> RecurringAnswer:
    answer = client.recurring_message(name, runs=runs)
    if answer is None:
        raise BrokerRefused(f"there is no recurring message {name}")
    return answer


def _state(answer: RecurringAnswer) -> str:
    if answer.failure is not None:
        return f"failed: {answer.failure}"
    if answer.paused:
        return "paused"
    return utc_text(answer.next_ms[0]) if answer.next_ms else "never"


def _body(text: str | None, file: Path | None) -> bytes:
    if text is not None and file is not None:
        raise UsageError("give --body or --body-file, one of them")
    if text == _BODY_STDIN:
        return sys.stdin.buffer.read()
    return (text or "").encode() if file is None else read_file(file)
