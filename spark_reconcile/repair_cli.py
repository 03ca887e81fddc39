"""What `outbox reconcile run --repair` says and asks. The plan is repair's, the doing repairing's."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from messaging.errors import ConfigurationError
from spark_reconcile.repair import Action, Repair, name_unpublished, plan_repairs
from spark_reconcile.repairing import apply_repairs
from spark_reconcile.second_look import SUSPECTS_MAX
from spark_reconcile.settings import Settings
from spark_reconcile.suspects import confirmed_suspects, unconfirmed_count, unpublished_rows

SHOWN_MAX = 20


def repair(
    settings: Settings, *, since_ms: int, until_ms: int, repairs_max: int, yes: bool, dry_run: bool, folder: Path
) -> list[Repair]:
    """Show what would be done, ask, do it; returns what was done. The plan is written to repairs.jsonl in `folder`."""
    suspects = confirmed_suspects(settings.output, since_ms=since_ms, until_ms=until_ms)
    repairs = plan_repairs(settings, suspects, repairs_max=repairs_max)
    unpublished = unpublished_rows(settings.output, since_ms=since_ms, until_ms=until_ms, rows_max=repairs_max)
    repairs += name_unpublished(unpublished)
    unconfirmed = unconfirmed_count(settings.output, since_ms=since_ms, until_ms=until_ms)
    lines = "".join(f"{json.dumps(one.as_dict())}\n" for one in repairs)
    (folder / "repairs.jsonl").write_text(lines, encoding="utf-8")
    talk = Console(stderr=True, highlight=False)
    _show(talk, repairs, unconfirmed=unconfirmed)
    possible = [one for one in repairs if one.action is not Action.NOTHING]
    if dry_run or not possible:
        return []
    if not yes:
        _ask(len(possible))
    done = apply_repairs(possible)
    talk.print(f"repaired {len(done):,} of {len(possible):,}; the compensator sends them now", markup=False)
    return done


def _show(talk: Console, repairs: Sequence[Repair], *, unconfirmed: int) -> None:
    if unconfirmed:
        talk.print(
            f"{unconfirmed:,} suspects are not confirmed, so nothing is planned for them: more than {SUSPECTS_MAX:,} "
            "are not looked at again one by one. So many are no faults of single messages: check that a compensator "
            "runs (outbox compensator once --url URL --broker URL) and that no source is missing, then run it again",
            markup=False,
        )
    counts = Counter(one.action for one in repairs)
    listed = ", ".join(f"{count:,} {action}" for action, count in sorted(counts.items())) or "nothing that is confirmed"
    talk.print(f"repairs: {listed}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("what", "message", "topic", "why"):
        table.add_column(name)
    for one in repairs[:SHOWN_MAX]:
        table.add_row(one.action.value, one.message_id or f"key {one.key}", one.topic, one.reason)
    if repairs:
        talk.print(table)
    if len(repairs) > SHOWN_MAX:
        talk.print(f"... and {len(repairs) - SHOWN_MAX:,} more, in repairs.jsonl", markup=False)


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError(f"nothing was changed: say --yes to repair {count:,} message(s) without being asked")
    if not typer.confirm(f"Hand {count:,} message(s) to the compensator?", err=True):
        raise ConfigurationError("nothing was changed")
