"""Determines why an applied repair changed nothing: the row is due already, leased, deleted, or inserted already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from spark_reconcile.repair.plan import IDS_A_STATEMENT, Repair, RepairAction
from spark_reconcile.sources.dbapi_reader import DbApiReader, Place, quoted, reading


class RepairOutcome(StrEnum):
    """State of a row that a repair did not change."""

    DUE = "due already: the compensator sends them without a repair"
    HELD = "held by a sender: it sends them, or they fall due when its lease ends"
    PARKED = "parked since: decide about them by hand"
    GONE = "not in the outbox any more: sent or discarded since they were planned"
    WAITING = "waiting in the outbox again already"


def why_unchanged(repairs: Sequence[Repair]) -> Counter[RepairOutcome]:
    """Counts the outcomes of applied repairs that changed nothing. Raises DatabaseUnavailable."""
    counts: Counter[RepairOutcome] = Counter(
        RepairOutcome.WAITING for repair in repairs if repair.action is not RepairAction.MAKE_DUE
    )
    tables: dict[tuple[str, str | None, str], list[str]] = {}
    for repair in repairs:
        if repair.action is RepairAction.MAKE_DUE and repair.outbox is not None:
            tables.setdefault((repair.outbox.url, repair.outbox.schema, repair.table), []).append(repair.message_id)
    for (url, schema, table), ids in tables.items():
        with reading(Place.of(url)) as reader:
            outcomes = list(_outcomes(reader, quoted(reader.place, reader.place.schema_of(schema), table), ids))
        counts.update(outcomes)
        counts[RepairOutcome.GONE] += len(ids) - len(outcomes)
    return +counts


def _outcomes(reader: DbApiReader, table: str, ids: Sequence[str]) -> Iterator[RepairOutcome]:
    for start in range(0, len(ids), IDS_A_STATEMENT):
        some = ids[start : start + IDS_A_STATEMENT]
        sql = (
            f"SELECT state, token FROM {table} "  # noqa: S608 - checked names
            f"WHERE id IN ({', '.join('?' * len(some))})"
        )
        for state, token in reader.rows(sql, some):
            if state != "pending":
                yield RepairOutcome.PARKED
            else:
                yield RepairOutcome.DUE if token is None else RepairOutcome.HELD
