"""Makes one pass over all sources, for users and cron: sends every row that is due now. No service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from compensator.core.batch_totals import BatchTotals, add
from compensator.work.source import Source
from compensator.work.source_schedule import HeldBack, MoreRowsDue
from compensator.work.source_turn import TurnOptions, Turns
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

TURNS_MAX = 100_000
SETTLE_REPEATS_MAX = 5
SETTLE_BACKOFF = Backoff(initial_ms=200, max_ms=5_000)


def run_single_pass(
    sources: Sequence[Source],
    *,
    options: TurnOptions,
    clock: Clock,
    on_progress: Callable[[BatchTotals], None] = lambda _: None,
) -> tuple[BatchTotals, list[OutboxError]]:
    """Returns the totals of the pass, and the errors of sources that failed: they do not block other sources.

    `on_progress` is called with the totals so far. After an outage the pass skips the other sources of that broker.
    """
    total, errors, out = BatchTotals(), list[OutboxError](), set[str]()
    for source in sources:
        if source.broker in out:
            continue
        try:
            for report in _turns(Turns(source, options=options, clock=clock)):
                total = add(total, report)
                on_progress(total)
                if report.outage is not None:
                    out.add(source.broker)
        except OutboxError as error:
            logger.warning("pass_failed", extra={"source": source.name, "error": str(error)})
            errors.append(error)
    for source in sources:
        total = add(total, _settle_again(source))
    return total, errors


def _settle_again(source: Source) -> BatchTotals:
    """Settle what the source's database refused to settle: after this process nobody knows that it was sent."""
    total, never = BatchTotals(), threading.Event()
    for attempt in range(1, SETTLE_REPEATS_MAX + 1):
        if not source.batches.unsettled_batches:
            break
        never.wait(SETTLE_BACKOFF.delay_ms(attempt) / 1_000)
        try:
            total = add(total, source.batches.settle_again())
        except OutboxError as error:
            logger.warning("pass_not_settled", extra={"source": source.name, "error": str(error)})
    return total


def _turns(turns: Turns) -> Iterator[BatchTotals]:
    """Yields the report of each turn while there are more rows; waits for a rate limit, but not for an outage."""
    never = threading.Event()
    for _ in range(TURNS_MAX):
        turn = turns.take(going_on=lambda: True)
        yield turn.report
        match turn.outcome:
            case HeldBack(wait_ms=wait_ms) if turn.report.outage is None:
                never.wait(wait_ms / 1_000)
            case MoreRowsDue():
                pass
            case _:
                return


def pending_rows(sources: Sequence[Source]) -> int:
    """Returns how many rows wait, of each source counted up to a bound; 0 of one that cannot be asked."""
    total = 0
    for source in sources:
        try:
            total += source.counts().pending
        except OutboxError:
            continue  # the pass reports the error
    return total
