"""Prints messages as text for people or JSON for programs. No message can send control codes to the terminal."""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox.store.withdrawals import WITHDRAWN
from outbox_core.runtime.terminal_text import escaped, utc_text

_SECOND_US: Final = 1_000_000


def print_list(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print each row on a line, with the reason why it is not sent on a line below. The terminal wraps long lines."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(dict(row)))
        return
    for row in rows:
        typer.echo("  ".join(_cells(row)))
        if row["last_error"]:
            typer.echo(f"    {escaped(row['last_error'])}")
    if not rows:
        typer.echo("no such messages")


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield escaped(row["id"])
    yield escaped(row["topic"])
    if row["key"]:
        yield f"key={escaped(row['key'])}"
    yield _state(row)
    yield f"attempts={row['attempts']}"
    yield " ".join(_due(row))


def print_message(row: Mapping[str, Any], *, with_body: bool, as_json: bool) -> None:
    """Print one message; `with_body`: with its body and the values of its headers."""
    shown = {name: value for name, value in row.items() if name not in {"body", "headers"}}
    headers = _headers(row["headers"])
    shown["headers"] = headers if with_body else sorted(headers)
    if as_json:
        typer.echo(json.dumps(shown | (_json_body(row) if with_body else {})))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _for_people({**shown, "state": _state(row)}).items():
        table.add_row(name, Text(escaped(value), overflow="fold"))
    Console().print(table)
    if with_body:
        typer.echo("")
        typer.echo(_text_body(row))


def print_sent(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the archive's rows of a message that is not pending any more: it was sent, or canceled before."""
    for row in rows:
        is_canceled = row["outcome"] == WITHDRAWN
        if as_json:
            typer.echo(json.dumps({**row, "state": "canceled" if is_canceled else "sent"}))
            continue
        name, topic, at = escaped(row["id"]), escaped(row["topic"]), utc_text(row["sent_at_us"] // 1000)
        if is_canceled:
            typer.echo(f"{name} for {topic} was canceled at {at}, before it was sent")
        else:
            typer.echo(f"{name} was sent to {topic} at {at}: {escaped(row['outcome'])}")


def _state(row: Mapping[str, Any]) -> str:
    return f"{row['state']}, in hand" if row["in_hand"] else str(row["state"])


def _due(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns `due in` or `due for`, and how long."""
    seconds = row["due_in_us"] / _SECOND_US
    return ("due in" if seconds > 0 else "due for"), f"{abs(seconds):,.1f} s"


def _for_people(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields that are not empty, with formatted times."""
    headers = row["headers"]
    due, since_or_until = _due(row)
    fields: dict[str, str | None] = {
        "id": row["id"],
        "state": row["state"],
        "kind": row["kind"],
        "table": row["table"],
        "topic": row["topic"],
        "key": row["key"],
        "attempts": str(row["attempts"]),
        "created": utc_text(row["created_at_us"] // 1000),
        due: since_or_until,
        "deliver at": utc_text(row["deliver_at_ms"]) if row["deliver_at_ms"] is not None else None,
        "order": f"{row['order_key']} number {row['order_seq']}" if row["order_key"] else None,
        "headers": json.dumps(headers, ensure_ascii=False) if isinstance(headers, dict) else ", ".join(headers),
        "body": f"{row['body_bytes']:,} bytes, SHA-256 {row['body_sha256']}",
        "last error": row["last_error"],
    }
    return {name: value for name, value in fields.items() if value}


def _headers(text: str | None) -> dict[str, Any]:
    """Returns the headers, or a substitute for headers that newer or other code has written."""
    try:
        headers = json.loads(text) if text else {}
    except ValueError:
        return {"unreadable": text}
    return headers if isinstance(headers, dict) else {"unreadable": text}


def _json_body(row: Mapping[str, Any]) -> dict[str, Any]:
    text = _decoded(row)
    body = {"body_base64": base64.b64encode(row["body"]).decode()} if text is None else {"body": text}
    return {**body, "body_is_cut": len(row["body"]) < row["body_bytes"]}


def _text_body(row: Mapping[str, Any]) -> str:
    text = _decoded(row)
    shown = base64.b64encode(row["body"]).decode() if text is None else escaped(text, but="\n\t")
    cut = len(row["body"]) < row["body_bytes"]
    return f"{shown}\n[the first {len(row['body']):,} of {row['body_bytes']:,} bytes]" if cut else shown


def _decoded(row: Mapping[str, Any]) -> str | None:
    """Returns the body as text, without a character that was cut in two; None if it is not UTF-8."""
    is_whole = len(row["body"]) == row["body_bytes"]
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(row["body"], final=is_whole)
    except UnicodeDecodeError:
        return None
