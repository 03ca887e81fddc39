"""`outbox demo`: runs the scenario, then the reconciliation, and prints what the databases and logs say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outbox_core.common.errors import OutboxError
from outbox_demo.plan import PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER, DemoPlan
from outbox_demo.scenario import Scenario
from outbox_demo.tables import PAID

app = typer.Typer()
talk = Console(stderr=True, highlight=False, soft_wrap=True)


class ReconciliationFailed(OutboxError):
    """The reconciliation could not be run to its end."""


@app.callback(invoke_without_command=True)
def demo(
    url: Annotated[
        str | None, typer.Option("--url", help="Business database; an SQLite file in the folder by default.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where data, logs and the report go.")] = Path("demo-run"),
    bookings: Annotated[int, typer.Option("--bookings", help="How many of the 336,776 trips are booked.")] = 6_000,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the trips, and the message that is always refused.")] = 7,
) -> None:
    """Book trips while the worker and the broker are killed; then prove that nothing was lost, invented or early.

    Prints the figures, leaves an HTML report, and exits with status 1 when anything was lost, invented or early.

    Examples:

      outbox demo

      outbox demo --url mysql+pymysql://root@127.0.0.1/shop --bookings 20000
    """
    started = time.monotonic()

    def say(step: str) -> None:
        talk.print(f"[{time.monotonic() - started:6.1f} s] {step}", markup=False)

    scenario = Scenario(url=url, folder=folder, bookings=bookings, seed=seed, say=say)
    plan = scenario.run()
    say("all is settled; reconciling on Spark")
    summary = _reconcile(plan, broker_data=scenario.broker_data)
    say("done")
    _print(summary, plan)
    fatal = summary["lost"] + summary["phantom"] + summary["early"] + summary["unexplained"]
    raise typer.Exit(1 if fatal else 0)


def reconcile_toml(plan: DemoPlan, *, broker_data: Path) -> str:
    """The reconciliation's settings for this run: both messages of every paid order, and the ticketing inbox."""
    schema = f"schema = {json.dumps(plan.schema)}\n" if plan.schema else ""
    rules = "\n".join(
        f"""
[[rules]]
name = "{name}"
table = "demo_payment"
where = {{ status = "{PAID}" }}
key_column = "order_id"
time_column = "paid_at_us"
topic = "{topic}"
"""
        for name, topic in (
            ("paid orders are announced", PAYMENT_COMPLETED),
            ("travellers are reminded", TRIP_REMINDER),
        )
    )
    return f"""# Written by `outbox demo`; read by: outbox reconcile run --config <this file>

[database]
url = {json.dumps(plan.url)}
{schema}
[broker]
data = {json.dumps(str(broker_data))}
{rules}
[[inboxes]]
group = "{TICKETING}"

[grace]
seconds = 1
late_after_seconds = 60

[output]
folder = {json.dumps(str(plan.folder / "reconciliation"))}
"""


def _reconcile(plan: DemoPlan, *, broker_data: Path) -> dict[str, Any]:
    config = plan.folder / "reconcile.toml"
    config.write_text(reconcile_toml(plan, broker_data=broker_data))
    config.chmod(0o600)  # the URL may hold a password
    command = [sys.executable, "-m", "outbox", "reconcile", "run", "--config", str(config), "--json"]
    with (plan.folder / "reconcile.log").open("wb") as log:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)  # noqa: S603 - our own command
    if ended.returncode not in {0, 1} or not ended.stdout:
        raise ReconciliationFailed(f"the reconciliation failed; see {plan.folder / 'reconcile.log'}")
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


def _print(summary: dict[str, Any], plan: DemoPlan) -> None:
    rolled_back = len(plan.rolled_back_path.read_text().splitlines()) if plan.rolled_back_path.exists() else 0
    payments = sum(summary["business_verdicts"].values()) // 2  # each paid order stands under two rules
    figures = {
        "payments": payments,
        "rolled back": rolled_back,
        "messages": summary["messages"],
        "delivered": summary["delivered"],
        "redelivered": summary["redelivered"],
        "deduplicated": summary["deduplicated"],
        "dead": summary["dead"],
        "lost": summary["lost"],
        "phantom": summary["phantom"],
        "early": summary["early"],
    }
    for name, value in figures.items():
        typer.echo(f"{name:>13} {value:>9,}")
    typer.echo(summary["sentence"])
    typer.echo(f"report: {Path(summary['folder']) / 'report.html'}")
