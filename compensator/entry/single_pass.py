"""One pass over all sources, for people and for cron: every row that is due now, each source once. No service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from compensator.core.batch_totals import PassReport, add
from compensator.work.source import Source
from compensator.work.source_schedule import HeldBack, More
from compensator.work.work_slice import TurnOptions, Turns
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError

logger = logging.getLogger(__name__)

TURNS_MAX = 100_000


def pass_over(
    sources: Sequence[Source],
    *,
    options: TurnOptions,
    clock: Clock,
    told: Callable[[PassReport], None] = lambda _: None,
) -> tuple[PassReport, list[OutboxError]]:
    """What the pass came to, and the errors of sources that could not be served: they hold up no other.

    `told` hears what has come of it so far. An outage ends the sources of that broker.
    """
    total, errors, out = PassReport(), list[OutboxError](), set[str]()
    for source in sources:
        if source.broker in out:
            continue
        try:
            for report in _turns(Turns(source, options=options, clock=clock)):
                total = add(total, report)
                told(total)
                if report.outage is not None:
                    out.add(source.broker)
        except OutboxError as error:
            logger.warning("pass_failed", extra={"source": source.name, "error": str(error)})
            errors.append(error)
    return total, errors


def _turns(turns: Turns) -> Iterator[PassReport]:
    """Turn after turn while there is more; a rate limit is waited for, an outage is not."""
    never = threading.Event()
    for _ in range(TURNS_MAX):
        turn = turns.take(going_on=lambda: True)
        yield turn.report
        match turn.outcome:
            case HeldBack(wait_ms=wait_ms) if turn.report.outage is None:
                never.wait(wait_ms / 1_000)
            case More():
                pass
            case _:
                return
