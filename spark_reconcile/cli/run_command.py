"""The commands `outbox reconcile run`, `watch` and `explain`. PySpark is imported only when a run begins.

`report` and `repair` are registered here, too.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer
from rich.console import Console
from rich.table import Table

from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from spark_reconcile.cli.interrupt import Stop, interruptible
from spark_reconcile.cli.options import (
    EXIT_FINDINGS,
    AcceptMissing,
    AsJson,
    BrokerData,
    Config,
    DryRun,
    Full,
    GraceSeconds,
    GuardedCommands,
    Master,
    MetricsFile,
    NowMs,
    Output,
    PasswordFile,
    Quiet,
    RepairIt,
    RepairsMax,
    Schema,
    Since,
    Until,
    Url,
    Yes,
    absolute_path,
    given_settings,
)
from spark_reconcile.cli.repair_command import app as repair_app
from spark_reconcile.cli.repair_command import repair as repair_findings
from spark_reconcile.cli.report_command import report
from spark_reconcile.core.errors import NotComparable, OutputBusy, OutputFailed
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_arguments import length_ms, moment_ms
from spark_reconcile.repair.plan import hour_folders
from spark_reconcile.report.prometheus import FILE as METRICS_FILE
from spark_reconcile.report.prometheus import write_metrics
from spark_reconcile.results.summary import Summary
from spark_reconcile.results.window_store import newest_closed
from spark_reconcile.rules.verdict_rule import State

if TYPE_CHECKING:
    from spark_reconcile.runs.run_progress import RunShare

app = typer.Typer(cls=GuardedCommands, help="Prove that nothing was lost, invented or early.", no_args_is_help=True)
app.command()(report)
app.add_typer(repair_app, name="repair")


@app.callback()
def reconcile() -> None:
    """Prove from the records that nothing was lost, invented or early."""


@app.command()
def run(
    config: Config = None, url: Url = None, password_file: PasswordFile = None, schema: Schema = None,
    broker_data: BrokerData = None, output: Output = None, grace_seconds: GraceSeconds = None,
    master: Master = None, now_ms: NowMs = None, since: Since = None, until: Until = None, full: Full = False,
    repair: RepairIt = False, yes: Yes = False, dry_run: DryRun = False, repairs_max: RepairsMax = None,
    accept_missing: AcceptMissing = None, metrics_file: MetricsFile = None, as_json: AsJson = False,
    quiet: Quiet = False, progress: ProgressOption = ProgressForm.AUTO,
) -> None:  # fmt: skip
    """Reconcile once. Every message, every delivery and every business row gets one verdict.

    With --since by the hour: only hours that are new, changed or still moving are judged, the others stand. Exit
    status: 0 balanced, 1 findings, 2 usage, 3 a source is missing, damaged or down, so nothing was judged, 4 an error
    that was not foreseen.

    Options win over the environment, like OUTBOX_DATABASE__URL and OUTBOX_RECONCILE__MASTER, and that over the file.

    Examples:

      outbox reconcile run --config reconcile.toml

      outbox reconcile run --config reconcile.toml --since 48h --repair --dry-run
    """
    given = given_settings(
        config, url=url, schema=schema, broker_data=broker_data, output=output, grace_seconds=grace_seconds,
        password_file=password_file,
        reconcile={"master": master, "metrics_file": absolute_path(metrics_file), "repairs_max": repairs_max},
    )  # fmt: skip
    settings = replace(given.run, accept_missing=tuple(accept_missing or ()))
    if since is None and (until or full):
        raise ConfigurationError("--until and --full go with --since: name since when, e.g. --since 48h")
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    span = None if since is None else (moment_ms(since, now_ms=now), moment_ms(until, now_ms=now) if until else now)
    summary = _run(
        settings, master=given.master, now_ms=now, span=span, full=full, shown=ShownRun(form=progress, quiet=quiet)
    )
    _write_metrics(settings, given.metrics_file, summary)
    if as_json:
        typer.echo(json.dumps(summary.as_dict()))
    else:
        _print(summary)
    if repair:
        folder = Path(summary.folder)
        tables = hour_folders(settings.output, since_ms=span[0], until_ms=span[1]) if span else [folder]
        repair_findings(settings, tables, repairs_max=given.repairs_max, yes=yes, dry_run=dry_run, folder=folder)
    raise typer.Exit(0 if summary.balanced else EXIT_FINDINGS)


@app.command()
def watch(
    config: Config = None, url: Url = None, password_file: PasswordFile = None, schema: Schema = None,
    broker_data: BrokerData = None, output: Output = None, grace_seconds: GraceSeconds = None, master: Master = None,
    every: Annotated[str | None, typer.Option("--every", help="How often: 15m, or 1h, the default.")] = None,
    lookback: Annotated[
        str | None, typer.Option("--lookback", help="How far back hours are rechecked: 7d, or 48h, the default.")
    ] = None,
    metrics_file: MetricsFile = None, quiet: Quiet = False, progress: ProgressOption = ProgressForm.AUTO,
) -> None:  # fmt: skip
    """Reconcile each hour when it is over, until SIGTERM or ^C.

    Each run judges the new hour, and those of the last 48 whose records changed or in which something still moved.

    Example: outbox reconcile watch --config reconcile.toml --lookback 7d
    """
    given = given_settings(
        config, url=url, schema=schema, broker_data=broker_data, output=output, grace_seconds=grace_seconds,
        password_file=password_file,
        reconcile={"master": master, "metrics_file": absolute_path(metrics_file), "every": every, "lookback": lookback},
    )  # fmt: skip
    settings = given.run
    every_ms, lookback_ms = length_ms(given.every), length_ms(given.lookback)
    if not every_ms:
        raise ConfigurationError(f"--every {given.every} leaves no time between two runs: name a length like 15m or 1h")

    grace_ms = settings.grace.ms
    shown = ShownRun(form=progress, quiet=quiet)

    def once(now_ms: int) -> None:
        # There is always an hour that is over, so that no run ends the schedule: a short lookback may have none.
        span = (min(now_ms - lookback_ms, newest_closed(now_ms, grace_ms=grace_ms)), now_ms)
        summary = _run(settings, master=given.master, now_ms=now_ms, span=span, full=False, shown=shown)
        _write_metrics(settings, given.metrics_file, summary)
        typer.echo(summary.headline)

    schedule = Schedule(every_ms=every_ms, after_ms=grace_ms % every_ms)
    watching = ScheduledRuns(once, schedule=schedule, clock=SystemClock())
    with _stopped_by_signals(watching):
        watching.run()


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(help="A verdict or a rule, e.g. lost; all of them by default.")] = None,
) -> None:
    """Explain a verdict: its meaning, its cause, and what to do.

    Examples:

      outbox reconcile explain lost

      outbox reconcile explain delivered_late
    """
    from spark_reconcile.classify.classification import RULES

    matching_rules = [
        (scope, rule) for scope, rules in RULES.items() for rule in rules if name in {None, rule.state, rule.name}
    ]
    if not matching_rules:
        names = [*State, *(rule.name for rules in RULES.values() for rule in rules)]
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"verdicts: {', '.join(State)}"
        raise ConfigurationError(f"there is no verdict or rule {name!r}; {hint}")
    for scope, rule in matching_rules:
        typer.echo(f"{rule.state} ({scope}: {rule.name}, {rule.severity}): {rule.meaning}")
        for label, text in (("cause", rule.cause), ("do", rule.cure)):
            if text:
                typer.echo(f"    {label}: {text}")


def _run(
    settings: Settings, *, master: str | None, now_ms: int, span: tuple[int, int] | None, full: bool, shown: ShownRun
) -> Summary:  # fmt: skip
    from spark_reconcile.runs.reconciliation import run as reconcile_once
    from spark_reconcile.runs.reconciliation import run_windows

    with _talk() as file, Progress("reconcile", form=shown.form, shares=True, file=file) as progress:
        is_shown = progress.is_terminal or shown.form is ProgressForm.JSON or not shown.quiet
        if progress.is_terminal:  # elsewhere a refused setting stays one line
            progress.update(0, 1, step="checking the sources")

        def show(share: RunShare) -> None:
            figures = {"tasks": share.tasks}
            progress.update(share.done, share.total, left_ms=share.left_ms, step=share.step, figures=figures)

        def once(stop: Stop) -> Summary:
            def say(_step: str) -> None:
                stop.check()

            shows = show if is_shown else None
            if span is None:
                return reconcile_once(settings, master=master, now_ms=now_ms, say=say, shows=shows)
            since_ms, until_ms = span
            return run_windows(
                settings, since_ms=since_ms, until_ms=until_ms, full=full, master=master, now_ms=now_ms, say=say,
                shows=shows,
            )  # fmt: skip

        return interruptible(once)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """How a run is shown; `quiet`: by no line."""

    form: ProgressForm
    quiet: bool


def _write_metrics(settings: Settings, metrics_file: Path | None, summary: Summary) -> None:
    """Replace the metrics in the output folder and, where another file is named, there as well."""
    write_metrics(settings.output / METRICS_FILE, summary)
    if metrics_file is not None:
        write_metrics(metrics_file, summary)


@contextmanager
def _stopped_by_signals(watching: ScheduledRuns) -> Iterator[None]:
    """Stop at SIGTERM or SIGINT. The handler must take no lock: the thread that it interrupts may hold it."""

    def begin_stop(_number: int, _frame: object) -> None:
        threading.Thread(target=watching.stop, name="reconcile-stop", daemon=True).start()

    before = {
        signal_number: signal.signal(signal_number, begin_stop) for signal_number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


@contextmanager
def _talk() -> Iterator[TextIO]:
    """A duplicate of standard error: the original is redirected while Spark starts."""
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as file:
        yield file


def _print(summary: Summary) -> None:
    typer.echo(summary.headline)
    for sentence in summary.clock_sentences:
        typer.echo(sentence)
    for source in summary.inputs:
        if source.note:
            typer.echo(f"{source.source}, {source.what}: {source.note}")
    table = Table(box=None, pad_edge=False, show_header=False)
    figures = {
        "business rows": summary.business_rows,
        "messages": summary.messages,
        "stored": summary.stored,
        "deliveries": summary.message_groups,
        "delivered": summary.delivered,
        "redelivered": summary.redelivered,
        "deduplicated": summary.deduplicated,
        "cleared suspects": summary.resolved,
        **_windows(summary),
        **{state.value: summary.count(state) for state in State if state is not State.SETTLED},
    }
    for name, value in figures.items():
        table.add_row(name, f"{value:>12,}")
    Console().print(table)
    typer.echo(f"report: {Path(summary.folder) / 'report.html'}")


def _windows(summary: Summary) -> dict[str, int]:
    windows = summary.windows
    if windows is None:
        return {}
    return {
        "hours": windows.windows,
        "hours judged": windows.judged,
        "hours still open": windows.open,
        "unsent in other hours": windows.outside,
    }


logger: EventLogger = EventLogger(__name__)

RETRY_MS: Final = 60_000
"""The time until a retry after a source was unavailable; an interval, if that is shorter."""
AWAKE_EVERY_MS: Final = 1_000
"""The longest wait: another thread may get a signal, whose handler then runs when the main thread next runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run an interval, `after_ms` after its multiples: an hour is evaluated when it and the grace time are over."""

    every_ms: int
    after_ms: int

    def next_ms(self, now_ms: int) -> int:
        """Returns when the next run is due."""
        return ((now_ms - self.after_ms) // self.every_ms + 1) * self.every_ms + self.after_ms


class ScheduledRuns:
    """Repeats a run once an interval, until stopped.

    stop() may be called from any thread; a signal handler must call it from another thread.
    """

    def __init__(self, run_once: Callable[[int], None], *, schedule: Schedule, clock: Clock) -> None:
        self._run_once = run_once
        self._schedule = schedule
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self.runs = 0
        self.failures = 0

    def run(self) -> None:
        """Run now, then by the schedule, until stop()."""
        while not self._stopping:
            now_ms = self._clock.now_ms()
            due_ms = self._schedule.next_ms(now_ms) if self._try(now_ms) else now_ms + self._retry_ms
            self._wait_until(due_ms)

    def stop(self) -> None:
        """Stop after the current run, if there is one. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _try(self, now_ms: int) -> bool:
        self.runs += 1
        try:
            self._run_once(now_ms)
        except (NotComparable, OutputBusy, OutputFailed, DatabaseUnavailable) as error:
            self.failures += 1
            logger.warning("reconciliation_failed", extra={"error": str(error), "failures": self.failures})
            return False
        return True

    @property
    def _retry_ms(self) -> int:
        return min(RETRY_MS, self._schedule.every_ms)

    def _wait_until(self, due_ms: int) -> None:
        with self._changed:
            while not self._stopping and (left_ms := due_ms - self._clock.now_ms()) > 0:
                self._clock.wait(self._changed, min(left_ms, AWAKE_EVERY_MS))
