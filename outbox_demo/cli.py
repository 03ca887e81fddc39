"""The command `outbox demo`: runs the scenario, then the proof, and prints its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from outbox_core.common.errors import OutboxError
from outbox_core.common.private_files import write_private
from outbox_core.runtime.progress import ProgressForm, ProgressOption
from outbox_demo.demo_progress import DemoProgress
from outbox_demo.flight_data_loader import FLIGHTS
from outbox_demo.foreign_broker import ForeignBroker
from outbox_demo.foreign_client_port import ENGINES
from outbox_demo.open_delay_engine import open_delay_engine
from outbox_demo.own_broker import OwnBroker
from outbox_demo.plan import PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER, DemoPlan, RunTopics
from outbox_demo.processes import ProcessGroup
from outbox_demo.proof import compare_run
from outbox_demo.scenario import Scenario, fresh_folder
from outbox_demo.tables import PAID

NAMED_MAX: Final = 20
"""How many of the things that are wrong are printed; all are counted."""
PROVEN: Final = "Nothing was lost, invented, doubled or early, and nothing that was canceled came."

HELP: Final = """Kill the worker and the broker, and prove nothing was lost.

Book trips while both are killed; then prove that nothing was lost, invented or early.

Prints the figures, leaves an HTML report, and exits with status 1 when anything was lost, invented or early.

With --broker the messages go to topics of the run's own on that broker, through a delay service that is killed in
its place, and so is a consumer, which reads by the broker's own client. The proof compares the payments with the
archive, the consumers' inboxes and their effects, without Spark. The topics are removed at the end.

With --delay trips are canceled and moved, too, and their reminders wait in another engine. redis: starts a Redis
for the timing store of the outbox (redis+cluster: six of them), empties it in the middle, and kills it with a
worker; of a Redis that you name only the run's keys are removed. bookkeeper: starts a ZooKeeper, four bookies and
two nodes of a delay cluster, kills a bookie and a node that owns shards, and has a session with ZooKeeper expire;
of servers that you name none is killed, and the run's cluster is removed from them. It needs Java 17, and the
wheel of BookKeeper's jars or an installation of BookKeeper, whose jars OUTBOX_BOOKKEEPER_JARS names. The proof then
says that each reminder was delivered once, canceled, or still waits. The messages go to a broker of our own, or to
that of --broker.

Examples:

  outbox demo

  outbox demo --url mysql+pymysql://root@127.0.0.1/shop --bookings 20000

  outbox demo --broker redis://127.0.0.1:6379 --json

  outbox demo --broker redis+cluster://n1:6379,n2:6379/?wait=1

  outbox demo --broker rabbitmq://app:secret@mq1/shop

  outbox demo --delay redis:

  outbox demo --delay bookkeeper:

  OUTBOX_BOOKKEEPER_JARS=/opt/bookkeeper/lib outbox demo --delay bookkeeper:

  outbox demo --delay bookkeeper://zk1,zk2,zk3/outbox/demo

  outbox demo --delay redis://127.0.0.1:6379 --broker kafka://127.0.0.1:9092 --json
