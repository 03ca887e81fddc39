"""Commands `outbox broker delete-topic | delete-group`: deletions on a running broker."""

from __future__ import annotations

import json
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from outbox_broker.server import group_cli
from outbox_broker.server.admin_http_client import AdminHttpClient
from outbox_core.common.errors import UsageError

Force = Annotated[bool, typer.Option("--force", help="Also where it is in use.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_URL = "http://127.0.0.1:7788"


def delete_topic(
    topic: group_cli.Topic,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
    url: group_cli.Url = _URL,
    timeout_ms: group_cli.Timeout = 60_000,
    ca_file: group_cli.CaFile = None,
    token_file: group_cli.TokenFile = None,
) -> None:
    """Delete a topic. Its messages are delivered to nobody any more.

    One that has consumer groups or scheduled messages is deleted by --force alone: with its groups, and what it has
    scheduled is canceled.

    Examples:

      outbox broker delete-topic orders

      outbox broker delete-topic orders --force --yes
    """
    client = AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    path = f"/v1/topics/{quote(topic, safe='')}"
    if not yes:
        found = client.request_json("GET", path)
        figures = found["figures"]
        _confirm(
            f"Delete the topic {topic}, with {figures['stored']} messages stored, {figures['scheduled']} scheduled and "
            f"{len(found['groups'])} consumer groups?"
        )
    _delete(client, path, force=force)
    print(json.dumps({"topic": topic, "deleted": True}) if as_json else f"{topic} deleted")


def delete_group(
    topic: group_cli.Topic,
    group: group_cli.Group,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
    url: group_cli.Url = _URL,
    timeout_ms: group_cli.Timeout = 5_000,
    ca_file: group_cli.CaFile = None,
    token_file: group_cli.TokenFile = None,
) -> None:
    """Delete a consumer group. Its position and its dead letters go; messages stay for the other groups.

    One whose consumers run is deleted by --force alone; a consumer that goes on makes a new group of this name.

    Examples:

      outbox broker delete-group orders billing

      outbox broker delete-group orders billing --force --yes
    """
    client = AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
    path = f"/v1/topics/{quote(topic, safe='')}/groups/{quote(group, safe='')}"
    if not yes:
        figures = client.request_json("GET", path)["figures"]
        _confirm(
            f"Delete the consumer group {group} of {topic}, which has {figures['backlog']} messages to get, "
            f"{figures['in_flight']} in flight and {figures['dead']} dead letters?"
        )
    _delete(client, path, force=force)
    print(json.dumps({"topic": topic, "group": group, "deleted": True}) if as_json else f"{topic}/{group} deleted")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("nothing was deleted: say --yes to delete without being asked")
    if not typer.confirm(question, err=True):
        raise UsageError("nothing was deleted")


def _delete(client: AdminHttpClient, path: str, *, force: bool) -> None:
    client.request_json("DELETE", path + ("?force=true" if force else ""))
