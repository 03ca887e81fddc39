"""The command `outbox broker`: runs a broker, and asks and operates one that runs.

`serve` and `token` are the broker's own (outbox_broker/server/cli.py), `group ...` is in group_cli.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Final, Protocol, cast
from urllib.parse import quote, urlencode

import typer

from broker_adapter.http import group_cli
from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.group_cli import CaFile, Group, Timeout, TokenFile, Topic, Url
from broker_adapter.http.request_codec import group_path
from outbox_broker.server import cli as server_cli
from outbox_core.common.errors import BrokerUnavailable, UsageError
from outbox_core.messages.connect import connect
from outbox_core.messages.message import check_topic
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="Run the broker, and probe one.")
refused_app: Final = typer.Typer(no_args_is_help=True, help="What a delay service's target refused.")
app.add_typer(server_cli.app)
app.add_typer(group_cli.app, name="group")
app.add_typer(refused_app, name="refused")

Force = Annotated[bool, typer.Option("--force", help="Also where it is in use.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Ids = Annotated[list[str], typer.Argument(help="Ids of messages.")]
_BROKER_URL: Final = "http://127.0.0.1:7788"
_DELAY_URL: Final = "http://127.0.0.1:7799"


@app.callback()
def _broker() -> None:
    """Run the broker, and probe one."""


@app.command()
def check(
    url: Url = _BROKER_URL,
    timeout_ms: Timeout = 2_000,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to trust, PEM.")] = None,
    live: Annotated[bool, typer.Option("--live/--ready", help="Ask only whether the process is alive.")] = False,
) -> None:
    """Exit 0 where a broker can serve. For probes where there is no curl.

    Example: outbox broker check --ready --url http://127.0.0.1:7788
    """
    path = "/livez" if live else "/readyz"
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file)
    status, text = client.request("GET", path)
    if status != 200:
        raise BrokerUnavailable(f"{client.shown_url} is not ready: {text[:500]}")
    print(escaped(text, but="\n"))


@app.command()
def scheduled(
    message_id: Annotated[str | None, typer.Argument(help="One message; without, how many are due when.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only of this topic.")] = None,
    bucket: Annotated[str, typer.Option(help="Count by minute, hour or day.")] = "hour",
    url: Url = _BROKER_URL,
    timeout_ms: Timeout = 30_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Count scheduled messages by due time, or find one.

    A line for each bucket of time (UTC, tab, count); of one message, when and where it is due.

    Ask a broker, or a delay service.

    Example: outbox broker scheduled --topic orders --bucket day
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    if message_id is not None:
        message = client.request_json("GET", f"/v1/scheduled/{quote(message_id, safe='')}")
        print(f"{utc_text(message['deliver_at_ms'])}\t{escaped(message['topic'])}\t{escaped(message['id'])}")
        return
    query, lines = {"bucket": bucket} if topic is None else {"bucket": bucket, "topic": topic}, 0
    while True:
        page = client.request_json("GET", f"/v1/scheduled?{urlencode(query)}")
        for count in page["counts"]:
            print(f"{utc_text(count['at_ms'])}\t{count['messages']}")
        lines += len(page["counts"])
        if page["next_from_ms"] is None:
            if not lines:  # not on stdout, which programs read line by line
                print("nothing is scheduled", file=sys.stderr)
            return
        query["from_ms"] = str(page["next_from_ms"])


@app.command("delete-topic")
def delete_topic(
    topic: Topic,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
    url: Url = _BROKER_URL,
    timeout_ms: Timeout = 60_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Delete a topic. Its messages are delivered to nobody any more.

    One that has consumer groups or scheduled messages is deleted by --force alone: with its groups, and what it has
    scheduled is canceled.

    Examples:

      outbox broker delete-topic orders

      outbox broker delete-topic orders --force --yes
    """
    with _admin(url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file) as admin:
        if not yes:
            figures = admin.figures(topic)
            _confirm(
                f"Delete the topic {topic}, with {figures['stored']} messages stored, {figures['scheduled']} scheduled,"
                f" {figures['backlog']} for its consumer groups to get, and {figures['dead']} dead letters?"
            )
        admin.delete_topic(topic, force=force)
    print(json.dumps({"topic": topic, "deleted": True}) if as_json else f"{topic} deleted")