"""

app = typer.Typer()
talk = Console(stderr=True, highlight=False, soft_wrap=True)


class ReconciliationFailed(OutboxError):
    """The reconciliation ended with an error."""


@app.callback(invoke_without_command=True, help=HELP)
def demo(
    url: Annotated[
        str | None, typer.Option("--url", help="Business database; an SQLite file in the folder by default.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where data, logs and the report go.")] = Path("demo-run"),
    bookings: Annotated[
        int, typer.Option("--bookings", min=100, max=FLIGHTS, help="How many of the 336,776 trips are booked.")
    ] = 6_000,
    flights: Annotated[
        int, typer.Option("--flights", min=100, max=FLIGHTS, help="How many are loaded as trips, from 1 January on.")
    ] = FLIGHTS,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the trips, and the message that is always refused.")] = 7,
    broker_url: Annotated[
        str | None, typer.Option("--broker", help=f"A broker that you have in place of our own: {', '.join(ENGINES)}.")
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay",
            help="What keeps the reminders: redis:, redis+cluster:, bookkeeper:, or the URL of servers that you have.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    form: ProgressOption = ProgressForm.AUTO,
) -> None:
    """Run the scenario, then the proof, and exit with its status."""
    progress = DemoProgress(form=form)
    folder = fresh_folder(folder)
    run = _Run(
        scenario=partial(
            Scenario, url=url, folder=folder, bookings=bookings, flights=flights, seed=seed, progress=progress,
            has_changes=delay is not None,
        ),
        folder=folder, progress=progress,
    )  # fmt: skip
    outcome = run.on_own_broker() if broker_url is None and delay is None else run.compared(broker_url, delay)
    progress.say("done")
    _print(outcome, as_json=as_json)
    raise typer.Exit(1 if outcome.is_fatal else 0)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The figures of a run, lines of prose that go with them, and whether something is wrong."""

    figures: Mapping[str, int]
    prose: Sequence[str]
    is_fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run in a fresh folder; `scenario` takes the broker and the processes."""

    scenario: Callable[..., Scenario]
    folder: Path
    progress: DemoProgress

    def on_own_broker(self) -> _Outcome:
        """Run on a broker of this project, and reconcile on Spark."""
        processes = ProcessGroup(self.folder)
        broker = OwnBroker(self.folder, processes=processes, say=self.progress.say)
        plan = self.scenario(broker=broker, processes=processes).run()
        self.progress.say("all is settled; reconciling on Spark")
        with self.progress.operation("prove", shares=True, steady=False):
            summary = _reconcile(plan, broker_data=broker.data, progress=self.progress)
        return _reconciled(plan, summary)

    def compared(self, broker_url: str | None, delay: str | None) -> _Outcome:
        """Run on a broker that is there already, or one of this project, with a delay engine; compare the records."""
        processes = ProcessGroup(self.folder)
        topics = RunTopics.of_new_run()
        engine = open_delay_engine(delay, topics=topics, folder=self.folder, processes=processes, say=self.progress.say)
        try:
            target = broker_url or OwnBroker(self.folder, processes=processes, say=self.progress.say).start().broker_url
            broker = ForeignBroker(
                target, topics=topics, delay=engine, processes=processes, say=self.progress.say,
                ends_with_run=broker_url is None,
            )  # fmt: skip
            plan = self.scenario(broker=broker, processes=processes).run()
        finally:
            processes.stop()
        self.progress.say("all is settled; comparing the records")
        return _compared(plan)


def reconcile_toml(plan: DemoPlan, *, broker_data: Path) -> str:
    """The reconciliation's settings for this run: both messages of every paid order, and the ticketing inbox."""
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


def _reconcile(plan: DemoPlan, *, broker_data: Path, progress: DemoProgress) -> dict[str, Any]:
    config = plan.folder / "reconcile.toml"
    write_private(config, reconcile_toml(plan, broker_data=broker_data).encode())  # the URL may hold a password
    command = [sys.executable, "-m", "outbox", "reconcile", "run", "--config", str(config), "--json"]
    told, log_path = plan.folder / "reconcile.json", plan.folder / "reconcile.log"
    with (
        told.open("wb") as result,
        log_path.open("w") as log,
        subprocess.Popen([*command, "--progress", "json"], stdout=result, stderr=subprocess.PIPE, text=True) as run,  # noqa: S603 - our own command
    ):
        for line in run.stderr or ():
            log.write(line)
            if line.startswith("{"):
                share = json.loads(line)
                progress.count(share["done"], share["total"], left_ms=share["left_ms"], step=share["step"])
    if run.returncode not in {0, 1} or not told.stat().st_size:
        raise ReconciliationFailed(f"the reconciliation failed; see {log_path}")
    summary: dict[str, Any] = json.loads(told.read_bytes())
    return summary


def _reconciled(plan: DemoPlan, summary: Mapping[str, Any]) -> _Outcome:
    figures = {
        "payments": sum(summary["business_verdicts"].values()) // 2,  # each paid order is counted under two rules
        "rolled back": _lines(plan.rolled_back_path),
    }
    names = ("messages", "delivered", "redelivered", "deduplicated", "dead", "lost", "phantom", "early")
    return _Outcome(
        figures={**figures, **{name: summary[name] for name in names}},
        prose=[summary["sentence"], f"report: {Path(summary['folder']) / 'report.html'}"],
        is_fatal=any(summary[name] for name in ("lost", "phantom", "early", "unexplained")),
    )


def _compared(plan: DemoPlan) -> _Outcome:
    comparison = compare_run(plan)
    noted = {
        "payments": comparison.payments,
        "rolled back": _lines(plan.rolled_back_path),
        "deduplicated": _lines(plan.deduplicated_path),
    }
    findings = comparison.findings
    named = [f"{finding.kind}: {finding.words}" for finding in findings[:NAMED_MAX]]
    if len(findings) > NAMED_MAX:
        named.append(f"and {len(findings) - NAMED_MAX:,} more")
    return _Outcome(
        figures={**noted, **comparison.figures},
        prose=["NOT proven:", *named] if findings else [PROVEN],
        is_fatal=bool(findings),
    )


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _print(outcome: _Outcome, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({name.replace(" ", "_"): figure for name, figure in outcome.figures.items()}))
        for line in outcome.prose if outcome.is_fatal else ():
            talk.print(line, markup=False)
        return
    for name, figure in outcome.figures.items():
        typer.echo(f"{name:>13} {figure:>9,}")
    for line in outcome.prose:
        typer.echo(line)
