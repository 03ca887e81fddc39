"""The commands `outbox broker dead`: what operators do with dead letters, by AdminClient; those that Redis timers know,
through their adapter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from broker_adapter.http.admin_client import DEAD_PAGE_MAX, AdminClient
from broker_adapter.http.shared_cli import (
    AsJson,
    Connection,
    Group,
    Limit,
    Topic,
    Yes,
    confirm,
    connected,
    headers_of,
    poll,
    print_done,
    print_json,
    print_table,
    read_file,
)
from outbox_core.common.errors import DECODE_ERRORS, BrokerRefused, UsageError
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import DeadEdit, DeadFilter, DeadLetter, EditResult, EditStatus
from outbox_core.protocol.wire import JsonLetterEdit
from outbox_core.protocol.wire_conversion import dead_edit_of, json_dead_letter
from outbox_core.runtime.entry_point import EXIT_INTERRUPTED
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import escaped, utc_text

app: Final = typer.Typer(no_args_is_help=True, help="List, show, redrive, edit and discard dead letters.")
_NO_ID: Final = "(damaged)"


@app.command("list")
@connected
def list_dead(
    connection: Connection,
    topic: Topic,
    group: Group,
    limit: Limit = 20,
    after: Annotated[str | None, typer.Option(help="Go on behind the page that named this.")] = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first.

    Attempts, when, the last reason, and how the attempts went; JSON has what the messages carry, too.

    Example: outbox broker dead list orders billing --limit 50
    """
    with connection.admin() as admin:
        letters, following = admin.dead(topic, group, limit=limit, after=after)
    if as_json:
        print_json({"dead": [json_dead_letter(letter) for letter in letters], "next": following})
    else:
        _print_dead(letters, following=following)


@app.command("show")
@connected
def show_dead(
    connection: Connection, topic: Topic, group: Group, message_id: Annotated[str, typer.Argument(help="Its id.")]
) -> None:
    """Print one dead letter as JSON.

    With its headers and body. Exits with 1 if there is none of this id.

    Example: outbox broker dead show orders billing order-17
    """
    with connection.admin() as admin:
        after, seen = None, set[str]()
        while True:
            if after is not None:
                seen.add(after)
            letters, after = admin.dead(topic, group, limit=DEAD_PAGE_MAX, after=after)
            for letter in letters:
                if letter.id == message_id:
                    print_json(json_dead_letter(letter))
                    return
            if after is None or after in seen:
                raise BrokerRefused(f"{topic}/{group} has no dead letter of the id {message_id}")


@app.command("redrive")
@connected
def redrive(
    connection: Connection,
    topic: Topic,
    group: Group,
    message_id: Annotated[
        list[str] | None, typer.Option("--id", help="A dead letter's id; may be repeated (all).")
    ] = None,
    per_second: Annotated[
        int | None, typer.Option("--per-second", "--rate", help="How many are ready each second.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all are ready; Ctrl-C stops the redrive.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop redrives of the group: what waits for its second is dead again.")
    ] = False,
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: AsJson = False,
) -> None:
    """Deliver dead letters again.

    All, or those that are named; their attempts are counted afresh. With --wait it says every two seconds how many are
    ready, and how many wait. A redrive that is stopped leaves what waits among the dead letters, as it was; what is
    ready, or was delivered, stays so. The broker's log keeps who stopped it, and when.
    Exits with 1 if one of the ids is no dead letter's.

    Examples:

      outbox broker dead redrive orders billing --rate 100 --wait

      outbox broker dead redrive orders billing --stop

      outbox broker dead redrive orders billing --id order-17 --id order-18
    """
    if stop:
        if message_id or per_second is not None or wait:
            raise UsageError("--stop is for all redrives of the group: give no --id, --rate or --wait with it")
        _stop_redrive(connection.client(), topic, group, as_json=as_json)
        return
    if not wait:
        with connection.admin() as admin:
            redriven = admin.redrive(topic, group, ids=message_id or None, per_second=per_second)
    else:
        client = connection.client()
        try:
            redriven = client.redrive(topic, group, ids=message_id or None, per_second=per_second)
            _wait_for_redrive(client, topic, group, redriven=redriven, form=progress)
        except KeyboardInterrupt:
            _stop_redrive(client, topic, group, as_json=as_json)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    print_done({"redriven": redriven}, f"{redriven} redriven", as_json=as_json)
    _exit_unless_all(redriven, message_id)


