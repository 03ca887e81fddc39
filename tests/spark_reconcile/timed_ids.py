"""Gives a made-up world the ids that an outbox makes: each begins with the time at which its message was created."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec

from outbox_core.journal import journal
from outbox_core.journal.dead_letter_records import Edited
from outbox_core.messages.recurring_message import RECURRING_ID
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS
from tests.spark_reconcile.faults import Verdict
from tests.spark_reconcile.world import World, sha


def timed_id(name: str, created_ms: int) -> str:
    """A UUIDv7 of this time, always the same for a name."""
    digits = hashlib.sha256(name.encode()).hexdigest()
    return f"{created_ms:012x}7{digits[:3]}8{digits[3:18]}"


def with_timed_ids(world: World, expected: Iterable[Verdict] = ()) -> set[Verdict]:
    """Rename every message that has a time of creation; the verdicts expected of them, renamed alike."""
    created = {row["id"]: row["created_at_us"] // 1000 for row in (*world.outbox, *world.archive)}
    true = range(EARLIEST_MS, LATEST_MS)
    created.update({one.id: one.created_at_ms for one in world.stored if created.get(one.id, 0) not in true})
    # What recurs has an id that tells when it occurred, by which the proof knows it.
    names = {name: timed_id(name, ms) for name, ms in created.items() if not re.fullmatch(RECURRING_ID, name)}
    canceled = {sha(name): sha(renamed) for name, renamed in names.items()}
    for row in (*world.outbox, *world.archive):
        row["id"] = names[row["id"]]
        if row["kind"] == "cancel":
            row["body_sha256"] = canceled.get(row["body_sha256"], row["body_sha256"])
    for row in world.inbox:
        row["message_id"] = names.get(row["message_id"], row["message_id"])
    world.stored[:] = [msgspec.structs.replace(one, id=names.get(one.id, one.id)) for one in world.stored]
    world.actions[:] = [_renamed(one, names) for one in world.actions]
    world.named = {(topic, sequence, names.get(one, one)) for topic, sequence, one in world.named}
    return {(scope, names.get(one, one), *rest) for scope, one, *rest in expected}  # type: ignore[misc]


def _renamed(action: journal.Action, names: dict[str, str]) -> journal.Action:
    match action:
        case journal.Canceled(ids=ids):
            return msgspec.structs.replace(action, ids=[names.get(one, one) for one in ids])
        case journal.Fired(entries=entries):
            return msgspec.structs.replace(
                action, entries=[(sequence, names.get(id_, id_)) for sequence, id_ in entries]
            )
        case Edited(entries=edits):
            return msgspec.structs.replace(action, entries=[(*place, names.get(id_, id_)) for *place, id_ in edits])
        case _:
            return action
