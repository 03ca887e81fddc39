"""Commands `outbox broker refused ...`: what the target of a delay service refused for good."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox_broker.server import group_cli
from outbox_broker.server.admin_http_client import AdminHttpClient
from outbox_broker.server.delete_cli import Yes, confirm
from outbox_core.runtime.terminal_text import escaped

app = typer.Typer(no_args_is_help=True, help="What a delay service's target refused.")

Ids = Annotated[list[str], typer.Argument(help="Ids of messages.")]
_URL = "http://127.0.0.1:7799"


@app.command("list")
def list_refused(
    url: group_cli.Url = _URL, timeout_ms: group_cli.Timeout = 30_000, ca_file: group_cli.CaFile = None,
    token_file: group_cli.TokenFile = None,
) -> None:  # fmt: skip
    """Print a line for each: topic, id and reason. At most a thousand of each process, or shard of a cluster.

    Example: outbox broker refused list --url http://delay:7799
    """
    client = AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    for message in client.request_json("GET", "/v1/refused")["messages"]:
        print(f"{escaped(message['topic'])}\t{escaped(message['id'])}\t{escaped(message['reason'])}")


@app.command()
def retry(
    ids: Ids, url: group_cli.Url = _URL, timeout_ms: group_cli.Timeout = 60_000, ca_file: group_cli.CaFile = None,
    token_file: group_cli.TokenFile = None,
) -> None:  # fmt: skip
    """Send them to the target once more, after the cause is removed. Exits with 1 if one was not sent.

    Example: outbox broker refused retry 01J9Z 01J9Y
    """
    client = AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    results = client.request_json("POST", "/v1/refused/retry", {"ids": ids})["results"]
    for result in results:
        print("\t".join(escaped(text) for text in (result["id"], result["status"], result.get("error")) if text))
    if any(result["status"] != "sent" for result in results):
        raise typer.Exit(1)


@app.command()
def discard(
    ids: Ids, yes: Yes = False, url: group_cli.Url = _URL, timeout_ms: group_cli.Timeout = 60_000,
    ca_file: group_cli.CaFile = None, token_file: group_cli.TokenFile = None,
) -> None:  # fmt: skip
    """Cancel them: they are never sent.

    Example: outbox broker refused discard 01J9Z --yes
    """
    client = AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    if not yes:
        confirm(f"Discard {len(ids)} messages for good?")
    for result in client.request_json("POST", "/v1/scheduled/cancel", {"ids": ids})["results"]:
        print(f"{escaped(result['id'])}\t{result['status']}")
