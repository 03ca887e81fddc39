"""Commands `outbox broker delete-topic | delete-group`: deletions on a running broker, or among Redis timers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Protocol, cast
from urllib.parse import quote

import typer

from outbox_broker.server import group_cli
from outbox_broker.server.admin_http_client import AdminHttpClient
from outbox_core.common.errors import UsageError
from outbox_core.messages.connect import connect

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
    with _admin(url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file) as admin:
        if not yes:
            figures = admin.figures(topic)
            confirm(
                f"Delete the topic {topic}, with {figures['stored']} messages stored, {figures['scheduled']} scheduled,"
                f" {figures['backlog']} for its consumer groups to get, and {figures['dead']} dead letters?"
            )
        admin.delete_topic(topic, force=force)
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
    with _admin(url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file) as admin:
        if not yes:
            figures = admin.figures(topic, group)
            confirm(
                f"Delete the consumer group {group} of {topic}, which has {figures['backlog']} messages to get, "
                f"{figures['in_flight']} in flight and {figures['dead']} dead letters?"
            )
        admin.delete_group(topic, group, force=force)
    print(json.dumps({"topic": topic, "group": group, "deleted": True}) if as_json else f"{topic}/{group} deleted")


def confirm(question: str) -> None:
    """Ask on the terminal. Raises UsageError where there is none, and for a no."""
    if not sys.stdin.isatty():
        raise UsageError("nothing was deleted: say --yes to do it without being asked")
    if not typer.confirm(question, err=True):
        raise UsageError("nothing was deleted")


class _HttpAdmin:
    """What these commands need of our broker, over HTTP without the adapter, which may not be installed beside it."""

    def __init__(self, client: AdminHttpClient) -> None:
        self._client = client

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        figures: Mapping[str, int] = self._client.request_json("GET", _path(topic, group))["figures"]
        return figures

    def delete_group(self, topic: str, group: str, *, force: bool) -> None:
        self._delete(_path(topic, group), force=force)

    def delete_topic(self, topic: str, *, force: bool) -> None:
        self._delete(_path(topic), force=force)

    def _delete(self, path: str, *, force: bool) -> None:
        self._client.request_json("DELETE", path + ("?force=true" if force else ""))


class _Admin(Protocol):
    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]: ...

    def delete_group(self, topic: str, group: str, *, force: bool) -> None: ...

    def delete_topic(self, topic: str, *, force: bool) -> None: ...


@contextmanager
def _admin(url: str, *, timeout_ms: int, ca_file: Path | None, token_file: Path | None) -> Iterator[_Admin]:
    if not url.startswith("redis"):
        yield _HttpAdmin(AdminHttpClient(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file))
        return
    with closing(connect(url, timeout_ms=timeout_ms, ca_file=None if ca_file is None else str(ca_file))) as broker:
        yield cast("_Admin", broker.admin)  # raises NotSupported for streams, which are not ours to delete


def _path(topic: str, group: str | None = None) -> str:
    path = f"/v1/topics/{quote(topic, safe='')}"
    return path if group is None else f"{path}/groups/{quote(group, safe='')}"
