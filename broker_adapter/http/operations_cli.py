"""The commands of `outbox broker` on a broker as a whole: cordon, uncordon, status, drain; export, import; backup."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.metadata import (
    ImportStep,
    MetadataDocument,
    PositionPolicy,
    RecurringStep,
    StepKind,
    apply_recurring,
    apply_step,
    export_recurring,
    export_topics,
    parse_document,
    plan_import,
    plan_recurring,
)
from broker_adapter.http.shared_cli import (
    AsJson,
    Connection,
    Yes,
    confirm,
    connected,
    poll,
    print_done,
    print_json,
    print_lines,
    print_table,
    read_file,
)
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import UsageError
from outbox_core.protocol.wire import StatusAnswer
from outbox_core.runtime.durations_and_sizes import parse_duration_ms, parse_size_bytes
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import escaped, utc_text

_BACKUP_RATE: Final = "16MiB"
"""Half of that at which publishers, and what falls due, stayed within a tenth of what they were (decision 125)."""
app: Final = typer.Typer(no_args_is_help=True, help="Cordon and drain a broker.")


@app.command()
@connected
def cordon(
    connection: Connection,
    reason: Annotated[str, typer.Option(help="Why; shown by status, and to publishers.")] = "",
    as_json: AsJson = False,
) -> None:
    """Have the broker take no new messages.

    Publishes are refused, scheduled ones too, and stay in their outboxes; deliveries, acknowledgements and what falls
    due go on. It outlasts a restart.

    Examples:

      outbox broker cordon --reason "moving to another machine"

      outbox broker cordon --url http://10.0.0.5:7788 --json
    """
    connection.client().cordon(reason=reason)
    print_done({"cordoned": True, "reason": reason}, "cordoned: no new messages are taken", as_json=as_json)


@app.command()
@connected
def uncordon(connection: Connection, as_json: AsJson = False) -> None:
    """Have the broker take new messages again.

    Example: outbox broker uncordon
    """
    connection.client().uncordon()
    print_done({"cordoned": False}, "uncordoned: new messages are taken", as_json=as_json)


@app.command()
@connected
def status(connection: Connection, as_json: AsJson = False) -> None:
    """Say whether new messages are taken, and what is left.

    Of all topics, then by topic and group: what is ready, in flight and scheduled, and dead letters.

    Examples:

      outbox broker status

      outbox broker status --json
    """
    client = connection.client()
    answer = client.status()
    topics, following = list(answer.topics), answer.next
    while following is not None:
        page = client.status(after=following)
        topics += page.topics
        following = page.next
    if as_json:
        print_json(msgspec.structs.replace(answer, topics=topics, next=None))
        return
    if answer.cordon is None:
        print("takes new messages")
    else:
        reason = f": {escaped(answer.cordon.reason)}" if answer.cordon.reason else ""
        print(f"cordoned since {utc_text(answer.cordon.since_ms)}{reason}")
    print("drained" if answer.drained else f"left: {_left_text(answer)}")
    rows = [
        [Text(escaped(topic.topic)), Text(escaped(name)), *(Text(str(count)) for count in counts)]
        for topic in topics
        for name, *counts in [
            *([("", "", "", topic.scheduled, "")] if topic.scheduled else []),
            *((group.group, group.ready, group.in_flight, "", group.dead) for group in topic.groups),
        ]
    ]
    if rows:
        print_table(["topic", "group", "ready", "in_flight", "scheduled", "dead"], rows)


@app.command()
@connected
def drain(
    connection: Connection,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing is left.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Wait so long at most, as 90s or 10m (without end).")] = None,
    reason: Annotated[str, typer.Option(help="Why; shown by status, and to publishers.")] = "",
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: AsJson = False,
) -> None:
    """Cordon the broker, and say when nothing is left.

    Drained is what has nothing ready, in flight or scheduled; dead letters stay, and are counted. Says every two
    seconds what is left. Exits with 0 if the broker is drained, with 1 if it is not, or not in time; it stays cordoned.

    Examples:

      outbox broker drain --wait --timeout 10m

      outbox broker drain --json
    """
    client = connection.client()
    timeout_ms = None if timeout is None else _duration_ms(timeout)
    client.cordon(reason=reason)
    answer = _drained(client, timeout_ms=timeout_ms, form=progress) if wait else client.status(limit=1)
    outcome = {
        "drained": answer.drained, "ready": answer.ready, "in_flight": answer.in_flight,
        "scheduled": answer.scheduled, "dead": answer.dead,
    }  # fmt: skip
    text = f"drained; {answer.dead} dead letters stay" if answer.drained else f"not drained: {_left_text(answer)}"
    print_done(outcome, text, as_json=as_json)
    if not answer.drained:
        raise typer.Exit(1)


@app.command("export")
@connected
def export_metadata(
    connection: Connection,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file (standard output).")] = None,
    as_json: AsJson = False,
) -> None:
    """Write groups, settings and positions as JSON.

    One document of topics and groups with their filters and settings, where each group is, and recurring messages.

    Of the topics that the token covers. With the role consume it notes by which messages positions are recognised.
    Messages, dead letters, what is scheduled and tokens are not in it.

    Examples:

      outbox broker export --output metadata.json

      outbox broker export --url http://10.0.0.5:7788 > metadata.json
    """
    client = connection.client()
    document = MetadataDocument(
        exported_at_ms=time.time_ns() // 1_000_000,
        source=client.shown_url,
        topics=list(export_topics(client)),
        recurring=list(export_recurring(client)),
    )
    if output is None:
        print_json(document)
        return
    unfinished = output.parent / f"{output.name}.new"
    try:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        unfinished.replace(output)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    topics, groups = len(document.topics), sum(len(topic.groups) for topic in document.topics)
    recurring = len(document.recurring)
    print_done(
        {"file": str(output), "topics": topics, "groups": groups, "recurring": recurring},
        f"{topics} topics with {groups} consumer groups and {recurring} recurring messages written to {output}",
        as_json=as_json,
    )


@app.command("import")
@connected
def import_metadata(
    connection: Connection,
    document: Annotated[Path, typer.Argument(help="The file that export wrote.")],
    positions: Annotated[
        PositionPolicy, typer.Option(help="Where groups begin that are made: earliest skips no message.")
    ] = PositionPolicy.EARLIEST,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Change groups that have other settings.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the consumer groups of an exported document.

    And its recurring messages: pause those of the other broker, if it goes on. Says what it will do. A group that is
    there is kept with its position; if its settings differ, nothing is done, unless --overwrite changes them. Repeated,
    it finishes what was cut, and does nothing more.

    Examples:

      outbox broker import metadata.json

      outbox broker import metadata.json --positions copy-where-contents-match --yes
    """
    client = connection.client()
    metadata = parse_document(read_file(document))
    steps = plan_import(client, metadata, policy=positions, overwrite=overwrite)
    recurring = plan_recurring(client, metadata, overwrite=overwrite)
    all_steps: list[ImportStep | RecurringStep] = [*steps, *recurring]
    if not as_json:
        texts = (escaped(step.text) for step in all_steps)
        print_lines(texts, none="the document has no consumer groups and no recurring messages")
    counts = Counter(step.kind for step in all_steps)
    changing = counts.total() - counts[StepKind.KEEP]
    if changing and not yes:
        confirm(f"Make or change {changing} consumer groups and recurring messages?")
    for step in steps:
        apply_step(client, step)
    for recurring_step in recurring:
        apply_recurring(client, recurring_step)
    made, changed, kept = counts[StepKind.MAKE], counts[StepKind.CHANGE], counts[StepKind.KEEP]
    outcome: dict[str, object] = {"made": made, "changed": changed, "kept": kept}
    if as_json:
        outcome["steps"] = [
            {"kind": step.kind, "topic": step.topic, "group": step.group, "text": step.text} for step in steps
        ]
        outcome["recurring"] = [{"kind": step.kind, "name": step.name, "text": step.text} for step in recurring]
    print_done(outcome, f"{made} made, {changed} changed, {kept} kept as they were", as_json=as_json)


