"""Commands `outbox messages list | show | retry | park | discard`: unsent messages. message_output prints them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from outbox.admin.message_admin import PAGE_MAX, AdminAction, MessageSelection, SchemaAdmin, open_schema_admin
from outbox.admin.message_output import print_archived, print_message, print_page
from outbox.cli.database_options import AsJson, PasswordFile, Schema, Url
from outbox.store.database_url import database_url
from outbox.store.schema import RowState
from outbox_core.common.errors import UsageError
from outbox_core.runtime.entry_point import EXIT_INTERRUPTED
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption

app: typer.Typer = typer.Typer(help="Show unsent messages, and decide about parked ones.", no_args_is_help=True)

BODY_BYTES_MAX: Final = 64 * 1024
ROWS_DEFAULT: Final = 100_000
ROWS_MAX: Final = 1_000_000
NOT_DISCARDED: Final = "the others are gone or not parked; `outbox messages park` sets a pending one aside first"
_AGE: Final = re.compile(r"(\d{1,9})(s|m|h|d)")
_UNIT_US: Final = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_AGE_US_MAX: Final = 100_000 * _UNIT_US["d"]

State = Annotated[RowState | None, typer.Option("--state", help="Only messages in this state.")]
Topic = Annotated[str | None, typer.Option("--topic", help="Only messages of this topic.")]
Key = Annotated[str | None, typer.Option("--key", help="Only messages of this key.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", help="Only messages published longer ago than this: 30s, 15m, 2h, 7d.")
]
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids; or --all.")]
All = Annotated[bool, typer.Option("--all", help="All that the filters leave, instead of ids.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say how many it would be, and change nothing.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=ROWS_MAX, help="With --all: at most so many.")]


@app.command("list")
def list_messages(
    url: Url,
    schema: Schema = None,
    password_file: PasswordFile = None,
    state: State = None,
    topic: Topic = None,
    key: Key = None,
    older_than: OlderThan = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=PAGE_MAX, help="So many at most.")] = 50,
    after: Annotated[
        str | None, typer.Option("--after", help="Go on behind the page that ended with this: `more: --after ...`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List unsent messages, the longest due first. Bodies are not shown; see `show --body`.

    Examples:

      outbox messages list --url sqlite:///shop.db --state parked --older-than 15m

      outbox messages list --url sqlite:///shop.db --topic payments --limit 1000 --json
    """
    selection = MessageSelection(state=state, topic=topic, key=key, older_than_us=_age_us(older_than))
    with open_schema_admin(database_url(url, password_file=password_file), schema=schema) as admin:
        page = admin.page(selection, limit=limit, after=after)
    print_page(page, as_json=as_json)