def _stop_redrive(client: AdminClient, topic: str, group: str, *, as_json: bool) -> None:
    stopped = client.stop_redrive(topic, group)
    print_done({"stopped": stopped}, f"stopped: {stopped} are dead letters again", as_json=as_json)


def _wait_for_redrive(client: AdminClient, topic: str, group: str, *, redriven: int, form: ProgressForm) -> None:
    """Wait until nothing of a group waits for a redrive's rate; an earlier redrive goes first."""
    total = redriven
    with Progress("redrive", form=form) as progress:

        def show(figures: Mapping[str, int]) -> None:
            nonlocal total
            waiting = figures["redriving"]
            total = max(total, waiting)
            progress.update(
                total - waiting, total, left_ms=figures["redrive_left_ms"], note=f"{waiting:,} wait for their second",
                figures={"waiting": waiting},
            )  # fmt: skip

        poll(lambda: client.figures(topic, group), is_done=lambda figures: not figures["redriving"], shows=show)


Why = Annotated[str, typer.Option(help="The reason, which the broker's log keeps.")]
LetterIds = Annotated[list[str] | None, typer.Option("--id", help="A dead letter's id; may be repeated.")]
Reason = Annotated[str | None, typer.Option(help="Those whose last reason contains this.")]
Key = Annotated[str | None, typer.Option(help="Those with this key.")]
FromMs = Annotated[int | None, typer.Option(min=0, help="Of those: dead at this time or later, ms.")]
ToMs = Annotated[int | None, typer.Option(min=0, help="Of those: dead before this time, ms.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the group.")]


