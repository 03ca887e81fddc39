"""What the archive says that the broker answered to cancels, as actions on them and on what they canceled. Judges none.

The archive keeps of a cancel the SHA-256 of its body, which is the id of the message. So that is found by its hash:
among the cancels that the broker noted, and the scheduled messages of its log, as no other can be canceled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from spark_reconcile.in_memory import grouped
from spark_reconcile.sources.frames import ACTION_SCHEMA
from spark_reconcile.sources.statements import CANCELS, Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_reconcile.reading import LegCount

TAKEN: Final = "canceled"
"""The broker's answer to a cancel that came in time: it will never hand the message out."""
NOTED, UNNOTED = "noted", "unnoted"
"""Kinds of action, with a cancel's own id: the broker wrote such a cancel down, or did not; `reason` has the message's
id."""
ANSWERED: Final = "answered"
"""The same answer as an action on the message, under its id."""


EXTREMES: Final = {
    "topic": "min(topic)", "topic_high": "max(topic)", "within_low": "min(within)", "within_high": "max(within)"
}  # fmt: skip
"""Of the topics on which an id is found, and of what its cancels are good for: regular expressions, null for all."""
APPLIES: Final = " or ".join(
    f"coalesce(rlike(topic, {within}) and rlike(topic_high, {within}), topic is null)"
    for within in ("within_low", "within_high")
)
"""Whether a cancel that is good for some topics says something of these: it does where all of them are among those, and
where the id is found nowhere.
"""


def are_answered(counts: Iterable[LegCount]) -> bool:
    """Whether the archive has a cancel that the broker took: without one nothing here costs anything."""
    return any(one.leg == Leg.ARCHIVE and one.topic == CANCELS and one.note == TAKEN for one in counts)


def answers(rows: DataFrame, *, messages: DataFrame, actions: DataFrame) -> DataFrame:
    """Rows of ACTION_SCHEMA, two for each cancel that the archive says was taken, and whose message is known."""
    asked = rows.where(f"leg = '{Leg.ARCHIVE}' and topic = '{CANCELS}' and note = '{TAKEN}'")
    noted = actions.where(f"kind = '{TAKEN}'").selectExpr(
        "id as message", "if(reason is null, 1, 0) as everywhere", "1 as is_noted", "cast(null as string) as topic",
        "reason as within",
    )  # fmt: skip
    scheduled = messages.where("deliver_at_ms is not null").selectExpr(
        "id as message", "0 as everywhere", "0 as is_noted", "topic", "cast(null as string) as within"
    )
    known = grouped(
        noted.unionByName(scheduled), "message", everywhere="max(everywhere)", is_noted="max(is_noted)", **EXTREMES
    )
    is_noted = f"everywhere = 1 or (is_noted = 1 and ({APPLIES})) as is_noted"
    hashed = known.selectExpr("message", is_noted, "sha2(message, 256) as body_sha256")
    found = asked.select("id", "body_sha256", "at_ms").join(hashed, "body_sha256").localCheckpoint()
    of_cancels = {"kind": f"if(is_noted, '{NOTED}', '{UNNOTED}')", "id": "id", "at_ms": "at_ms", "reason": "message"}
    of_messages = {"kind": f"'{ANSWERED}'", "id": "message", "at_ms": "at_ms"}
    return _actions(found, of_cancels).unionByName(_actions(found, of_messages))


def _actions(frame: DataFrame, columns: dict[str, str]) -> DataFrame:
    named = [column.split() for column in ACTION_SCHEMA.split(", ")]
    return frame.selectExpr(*(f"cast({columns.get(name, 'null')} as {kind}) as {name}" for name, kind in named))
