"""Reads a plan of repairs from a file, and checks it against the current state of the sources. Changes nothing.

A line is applied only if planning the same message again gives the same repair, and, for a message that would be
inserted again, if the broker has not stored it since. A plan that was trusted would make a second message of one that a
compensator or a person has sent meanwhile: the guards of the statements see the row, not the broker. So of a line only
the id and the action count, an edited one can ask for nothing that --repair would not do, and no signature is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from outbox_core.journal import journal
from outbox_core.journal.block import SegmentRefused
from outbox_core.messages.message import decode_record
from outbox_core.protocol.decoder_cache import json_decoder
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import Settings
from spark_reconcile.repair.plan import (
    CANCEL_RULE,
    LOST_RULE,
    UNSENT_RULE,
    MessageName,
    Repair,
    RepairAction,
    Suspect,
    plan_repairs,
)
from spark_reconcile.sources.broker_logs import MESSAGE_KINDS, frames_of, reach_ms, survey

LINES_MAX: Final = 100_000
LINE_BYTES_MAX: Final = 64 * 1024
_RULES: Final = {
    RepairAction.MAKE_DUE: UNSENT_RULE, RepairAction.WRITE_AGAIN: LOST_RULE, RepairAction.CANCEL_AGAIN: CANCEL_RULE,
}  # fmt: skip
_CHANGED: Final = "it is not as it was planned any more: "
_STORED: Final = "the broker has stored it since it was planned"
_OUT_OF_REACH: Final = (
    "the broker's log does not reach back to it any more, so nothing tells whether it was stored since"
)


class PlannedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file: the repair of one message, and its table and database; for a cancel, `key` is the id that it
    cancels.
    """

    repair_id: str
    message_id: str
    topic: str
    action: RepairAction
    key: str | None = None


def read_plan(path: Path) -> list[PlannedLine]:
    """Returns the lines with an action. Raises ConfigurationError if the file is no such plan."""
    lines = []
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if line_number > LINES_MAX or len(line) > LINE_BYTES_MAX:
                    raise ConfigurationError(f"{path} is no plan of repairs: it is too long at line {line_number:,}")
                lines.append(_line(path, line_number, line))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}; name the repairs.jsonl that --repair --dry-run wrote"
        ) from error
    to_do = [line for line in lines if line.action is not RepairAction.NOTHING]
    (((_, name), times),) = Counter((line.topic, line.message_id) for line in to_do).most_common(1) or [(("", ""), 0)]
    if times > 1:
        raise ConfigurationError(f"{path} names {name} {times} times; plan it again with --repair --dry-run")
    return to_do


def still_to_do(settings: Settings, plan: Sequence[PlannedLine], *, repairs_max: int) -> list[Repair]:
    """Returns the repairs that are still valid; the others with the action NOTHING and the reason.

    Raises ConfigurationError for more than `repairs_max` repairs, NotComparable if the broker's log is damaged.
    """
    suspects = [
        Suspect(message_id=line.message_id, topic=line.topic, key=line.key, rule=_RULES[line.action]) for line in plan
    ]
    again = plan_repairs(settings, suspects, repairs_max=repairs_max)
    lost = {repair.name for repair in again if repair.action is RepairAction.WRITE_AGAIN}
    begun_ms = reach_ms(survey(settings.broker_data, "messages")) if lost else 0
    stored = _stored(settings.broker_data, lost) if lost else set()
    return [_checked_again(line, now, stored, begun_ms=begun_ms) for line, now in zip(plan, again, strict=True)]


def _checked_again(line: PlannedLine, now: Repair, stored: Collection[MessageName], *, begun_ms: int) -> Repair:
    if now.name in stored:
        return replace(now, action=RepairAction.NOTHING, reason=_STORED, row=None)
    if now.action is RepairAction.WRITE_AGAIN and now.row is not None and _last_ms(now.row) < begun_ms:
        return replace(now, action=RepairAction.NOTHING, reason=_OUT_OF_REACH, row=None)
    if now.repair_id == line.repair_id:
        return now
    return replace(now, action=RepairAction.NOTHING, reason=f"{_CHANGED}{now.reason}", row=None)


def _last_ms(row: Mapping[str, Any]) -> int:
    """The last time at which the broker wrote a message to its log, by its archive row: it was sent, or fell due."""
    return max(int(row["sent_at_us"]) // 1000, row["deliver_at_ms"] or 0)


def _stored(broker_data: Path, names: Collection[MessageName]) -> set[MessageName]:
    """Returns which of these messages the broker's log has now: it is read from its beginning to its end."""
    stored: set[MessageName] = set()
    for segment in survey(broker_data, "messages"):
        try:
            for frame in frames_of(segment, wanted=MESSAGE_KINDS):
                record = decode_record(frame.payload)
                if (record.topic, record.id) in names:
                    stored.add((record.topic, record.id))
        except (journal.SegmentDamaged, SegmentRefused, OSError, *DECODE_ERRORS) as error:
            raise NotComparable(
                f"the broker's log cannot be read at {segment.path} ({error}), so nothing is repaired: restore the "
                "segment from a copy"
            ) from error
    return stored


def _line(path: Path, line_number: int, line: bytes) -> PlannedLine:
    try:
        return json_decoder(PlannedLine).decode(line)
    except DECODE_ERRORS as error:
        raise ConfigurationError(
            f"{path}, line {line_number:,}, is no line of a plan ({error}); name the repairs.jsonl that --repair "
            "--dry-run wrote"
        ) from error