@app.command("discard")
@connected
def discard(
    connection: Connection,
    topic: Topic,
    group: Group,
    why: Annotated[str, typer.Option(help="The reason, which the broker's log keeps; needed but to count.")] = "",
    message_id: LetterIds = None,
    reason: Reason = None,
    key: Key = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Those with NAME=VALUE; may be repeated: all of them.")
    ] = None,
    from_ms: FromMs = None,
    to_ms: ToMs = None,
    all_: All = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count them, and discard none.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters for good.

    Says how many before it asks, and takes no more than those. The group never gets them again, and their room on the
    disk is free; other groups keep theirs. The broker's log keeps who, when and why; the reconciliation calls them
    discarded. Exits with 1 if one of the ids is no dead letter's.

    Examples:

      outbox broker dead discard orders billing --id order-17 --why "paid by hand, ticket 4711"

      outbox broker dead discard orders billing --reason "no such customer" --dry-run

      outbox broker dead discard orders billing --all --why "a load test's" --yes
    """
    where = _dead_filter(reason=reason, key=key, headers=headers_of(header or ()), from_ms=from_ms, to_ms=to_ms)
    _require_one_way(message_id, where, is_all=all_)
    if not why and not dry_run:
        raise UsageError("say --why: the broker's log keeps the reason")
    client, ids, before_ms = connection.client(), message_id or None, None
    if dry_run or not yes:
        counted = client.count_dead(topic, group, ids=ids, where=where)
        before_ms = counted.dead_before_ms
        text = f"{counted.count} dead letters of {topic}/{group}"
        if dry_run:
            outcome = {"topic": topic, "group": group, "would_discard": counted.count}
            print_done(outcome, f"would discard {text}", as_json=as_json)
            _exit_unless_all(counted.count, message_id)
            return
        confirm(f"Discard {text} for good?")
    count = client.discard(topic, group, ids=ids, where=where, dead_before_ms=before_ms, why=why)
    print_done({"topic": topic, "group": group, "discarded": count}, f"{count} discarded", as_json=as_json)
    _exit_unless_all(count, message_id)


class _LetterLine(JsonLetterEdit, frozen=True, kw_only=True):
    """A line of `--from`: an edit, or a dead letter as `dead list --json` prints it, changed by hand. What follows is
    of the latter, and stays as it is.
    """

    topic: str = ""
    group: str = ""
    key: str | None = None
    attempts: int = 0
    reason: str = ""
    dead_at_ms: int = 0
    history: Sequence[Any] = ()


Body = Annotated[str | None, typer.Option(help="The new body of one --id, as text.")]
BodyFile = Annotated[Path | None, typer.Option(help="A file with the new body of one --id.")]
SetHeader = Annotated[list[str] | None, typer.Option(help="Set NAME=VALUE; may be repeated.")]
RemoveHeader = Annotated[list[str] | None, typer.Option(help="Remove this header; may be repeated.")]
From = Annotated[Path | None, typer.Option("--from", help="A file of JSON lines, an edit each.")]
WithHeader = Annotated[list[str] | None, typer.Option(help="Those with NAME=VALUE; may be repeated: all of them.")]


@app.command()
@connected
def edit(
    connection: Connection, topic: Topic, group: Group, why: Why, message_id: LetterIds = None, body: Body = None,
    body_file: BodyFile = None, header: SetHeader = None, remove_header: RemoveHeader = None, from_: From = None,
    reason: Reason = None, key: Key = None, with_header: WithHeader = None, from_ms: FromMs = None,
    to_ms: ToMs = None, all_: All = False, yes: Yes = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Change dead letters, and deliver them to their group at once.

    Says how many before it asks. Each gets another id, so that an inbox takes it as new, and the former one as the
    header outbox-edited-from; topic, key and all that is not named stay. The group in which it died gets it, and no
    other group. The broker's log keeps who, when and why. Exits with 1 if one is refused, or one of the ids is no dead
    letter's.

    A line of --from has an id and body, encoding (utf8, base64), headers (to be set) or remove_headers, or is a dead
    letter as list --json prints it. Where an answer is lost, run it again: what is edited is not dead, and passed over.

    Examples:

      outbox broker dead edit orders billing --id order-17 --body '{"order_id": 17}' --why "typo, ticket 4711"

      outbox broker dead edit orders billing --reason "no region" --header region=eu --why "region was missing"

      outbox broker dead list orders billing --json | jq -c '.dead[]' > letters.jsonl

      outbox broker dead edit orders billing --from letters.jsonl --why "amounts mended" --yes
    """
    where = _dead_filter(
        reason=reason, key=key, headers=headers_of(with_header or ()), from_ms=from_ms, to_ms=to_ms
    )  # fmt: skip
    change = _change(body=body, body_file=body_file, header=header, remove_header=remove_header)
    _require_one_edit(message_id, where, from_, change, is_all=all_)
    client, ids = connection.client(), message_id or None
    if from_ is not None:
        ids = [line.id for line in _letter_lines(from_)]
    # Also without a question: of a filter, what is edited may be dead again before the last page is reached.
    before_ms = _ask_before(client, topic, group, ids=ids, where=where, yes=yes)
    if from_ is not None:
        results = _edit_lines(client, topic, group, from_, why=why)
    elif change is not None and ids is not None:
        results = iter(client.edit(topic, group, dict.fromkeys(ids, change), why=why))
    elif change is not None:
        results = client.edit_many(topic, group, change, where=where, dead_before_ms=before_ms, why=why)
    _print_edited(topic, group, results, as_json=as_json)


def _require_one_edit(
    ids: Sequence[str] | None, where: DeadFilter | None, path: Path | None, change: DeadEdit | None, *, is_all: bool
) -> None:
    if [bool(ids), where is not None, is_all, path is not None].count(True) != 1:
        raise UsageError("say which: --id, or --reason, --key and --with-header, or --all, or --from")
    if (path is None) != (change is not None):
        raise UsageError(
            "say what to change: --body, --body-file, --header or --remove-header; with --from, its lines do"
        )
    if change is not None and change.body is not None and len(set(ids or ())) != 1:
        raise UsageError("--body and --body-file are for one --id; with --from each has its own")