@app.command()
@connected
def backup(
    connection: Connection,
    data: Annotated[Path, typer.Argument(help="The data folder of a broker or a delay service.")],
    to: Annotated[Path, typer.Option("--to", help="The folder of the backup: made, empty, or an earlier one's.")],
    rate: Annotated[str, typer.Option(help="Copy so much a second, as 64MiB; max: as fast as it goes.")] = _BACKUP_RATE,
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: AsJson = False,
) -> None:
    """Back up a data folder, also of a running broker.

    It runs beside the broker, as its user. If one runs on the folder, it is asked at --url, with the role admin, to
    have the folder's files of one moment stand still, and goes on meanwhile.

    Bodies of messages are in it. Into the folder of an earlier backup it copies only what is new, and takes its place
    at the end: killed anywhere, it leaves the earlier one.

    Examples:

      outbox broker backup /var/lib/broker --to /mnt/backup/broker --url http://127.0.0.1:7788

      outbox broker backup ./broker-data --to ./backup --rate max --json
    """
    from outbox_broker.backup.backup import BackupTarget
    from outbox_broker.log.storage import DiskStorage

    target = BackupTarget(to, storage=DiskStorage(), clock=SystemClock(), bytes_per_second=_bytes_per_second(rate))
    with Progress("backup", form=progress, steady=True) as shown:
        taken = target.take(data, ask=connection.client().snapshot, shows=shown.update)
    print_done(
        {"backup": str(to), **asdict(taken)},
        f"the backup of {utc_text(taken.at_ms)} is in {to}: {taken.files} files, {taken.size_bytes:,} bytes, of which "
        f"{taken.copied_bytes:,} were copied; bodies of messages are in it",
        as_json=as_json,
    )


def _drained(client: AdminClient, *, timeout_ms: int | None, form: ProgressForm) -> StatusAnswer:
    """Wait until nothing is left or the time is up; returns the last answer."""
    most = 0
    with Progress("drain", form=form) as progress:

        def show(answer: StatusAnswer) -> None:
            nonlocal most
            left = answer.ready + answer.in_flight + answer.scheduled
            most = max(most, left)
            figures = {name: getattr(answer, name) for name in ("ready", "in_flight", "scheduled", "dead")}
            progress.update(most - left, most, note=f"left: {_left_text(answer)}", figures=figures)

        return poll(
            lambda: client.status(limit=1), is_done=lambda answer: answer.drained, shows=show, timeout_ms=timeout_ms
        )


def _left_text(answer: StatusAnswer) -> str:
    return (
        f"{answer.ready} ready, {answer.in_flight} in flight, {answer.scheduled} scheduled; {answer.dead} dead letters"
    )


def _bytes_per_second(text: str) -> int | None:
    """Returns the bytes of a rate; None is as fast as it goes."""
    if text == "max":
        return None
    try:
        bytes_per_second = parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(f"--rate: {error}, or max") from error
    if bytes_per_second < 1:
        raise UsageError("--rate: at least 1B, or max")
    return bytes_per_second


def _duration_ms(text: str) -> int:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