@app.command("delete-group")
def delete_group(
    topic: Topic,
    group: Group,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
    url: Url = _BROKER_URL,
    timeout_ms: Timeout = 5_000,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:
    """Delete a consumer group. Its position and its dead letters go; messages stay for the other groups.

    One whose consumers run is deleted by --force alone; a consumer that goes on makes a new group of this name.

    Examples:

      outbox broker delete-group orders billing

      outbox broker delete-group orders billing --force --yes
    """
    with _admin(url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file) as admin:
        if not yes:
            figures = admin.figures(topic, group)
            _confirm(
                f"Delete the consumer group {group} of {topic}, which has {figures['backlog']} messages to get, "
                f"{figures['in_flight']} in flight and {figures['dead']} dead letters?"
            )
        admin.delete_group(topic, group, force=force)
    print(json.dumps({"topic": topic, "group": group, "deleted": True}) if as_json else f"{topic}/{group} deleted")


@refused_app.command("list")
def list_refused(
    url: Url = _DELAY_URL, timeout_ms: Timeout = 30_000, ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:  # fmt: skip
    """Print a line for each: topic, id and reason. At most a thousand of each process, or shard of a cluster.

    Example: outbox broker refused list --url http://delay:7799
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    for message in client.request_json("GET", "/v1/refused")["messages"]:
        print(f"{escaped(message['topic'])}\t{escaped(message['id'])}\t{escaped(message['reason'])}")


@refused_app.command()
def retry(
    ids: Ids, url: Url = _DELAY_URL, timeout_ms: Timeout = 60_000, ca_file: CaFile = None,
    token_file: TokenFile = None,
) -> None:  # fmt: skip
    """Send them to the target once more, after the cause is removed. Exits with 1 if one was not sent.

    Example: outbox broker refused retry 01J9Z 01J9Y
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    results = client.request_json("POST", "/v1/refused/retry", {"ids": ids})["results"]
    for result in results:
        print("\t".join(escaped(text) for text in (result["id"], result["status"], result.get("error")) if text))
    if any(result["status"] != "sent" for result in results):
        raise typer.Exit(1)


@refused_app.command()
def discard(
    ids: Ids, yes: Yes = False, url: Url = _DELAY_URL, timeout_ms: Timeout = 60_000,
    ca_file: CaFile = None, token_file: TokenFile = None,
) -> None:  # fmt: skip
    """Cancel them: they are never sent.

    Example: outbox broker refused discard 01J9Z --yes
    """
    client = AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    if not yes:
        _confirm(f"Discard {len(ids)} messages for good?")
    for result in client.request_json("POST", "/v1/scheduled/cancel", {"ids": ids})["results"]:
        print(f"{escaped(result['id'])}\t{result['status']}")


def _confirm(question: str) -> None:
    """Ask on the terminal. Raises UsageError where there is none, and for a no."""
    if not sys.stdin.isatty():
        raise UsageError("nothing was deleted: say --yes to do it without being asked")
    if not typer.confirm(question, err=True):
        raise UsageError("nothing was deleted")


class _HttpAdmin:
    """What these commands need of our broker, asked as the other commands ask: HttpAdmin refuses URLs with a login, and
    its errors name requests, not the broker.
    """

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        path = _topic_path(topic) if group is None else group_path(topic, group)
        figures: Mapping[str, int] = self._client.request_json("GET", path)["figures"]
        return figures

    def delete_group(self, topic: str, group: str, *, force: bool) -> None:
        self._delete(group_path(topic, group), force=force)

    def delete_topic(self, topic: str, *, force: bool) -> None:
        self._delete(_topic_path(topic), force=force)

    def _delete(self, path: str, *, force: bool) -> None:
        self._client.request_json("DELETE", path + ("?force=true" if force else ""))


class _Admin(Protocol):
    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]: ...

    def delete_group(self, topic: str, group: str, *, force: bool) -> None: ...

    def delete_topic(self, topic: str, *, force: bool) -> None: ...


@contextmanager
def _admin(url: str, *, timeout_ms: int, ca_file: Path | None, token_file: Path | None) -> Iterator[_Admin]:
    # Topics and groups of Redis timers have no server of ours: their adapter deletes them.
    if not url.startswith("redis"):
        yield _HttpAdmin(AdminClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file))
        return
    with closing(connect(url, timeout_ms=timeout_ms, ca_file=None if ca_file is None else str(ca_file))) as broker:
        yield cast("_Admin", broker.admin)  # raises NotSupported for streams, which are not ours to delete


def _topic_path(topic: str) -> str:
    """Returns the path of a topic. Raises InvalidMessage: of a name `..` a client makes another path."""
    return f"/v1/topics/{check_topic(topic)}"
