"""Converts the broker's answers to cancels, as archived, into actions on the cancels and on the canceled messages.

For a cancel, the archive has the SHA-256 of its body, which is the id of the message. So the message is found by its
hash among the cancels that the broker noted, and the scheduled messages of its log, since no others can be canceled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped
from spark_reconcile.sources.log_records import ACTION_SCHEMA
from spark_reconcile.sources.sql_statements import CANCELS, Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_reconcile.core.source_counts import LegCount

TAKEN: Final = "canceled"
"""The broker's answer to a cancel that came in time: it will never deliver the message."""
NOTED, UNNOTED = "noted", "unnoted"
"""Kinds of action, with a cancel's own id: the broker noted such a cancel, or did not; `reason` is the message's id."""
ANSWERED: Final = "answered"
"""The same answer as an action on the message, with the message's id. The broker notes cancels of ids that it has
forgotten, too, so a note alone withdraws nothing that came before it. The answer does: it promises no delivery."""
# Scopes are regular expressions. All scopes match if the id is on no topic: its topic is not known.
_GOOD: Final = "filter(scopes, scope -> size(topics) = 0 or exists(topics, topic -> rlike(topic, scope)))"


def are_answered(counts: Iterable[LegCount]) -> bool:
    """Whether the archive has a cancel that the broker accepted: without one, nothing here is computed."""
    return any(count.leg == Leg.ARCHIVE and count.topic == CANCELS and count.note == TAKEN for count in counts)


def with_answers(actions: DataFrame, rows: DataFrame, messages: DataFrame, counts: Iterable[LegCount]) -> DataFrame:
    """Returns the actions, and the answers to cancels from the archive."""
    if not are_answered(counts):
        return actions
    return actions.unionByName(answers(rows, messages=messages, actions=actions))


def answers(rows: DataFrame, *, messages: DataFrame, actions: DataFrame) -> DataFrame:
    """Returns rows of ACTION_SCHEMA for each accepted cancel in the archive whose message is known: whether it was
    noted, and the answer for its message, for each scope with which it was noted.
    """
    accepted = rows.where(f"leg = '{Leg.ARCHIVE}' and topic = '{CANCELS}' and note = '{TAKEN}'")
    noted = actions.where(f"kind = '{TAKEN}'").selectExpr(
        "id as message", "reason is null as is_everywhere", "cast(null as string) as topic", "reason as scope",
    )  # fmt: skip
    scheduled = messages.where("deliver_at_ms is not null").selectExpr(
        "id as message", "false as is_everywhere", "topic", "cast(null as string) as scope"
    )
    by_message = grouped(
        noted.unionByName(scheduled), "message",
        is_everywhere="max(is_everywhere)", topics="collect_set(topic)", scopes="collect_set(scope)",
    )  # fmt: skip
    hashed = by_message.selectExpr(
        "message", "is_everywhere", f"if(is_everywhere, null, {_GOOD}) as good", "sha2(message, 256) as body_sha256"
    )
    answered = (
        accepted.select("id", "body_sha256", "at_ms").join(hashed, "body_sha256")
        .selectExpr("id", "at_ms", "message", "is_everywhere or size(good) > 0 as is_noted", "good")
        .localCheckpoint()
    )  # fmt: skip
    of_cancels = {"kind": f"if(is_noted, '{NOTED}', '{UNNOTED}')", "id": "id", "at_ms": "at_ms", "reason": "message"}
    of_messages = {"kind": f"'{ANSWERED}'", "id": "message", "at_ms": "at_ms", "reason": "scope"}
    scoped = answered.selectExpr("message", "at_ms", "explode_outer(good) as scope")
    return _actions(answered, of_cancels).unionByName(_actions(scoped, of_messages))


def _actions(frame: DataFrame, columns: dict[str, str]) -> DataFrame:
    named = [column.split() for column in ACTION_SCHEMA.split(", ")]
    return frame.selectExpr(*(f"cast({columns.get(name, 'null')} as {kind}) as {name}" for name, kind in named))