def _change(
    *, body: str | None, body_file: Path | None, header: Sequence[str] | None, remove_header: Sequence[str] | None
) -> DeadEdit | None:
    """Returns what these options change; None if it is nothing."""
    if body is not None and body_file is not None:
        raise UsageError("the body is given by --body or by --body-file, not by both")
    if body is None and body_file is None and not header and not remove_header:
        return None
    content = None if body is None else body.encode()
    if body_file is not None:
        content = read_file(body_file)
    return DeadEdit(body=content, headers=headers_of(header or ()), remove_headers=tuple(remove_header or ()))


def _ask_before(
    client: AdminClient, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None,
    yes: bool,
) -> int:  # fmt: skip
    """Say how many will be edited, and ask; returns until when they died."""
    counted = client.count_dead(topic, group, ids=ids, where=where)
    if not yes:
        confirm(f"Edit {counted.count} dead letters of {topic}/{group}, and deliver them to {group} alone?")
    return counted.dead_before_ms


def _letter_lines(path: Path) -> Iterator[_LetterLine]:
    """Yields the lines of a file, one after the other. Raises UsageError at one that is none."""
    decoder = msgspec.json.Decoder(_LetterLine)
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except DECODE_ERRORS as error:
                    raise UsageError(f"line {line_number} of {path} is no edit: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _edit_lines(client: AdminClient, topic: str, group: str, path: Path, *, why: str) -> Iterator[EditResult]:
    all_lines = _letter_lines(path)
    while lines := list(islice(all_lines, BATCH_MESSAGES_MAX)):
        yield from client.edit(topic, group, {line.id: dead_edit_of(line) for line in lines}, why=why)


def _print_edited(topic: str, group: str, results: Iterator[EditResult], *, as_json: bool) -> None:
    """Print what became of each; exits with 1 unless all were edited."""
    edited: list[EditResult] = []
    count = total = 0
    for result in results:
        total += 1
        count += result.status is EditStatus.EDITED
        if as_json:
            edited.append(result)
        else:
            print(
                "\t".join(
                    escaped(text) for text in (result.id, result.new_id or "-", result.status, result.error) if text
                )
            )
    outcome = {"topic": topic, "group": group, "edited": count, "results": edited}
    print_done(outcome, f"{count} edited", as_json=as_json)
    if count < total:
        raise typer.Exit(1)


def _require_one_way(message_ids: Sequence[str] | None, where: DeadFilter | None, *, is_all: bool) -> None:
    if [bool(message_ids), where is not None, is_all].count(True) != 1:
        raise UsageError("say which: --id, or --reason, --key and --header, or --all")


def _exit_unless_all(count: int, named: Sequence[str] | None) -> None:
    """Exit with 1 where fewer dead letters were there than were named; one that died twice counts twice."""
    if named and count < len(set(named)):
        print("of the other ids this group has no dead letters", file=sys.stderr)
        raise typer.Exit(1)


def _dead_filter(
    *, reason: str | None, key: str | None, headers: dict[str, str], from_ms: int | None, to_ms: int | None
) -> DeadFilter | None:
    """Returns what these options choose; None if there is none of them."""
    where = DeadFilter(reason=reason or None, key=key or None, headers=headers or None, from_ms=from_ms, to_ms=to_ms)
    return None if where == DeadFilter() else where


def _print_dead(letters: Sequence[DeadLetter], *, following: str | None) -> None:
    """Print a page of dead letters, and the option for the next one."""
    if not letters:
        print("no dead letters", file=sys.stderr)
        return
    rows = [
        [
            Text(escaped(letter.id) or _NO_ID), Text(str(letter.attempts)), Text(utc_text(letter.dead_at_ms)),
            Text(escaped(letter.reason)),
            Text("\n".join(f"{attempts} x {escaped(reason)}" for reason, attempts in letter.history)),
        ]
        for letter in letters
    ]  # fmt: skip
    print_table(["id", "attempts", "when", "reason", "how they went"], rows)
    if following is not None:
        print(f"more: --after {escaped(following)}")