@app.command()
def show(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    url: Url,
    schema: Schema = None,
    password_file: PasswordFile = None,
    body: Annotated[
        bool, typer.Option("--body", help="Show its body too, 64 KiB at most, and what its headers say.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one message: where it stands and why it is not sent. Exit status 1 where it is not waiting.

    Example: outbox messages show 019a0c5d7b7a7c1e9d0c3f5a6b7c8d9e --url sqlite:///shop.db
    """
    with open_schema_admin(database_url(url, password_file=password_file), schema=schema) as admin:
        found = admin.show(message_id, body_bytes_max=BODY_BYTES_MAX if body else 0)
        archived = [] if found else admin.archived(message_id)
    if found is not None:
        print_message(*found, with_body=body, as_json=as_json)
        return
    print_archived(archived, as_json=as_json)
    if not archived:
        _stderr_console().print(f"no message {message_id} waits here, and the archive knows none", markup=False)
    raise typer.Exit(1)


@app.command()
def retry(
    url: Url, ids: Ids = None, schema: Schema = None, password_file: PasswordFile = None, all_: All = False,
    state: State = None, topic: Topic = None, key: Key = None, older_than: OlderThan = None,
    limit: Limit = ROWS_DEFAULT, yes: Yes = False, dry_run: DryRun = False, as_json: AsJson = False,
    progress: ProgressOption = ProgressForm.AUTO,
) -> None:  # fmt: skip
    """Make messages due now; parked ones are taken up again. With --all: parked ones, unless --state says otherwise.

    Example: outbox messages retry --url sqlite:///shop.db --all --topic payments --dry-run
    """
    selection = MessageSelection(state=state, topic=topic, key=key, older_than_us=_age_us(older_than))
    with open_schema_admin(database_url(url, password_file=password_file), schema=schema) as admin:
        ids_by_table = _select_ids(admin, AdminAction.RETRY, selection, ids=ids, all_=all_, limit=limit)
        _change(
            admin, AdminAction.RETRY, ids_by_table, ids=ids, yes=yes or not all_, dry_run=dry_run, as_json=as_json,
            form=progress,
        )  # fmt: skip


@app.command()
def park(
    url: Url, ids: Ids = None, schema: Schema = None, password_file: PasswordFile = None, all_: All = False,
    state: State = None, topic: Topic = None, key: Key = None, older_than: OlderThan = None,
    limit: Limit = ROWS_DEFAULT, yes: Yes = False, dry_run: DryRun = False, as_json: AsJson = False,
    progress: ProgressOption = ProgressForm.AUTO,
) -> None:  # fmt: skip
    """Set messages aside: nothing sends them until `retry`. Those that are just being sent are left alone.

    Example: outbox messages park --url sqlite:///shop.db --all --topic payments
    """
    selection = MessageSelection(state=state, topic=topic, key=key, older_than_us=_age_us(older_than))
    with open_schema_admin(database_url(url, password_file=password_file), schema=schema) as admin:
        ids_by_table = _select_ids(admin, AdminAction.PARK, selection, ids=ids, all_=all_, limit=limit)
        _change(
            admin, AdminAction.PARK, ids_by_table, ids=ids, yes=yes or not all_, dry_run=dry_run, as_json=as_json,
            form=progress,
        )  # fmt: skip


@app.command()
def discard(
    url: Url, ids: Ids = None, schema: Schema = None, password_file: PasswordFile = None, all_: All = False,
    state: State = None, topic: Topic = None, key: Key = None, older_than: OlderThan = None,
    limit: Limit = ROWS_DEFAULT, yes: Yes = False, dry_run: DryRun = False, as_json: AsJson = False,
    progress: ProgressOption = ProgressForm.AUTO,
) -> None:  # fmt: skip
    """Delete parked messages for good. Only parked ones: what might still be sent is not deleted.

    The archive keeps a row of each, without its body: `show` and a reconciliation call it discarded, and not lost.

    Example: outbox messages discard --url sqlite:///shop.db --all --topic payments --older-than 7d
    """
    selection = MessageSelection(state=state, topic=topic, key=key, older_than_us=_age_us(older_than))
    with open_schema_admin(database_url(url, password_file=password_file), schema=schema) as admin:
        ids_by_table = _select_ids(admin, AdminAction.DISCARD, selection, ids=ids, all_=all_, limit=limit)
        _change(
            admin, AdminAction.DISCARD, ids_by_table, ids=ids, yes=yes, dry_run=dry_run, as_json=as_json, form=progress
        )


def _select_ids(
    admin: SchemaAdmin,
    action: AdminAction,
    selection: MessageSelection,
    *,
    ids: Sequence[str] | None,
    all_: bool,
    limit: int,
) -> dict[str, list[str]]:
    """Returns the selected rows by table. Raises UsageError if the selection is ambiguous or missing."""
    filtered = selection != MessageSelection()
    if bool(ids) == all_ or (ids and filtered):
        raise UsageError("name either ids, or --all and perhaps filters (--state, --topic, --key, --older-than)")
    if ids:
        return admin.locate(ids)
    ordinary = RowState.PENDING if action is AdminAction.PARK else RowState.PARKED
    state = selection.state or ordinary
    if state is not ordinary and action is not AdminAction.RETRY:
        raise UsageError(f"`{action}` is for {ordinary} messages")
    in_state = MessageSelection(
        state=state, topic=selection.topic, key=selection.key, older_than_us=selection.older_than_us
    )
    ids_by_table = admin.find(in_state, action=action, rows_max=limit)
    if _count(ids_by_table) == limit:
        _stderr_console().print(f"there may be more than these {limit:,}; run it again for the rest", markup=False)
    return ids_by_table


def _change(
    admin: SchemaAdmin, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]], *, ids: Sequence[str] | None,
    yes: bool, dry_run: bool, as_json: bool, form: ProgressForm,
) -> None:  # fmt: skip
    """Confirm, apply and report the change; exit status 1 if an id could not be changed."""
    requested = len(set(ids)) if ids else _count(ids_by_table)
    if dry_run:
        would_change = admin.count_allowed(action, ids_by_table)
        _report(action, requested=requested, changed=0, would_change=would_change, as_json=as_json)
        raise typer.Exit(1 if ids and would_change < requested else 0)
    if not yes:
        _confirm(action, admin.count_allowed(action, ids_by_table))
    changed, is_complete = _do(admin, action, ids_by_table, form=form)
    _report(action, requested=requested, changed=changed, would_change=None, as_json=as_json)
    if action is AdminAction.DISCARD and changed < requested:
        _stderr_console().print(NOT_DISCARDED, markup=False, highlight=False, soft_wrap=True)
    if not is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(1 if ids and changed < requested else 0)


def _do(
    admin: SchemaAdmin, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]], *, form: ProgressForm
) -> tuple[int, bool]:
    """Applies the action; returns how many rows were changed, and whether all batches ran. Batches are atomic."""
    changed, tried, total = 0, 0, _count(ids_by_table)
    with Progress(action.value, form=form, steady=True) as progress:

        def show(batch_rows: int) -> None:
            nonlocal tried
            tried += batch_rows
            progress.update(tried, total)

        try:
            for batch_changed in admin.change(action, ids_by_table, after_batch=show):
                changed += batch_changed
        except KeyboardInterrupt:
            return changed, False
    return changed, True


def _confirm(action: AdminAction, count: int) -> None:
    """Ask before rows are changed; if there are none, there is nothing to ask."""
    if not count:
        return
    questions = {
        AdminAction.RETRY: f"Send {count:,} message(s) again?",
        AdminAction.PARK: f"Set {count:,} message(s) aside?",
        AdminAction.DISCARD: f"Delete {count:,} message(s)? They will never be sent.",
    }
    if not sys.stdin.isatty():
        raise UsageError(f"nothing was changed: say --yes to {action} {count:,} message(s) without being asked")
    if not typer.confirm(questions[action], err=True):
        raise UsageError("nothing was changed")


def _report(action: AdminAction, *, requested: int, changed: int, would_change: int | None, as_json: bool) -> None:
    if as_json:
        figures = {"action": action.value, "asked": requested, "changed": changed}
        typer.echo(json.dumps(figures if would_change is None else {**figures, "would_change": would_change}))
    elif would_change is None:
        typer.echo(f"{action}: {changed:,} of {requested:,}")
    else:
        typer.echo(f"would {action}: {would_change:,} of {requested:,}")


def _age_us(text: str | None) -> int | None:
    if text is None:
        return None
    matched = _AGE.fullmatch(text)
    if matched is None:
        raise UsageError(f"an age is a number and one of s, m, h, d, like 15m, not {text!r}")
    age_us = int(matched[1]) * _UNIT_US[matched[2]]
    if age_us > _AGE_US_MAX:  # beyond it the databases' integers end
        raise UsageError(f"an age is at most {_AGE_US_MAX // _UNIT_US['d']:,}d, not {text}")
    return age_us


def _count(ids_by_table: Mapping[str, Sequence[str]]) -> int:
    return sum(len(ids) for ids in ids_by_table.values())


def _stderr_console() -> Console:
    return Console(stderr=True)
