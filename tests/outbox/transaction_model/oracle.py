"""What must hold after a program, whatever it did.

Rows that are committed have exactly their messages; the rest is what plain SQLAlchemy leaves, with a witness for each
message: a commit that raised left neither, strangers have what is theirs, and nothing is checked out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tests.outbox.transaction_model.interpreter import ONE_SIDED, Outcome, Trace
from tests.outbox.transaction_model.steps import (
    Below,
    DoBelow,
    End,
    EndConnection,
    Ending,
    EndRoot,
    Execute,
    Program,
    Statement,
    Step,
    walk,
)

_SPLITTING = frozenset({Statement.SAVEPOINT, Statement.ROLLBACK_TO, Statement.RELEASE})
_OUT_OF_SIGHT = frozenset({Statement.CALL_COMMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a program left on both sides, by the numbers of its rows."""

    trace: Trace
    plain: Trace
    rows: frozenset[int]
    plain_rows: frozenset[int]
    witnesses: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How often each message was pulled from the broker, and which rows the message table has still."""

    pulled: Counter[str]
    left: Collection[str]


def judge(program: Program, observed: Observed, sent: Sent) -> list[str]:
    """Returns what is wrong, in words; mostly nothing."""
    return [
        *_checked_out(observed),
        *_pairs(program, observed, sent),
        *_beside_plain(program, observed, sent),
        *_deliveries(observed, sent),
    ]


def judge_before_delivery(program: Program, observed: Observed) -> list[str]:
    """Returns what is wrong with connections and rows."""
    return [*_checked_out(observed), *_rows_beside_plain(program, observed)]


def _checked_out(observed: Observed) -> list[str]:
    found: list[str] = []
    if any(path[0] == "end" and outcome.says_savepoint_is_gone for path, outcome in observed.trace.outcomes.items()):
        return found  # SQLAlchemy's close() has failed, and an async Session then keeps its connection
    if observed.trace.checked_out:
        found.append(f"{observed.trace.checked_out} connection(s) are checked out at the end")
    if observed.plain.checked_out:
        found.append(f"{observed.plain.checked_out} connection(s) of the plain run are checked out at the end")
    return found


def _pairs(program: Program, observed: Observed, sent: Sent) -> list[str]:
    """Needs no plain run: a row and its message were written in one step, so in one transaction and savepoint."""
    unsure = _unsure(program, observed.trace)
    found = []
    for number in sorted(observed.trace.pairs - unsure):
        has_row, ids = number in observed.rows, observed.trace.messages[number]
        missing = [message_id for message_id in ids if not sent.pulled[message_id] and message_id not in sent.left]
        if has_row and missing and number not in torn(observed.trace):
            found.append(f"row {number} is committed without its message")
        if not has_row and len(missing) < len(ids):
            found.append(f"the message of row {number} was sent, and the row is not there")
    return found


def _unsure(program: Program, *traces: Trace) -> set[int]:
    """Returns the numbers of which nothing is known: what an error on one side alone may have made differ, and rows
    and witnesses that waited for a flush in a program that splits.
    """
    splits = any(_splits(step) for step in walk(program.steps))
    return set().union(*(trace.uncertain | (trace.lazy | trace.unflushed if splits else set()) for trace in traces))


def _splits(step: Step) -> bool:
    """Whether a step may end what a message is in, and not its row that waits for a flush: SQLAlchemy flushes that into
    whatever is open then. Who ends transactions below a Session has to flush first.
    """
    match step:
        case Execute(statement=statement):
            return statement in _SPLITTING
        case EndRoot(ending=ending) | End(ending=ending):
            return ending is Ending.CLOSE
        case EndConnection(ending=ending):
            return ending in {Ending.ROLLBACK, Ending.CLOSE, Ending.FAIL}
        case DoBelow(what=what):
            return what in {Below.NESTED_ROLLBACK, Below.ROLLBACK}
        case _:
            return False


def _rows_beside_plain(program: Program, observed: Observed) -> list[str]:
    unsure = _unsure(program, observed.trace, observed.plain)
    more = sorted(observed.rows - observed.plain_rows - unsure)
    fewer = sorted(observed.plain_rows - observed.rows - unsure)
    return [
        *([f"rows {more} are committed, and plain SQLAlchemy would not have committed them"] if more else []),
        *([f"rows {fewer} are not there, and plain SQLAlchemy would have committed them"] if fewer else []),
        *_raised_by_plain(observed),
    ]


def _raised_by_plain(observed: Observed) -> list[str]:
    """Steps that went well with messages and fail without, before anything was refused and before a step failed in two
    ways; what a lock, a full pool or a lost connection does to one side is no fault.
    """
    found = []
    for path, outcome in observed.plain.outcomes.items():
        seen = observed.trace.outcomes.get(path)
        if seen is None:
            continue
        if outcome.says_savepoint_is_gone:
            break  # a witness begins the savepoint that it is in, and a message does not
        if seen.failure is not None:
            fails_otherwise = outcome.failure is not None and _class_of(seen) != _class_of(outcome)
            # What was to be flushed still waits behind the latter, for a flush that only the plain side may need.
            if fails_otherwise or _class_of(seen) == "PendingRollbackError":
                break
            if seen.failure in ONE_SIDED and seen.failure != outcome.failure:
                break
        elif outcome.failure is not None and outcome.failure not in ONE_SIDED and not outcome.after_refusal:
            found.append(f"step {path} went well, and fails in plain SQLAlchemy: {outcome.error}")
    return found


def _class_of(outcome: Outcome) -> str:
    return outcome.error.partition(":")[0]


def _beside_plain(program: Program, observed: Observed, sent: Sent) -> list[str]:
    found = _rows_beside_plain(program, observed)
    judged = _unsure(program, observed.trace, observed.plain) | observed.plain.waiting | torn(observed.trace)
    published = {number for number in observed.trace.messages if number not in judged}
    for number in sorted(published):
        ids = observed.trace.messages[number]
        arrived = [message_id for message_id in ids if sent.pulled[message_id] or message_id in sent.left]
        if number in observed.witnesses and len(arrived) < len(ids):
            found.append(f"message {number} was committed and is nowhere")
        if number not in observed.witnesses and arrived:
            found.append(f"message {number} was sent, and its transaction was not committed")
    return found


def _deliveries(observed: Observed, sent: Sent) -> list[str]:
    ids = [message_id for each in observed.trace.messages.values() for message_id in each]
    return [
        *(f"message {message_id} was delivered {sent.pulled[message_id]} times" for message_id in ids
          if sent.pulled[message_id] > 1),
        *(f"message {message_id} is in the table for ever" for message_id in ids if message_id in sent.left),
    ]  # fmt: skip


def torn(trace: Trace) -> set[int]:
    """The numbers whose rows were committed out of sight before their messages were written, and where no commit went
    well afterwards as if nothing had been.
    """
    return trace.torn - trace.silent
