"""The output and prompts of `outbox reconcile run --repair` and `repair apply`. Package repair plans and applies."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.terminal_text import escaped
from spark_reconcile.cli.options import (
    BrokerData,
    Config,
    PasswordFile,
    Schema,
    Url,
    given_settings,
)
from spark_reconcile.core.settings import Settings
from spark_reconcile.repair.apply import apply_repairs, why_unchanged
from spark_reconcile.repair.plan import (
    Repair,
    RepairAction,
    confirmed_suspects,
    name_unpublished,
    plan_repairs,
    unconfirmed_count,
    unpublished_rows,
)

SHOWN_MAX = 20
app = typer.Typer(help="Do later what a --dry-run planned.", no_args_is_help=True)


def repair(
    settings: Settings, tables: Sequence[Path], *, repairs_max: int, yes: bool, dry_run: bool, folder: Path
) -> list[Repair]:
    """Show the planned repairs, ask, apply them; returns those applied. `tables`: the folders of the verdicts.

    The plan is written to repairs.jsonl in `folder`.
    """
    suspects = confirmed_suspects(tables)
    repairs = plan_repairs(settings, suspects, repairs_max=repairs_max)
    unpublished = unpublished_rows(tables, rows_max=repairs_max)
    repairs += name_unpublished(unpublished)
    unconfirmed = unconfirmed_count(tables)
    lines = "".join(f"{json.dumps(planned.as_dict())}\n" for planned in repairs)
    (folder / "repairs.jsonl").write_text(lines, encoding="utf-8")
    if unconfirmed:
        most = settings.limits.suspects_max
        _talk().print(
            f"{unconfirmed:,} suspects are not confirmed, so nothing is planned for them: more than {most:,} "
            "are not rechecked one by one. So many are no faults of single messages: check that a compensator "
            "runs (outbox compensator once --url URL --broker URL) and that no source is missing, then run it again",
            markup=False,
        )
    return _do(repairs, yes=yes, dry_run=dry_run)


@app.callback()
def repairs() -> None:
    """Do later what `outbox reconcile run --repair --dry-run` planned."""


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(help="The repairs.jsonl of a run with --repair --dry-run.")],
    config: Config = None, url: Url = None, password_file: PasswordFile = None, schema: Schema = None,
    broker_data: BrokerData = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what holds, and change nothing.")] = False,
    repairs_max: Annotated[
        int | None, typer.Option("--repairs-max", min=1, help="Refuse to do more than these (1000).")
    ] = None,
) -> None:  # fmt: skip
    """Apply a plan that still holds. Hands what it names back to the compensator, if all of it is as it was planned.

    Each message is looked for again: its row, its archive row, its business row, and what the broker has stored since.
    What changed is named and left. Exit status: 0 done, or nothing left to do; 2 usage; 3 a source is damaged or
    down, so nothing was changed.

    Examples:

      outbox reconcile repair apply repairs.jsonl --config repairs.toml --dry-run

      outbox reconcile repair apply repairs.jsonl --config repairs.toml --yes
    """
    from spark_reconcile.repair.plan_file import read_plan, still_to_do

    given = given_settings(
        config, url=url, schema=schema, broker_data=broker_data, password_file=password_file,
        reconcile={"repairs_max": repairs_max},
    )  # fmt: skip
    plan = read_plan(file)
    _do(still_to_do(given.run, plan, repairs_max=given.repairs_max), yes=yes, dry_run=dry_run)


def _do(repairs: Sequence[Repair], *, yes: bool, dry_run: bool) -> list[Repair]:
    """Show the repairs, ask, apply them; returns those applied."""
    talk = _talk()
    _show(talk, repairs)
    possible = [planned for planned in repairs if planned.action is not RepairAction.NOTHING]
    if dry_run or not possible:
        return []
    if not yes:
        _ask(len(possible))
    done = apply_repairs(possible)
    talk.print(f"repaired {len(done):,} of {len(possible):,}; the compensator sends them now", markup=False)
    changed = {planned.name for planned in done}
    unchanged = why_unchanged([planned for planned in possible if planned.name not in changed])
    for outcome, count in sorted(unchanged.items()):
        talk.print(f"left as they are: {count:,} {outcome}", markup=False)
    return done


def _talk() -> Console:
    return Console(stderr=True, highlight=False)


def _show(talk: Console, repairs: Sequence[Repair]) -> None:
    counts = Counter(planned.action for planned in repairs)
    listed = ", ".join(f"{count:,} {action}" for action, count in sorted(counts.items())) or "nothing that is confirmed"
    talk.print(f"repairs: {listed}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("what", "message", "topic", "why"):
        table.add_column(name)
    for planned in repairs[:SHOWN_MAX]:
        about = planned.message_id or f"key {planned.key}"
        table.add_row(*(Text(escaped(cell)) for cell in (planned.action.value, about, planned.topic, planned.reason)))
    if repairs:
        talk.print(table)
    if len(repairs) > SHOWN_MAX:
        talk.print(f"... and {len(repairs) - SHOWN_MAX:,} more in the plan", markup=False)


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError(f"nothing was changed: say --yes to repair {count:,} message(s) without being asked")
    if not typer.confirm(f"Hand {count:,} message(s) to the compensator?", err=True):
        raise ConfigurationError("nothing was changed")
