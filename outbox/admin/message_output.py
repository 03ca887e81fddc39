"""Prints messages as text for people or JSON for programs. No message can send control codes to the terminal."""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox.admin.message_admin import DISCARDED, ArchivedMessage, MessageContent, MessagePage, UnsentMessage
from outbox.store.withdrawals import WITHDRAWN
from outbox_core.runtime.terminal_text import escaped, utc_text

_SECOND_US: Final = 1_000_000
_ARCHIVED_STATES: Final = {WITHDRAWN: "canceled", DISCARDED: "discarded"}
"""What became of a message, by its outcome in the archive; any other is a broker's answer."""


def print_page(page: MessagePage, *, as_json: bool) -> None:
    """Print each message on a line, with the reason why it is not sent on a line below. The terminal wraps long lines.

    What comes after the page goes to standard error, since a program reads an object a line.
    """
    for message in page.messages:
        if as_json:
            typer.echo(json.dumps(asdict(message)))
            continue
        typer.echo("  ".join(_cells(message)))
        if message.last_error:
            typer.echo(f"    {escaped(message.last_error)}")
    if not page.messages and not as_json:
        typer.echo("no such messages")
    if page.next_cursor is not None:
        typer.echo(f"more: --after {escaped(page.next_cursor)}", err=True)


def _cells(message: UnsentMessage) -> Iterator[str]:
    yield escaped(message.id)
    yield escaped(message.topic)
    if message.key:
        yield f"key={escaped(message.key)}"
    yield _state(message)
    yield f"attempts={message.attempts}"
    yield " ".join(_due(message))


def print_message(message: UnsentMessage, content: MessageContent, *, with_body: bool, as_json: bool) -> None:
    """Print one message; `with_body`: with its body and the values of its headers."""
    headers = _headers(content.headers)
    shown_headers = headers if with_body else sorted(headers)
    if as_json:
        figures = {**asdict(message), **asdict(content), "headers": shown_headers}
        del figures["body"]
        typer.echo(json.dumps(figures | (_json_body(content) if with_body else {})))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _for_people(message, content, shown_headers).items():
        table.add_row(name, Text(escaped(text), overflow="fold"))
    Console().print(table)
    if with_body:
        typer.echo("")
        typer.echo(_text_body(content))


def print_archived(messages: Sequence[ArchivedMessage], *, as_json: bool) -> None:
    """Print the archive's rows of a message that is not pending any more: it was sent, or canceled or discarded."""
    for message in messages:
        state = _ARCHIVED_STATES.get(message.outcome, "sent")
        if as_json:
            typer.echo(json.dumps({**asdict(message), "state": state}))
            continue
        name, topic, at = escaped(message.id), escaped(message.topic), utc_text(message.sent_at_us // 1000)
        match state:
            case "canceled":
                typer.echo(f"{name} for {topic} was canceled at {at}, before it was sent")
            case "discarded":
                typer.echo(f"{name} for {topic} was discarded by an operator at {at}")
            case _:
                typer.echo(f"{name} was sent to {topic} at {at}: {escaped(message.outcome)}")


def _state(message: UnsentMessage) -> str:
    return f"{message.state}, in hand" if message.in_hand else message.state.value


def _due(message: UnsentMessage) -> tuple[str, str]:
    """Returns `due in` or `due for`, and how long."""
    seconds = message.due_in_us / _SECOND_US
    return ("due in" if seconds > 0 else "due for"), f"{abs(seconds):,.1f} s"


def _for_people(
    message: UnsentMessage, content: MessageContent, headers: Mapping[str, Any] | Sequence[str]
) -> dict[str, str]:
    """Returns the fields that are not empty, with formatted times."""
    due, since_or_until = _due(message)
    fields: dict[str, str | None] = {
        "id": message.id,
        "state": _state(message),
        "kind": message.kind,
        "table": message.table,
        "topic": message.topic,
        "key": message.key,
        "attempts": str(message.attempts),
        "created": utc_text(message.created_at_us // 1000),
        due: since_or_until,
        "deliver at": utc_text(message.deliver_at_ms) if message.deliver_at_ms is not None else None,
        "order": f"{content.order_key} number {content.order_seq}" if content.order_key else None,
        "headers": json.dumps(headers, ensure_ascii=False) if isinstance(headers, Mapping) else ", ".join(headers),
        "body": f"{content.body_bytes:,} bytes, SHA-256 {content.body_sha256}",
        "last error": message.last_error,
    }
    return {name: text for name, text in fields.items() if text}


def _headers(text: str | None) -> dict[str, Any]:
    """Returns the headers, or a substitute for headers that newer or other code has written."""
    try:
        headers = json.loads(text) if text else {}
    except ValueError:
        return {"unreadable": text}
    return headers if isinstance(headers, dict) else {"unreadable": text}


def _json_body(content: MessageContent) -> dict[str, Any]:
    text = _decoded(content)
    body = {"body_base64": base64.b64encode(content.body).decode()} if text is None else {"body": text}
    return {**body, "body_is_cut": len(content.body) < content.body_bytes}


def _text_body(content: MessageContent) -> str:
    text = _decoded(content)
    shown = base64.b64encode(content.body).decode() if text is None else escaped(text, but="\n\t")
    cut = len(content.body) < content.body_bytes
    return f"{shown}\n[the first {len(content.body):,} of {content.body_bytes:,} bytes]" if cut else shown


def _decoded(content: MessageContent) -> str | None:
    """Returns the body as text, without a character that was cut in two; None if it is not UTF-8."""
    is_whole = len(content.body) == content.body_bytes
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content.body, final=is_whole)
    except UnicodeDecodeError:
        return None
