"""Commands `outbox broker group ...`: settings, seek, pause and dead letters of consumer groups on a running broker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.request_codec import group_path
from outbox_core.common.errors import UsageError
from outbox_core.runtime.terminal_text import escaped, utc_text

app = typer.Typer(no_args_is_help=True, help="Declare, show and move consumer groups.")

Topic = Annotated[str, typer.Argument(help="The topic.")]
Group = Annotated[str, typer.Argument(help="The consumer group.")]
Url = Annotated[str, typer.Option("--url", "--broker", envvar="OUTBOX_BROKER__URL", help="The broker's URL.")]
Timeout = Annotated[int, typer.Option(min=1, help="Time to wait for the answer.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust, PEM.")]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="OUTBOX_BROKER__TOKEN_FILE", help="File that holds the bearer token.")
]
DEAD_PAGE_BYTES_MAX: Final = 128 * 1024 * 1024
NO_ID: Final = "(damaged)"
PIPED_WIDTH: Final = 1_000
"""Output to a file or another program uses one line per entry of a history."""
_URL: Final = "http://127.0.0.1:7788"


@app.command()
def show(
    topic: Topic, group: Group, url: Url = _URL, timeout_ms: Timeout = 5_000, ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:  # fmt: skip
    """Print a group's figures and settings as JSON.

    Example: outbox broker group show orders billing
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    print(json.dumps(client.request_json("GET", group_path(topic, group)), indent=2))


@app.command()
def declare(
    topic: Topic,
    group: Group,
    ordered: Annotated[bool | None, typer.Option(help="One message of a key at a time, in order.")] = None,
    filter_: Annotated[str | None, typer.Option("--filter", help="What the group wants; '' for everything.")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Attempts before a message is a dead letter.")] = None,
    start: Annotated[str | None, typer.Option(help="earliest or latest, for a group that is new.")] = None,
    url: Url = _URL,
    timeout_ms: Timeout = 5_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Make a group, or change its settings. Those that are not named stay as they are.

    Example: outbox broker group declare orders billing --filter "region = 'eu'" --max-attempts 5
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    path = group_path(topic, group)
    is_new = client.request("GET", path)[0] == HTTPStatus.NOT_FOUND
    settings: dict[str, Any] = {} if is_new else client.request_json("GET", path)["settings"]
    named = {"ordered": ordered, "max_attempts": max_attempts, "start": start, "filter": filter_}
    settings |= {name: value for name, value in named.items() if value is not None}
    if not settings.get("filter"):
        settings.pop("filter", None)
    client.request_json("PUT", path, settings)
    print(f"{topic}/{group} declared")


@app.command()
def seek(
    topic: Topic,
    group: Group,
    to_ms: Annotated[int | None, typer.Option(help="To what became ready at this time, milliseconds.")] = None,
    to_offset: Annotated[int | None, typer.Option(help="To this offset of the topic.")] = None,
    url: Url = _URL,
    timeout_ms: Timeout = 5_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Move a group to a time or an offset.

    Example: outbox broker group seek orders billing --to-offset 0
    """
    if (to_ms is None) == (to_offset is None):
        raise UsageError("give --to-ms or --to-offset, one of them")
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    body = {"to_ms": to_ms} if to_ms is not None else {"to_offset": to_offset}
    client.request_json("POST", f"{group_path(topic, group)}/seek", body)
    print(f"{topic}/{group} moved")


@app.command()
def pause(
    topic: Topic,
    group: Group,
    resume: Annotated[bool, typer.Option("--resume", help="Resume deliveries.")] = False,
    url: Url = _URL,
    timeout_ms: Timeout = 5_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Pause deliveries to a group, or resume them.

    Example: outbox broker group pause orders billing --resume
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    client.request_json("POST", f"{group_path(topic, group)}/{'resume' if resume else 'pause'}", {})
    print(f"{topic}/{group} {'goes on' if resume else 'is paused'}")


@app.command()
def dead(
    topic: Topic,
    group: Group,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="So many at once.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on behind the page that named this.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with what the messages carry.")] = False,
    bytes_max: Annotated[
        int, typer.Option(min=1, help="Refuse a longer page: it contains the messages' bodies.")
    ] = DEAD_PAGE_BYTES_MAX,
    url: Url = _URL,
    timeout_ms: Timeout = 30_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """List dead letters, oldest first. Attempts, when, the last reason, and how the attempts went.

    Example: outbox broker group dead orders billing --limit 50
    """
    client = AdminClient(
        url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file, answer_bytes_max=bytes_max
    )
    query = {"limit": str(limit)} | ({} if after is None else {"after": after})
    page = client.request_json("GET", f"{group_path(topic, group)}/dead?{urlencode(query)}")
    if as_json:
        print(json.dumps(page, indent=2))
    else:
        _print_dead(page["dead"], following=page["next"])


@app.command()
def redrive(
    topic: Topic,
    group: Group,
    message_id: Annotated[list[str] | None, typer.Option(help="A dead letter's id; may be repeated (all).")] = None,
    per_second: Annotated[int | None, typer.Option(help="How many are ready each second.")] = None,
    url: Url = _URL,
    timeout_ms: Timeout = 30_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Send dead letters again.

    Example: outbox broker group redrive orders billing --per-second 100
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    body: dict[str, Any] = {"ids": message_id} if message_id else {"all": True}
    if per_second is not None:
        body["per_second"] = per_second
    answer = client.request_json("POST", f"{group_path(topic, group)}/dead/redrive", body)
    print(f"{answer['redriven']} redriven")


def _print_dead(letters: Sequence[Mapping[str, Any]], *, following: str | None) -> None:
    """Print a page of dead letters, and the option for the next one."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    if not letters:
        console.print("no dead letters", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "attempts", "when", "reason", "how they went"):
        table.add_column(
            name, overflow="fold", no_wrap=name == "id", justify="right" if name == "attempts" else "left"
        )  # ids are copied
    for letter in letters:
        table.add_row(
            Text(escaped(letter["id"]) or NO_ID), str(letter["attempts"]), utc_text(letter["dead_at_ms"]),
            Text(escaped(letter["reason"])), Text(_history(letter["history"])),
        )  # fmt: skip
    console.print(table)
    if following is not None:
        console.print(f"more: --after {escaped(following)}", markup=False, highlight=False)


def _history(failures: Sequence[Mapping[str, Any]]) -> str:
    """Returns a history as text: number of attempts and reason, one line per group of equal consecutive failures."""
    return "\n".join(f"{failure['attempts']} x {escaped(failure['reason'])}" for failure in failures)
