"""Applies repairs: makes rows due, or inserts them again, each only if its state has not changed since the plan.

The compensator then finds and sends these rows, and the broker detects duplicates by id. Rows under a lease, deleted
rows, and ids that exist already are not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, assert_never

from spark_reconcile.repair.plan import IDS_A_STATEMENT, Repair, RepairAction
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, quoted, reading, writing

_WRITTEN: Final = ("id", "topic", "message_key", "body", "body_sha256", "deliver_at_ms", "created_at_us")
_JSON_HEADERS: Final = '{"content-type":"application/json"}'
ROWS_A_TRANSACTION: Final = 100


def apply_repairs(repairs: Sequence[Repair]) -> list[Repair]:
    """Apply repairs in small transactions; returns those that changed a row. Idempotent."""
    done = []
    for address, schema, mine in _by_database(repairs):
        for start in range(0, len(mine), ROWS_A_TRANSACTION):
            with writing(address) as cursor:
                done += [
                    repair
                    for repair in mine[start : start + ROWS_A_TRANSACTION]
                    if _apply(cursor, address, schema, repair)
                ]
    return done


def _apply(cursor: Any, address: DatabaseAddress, schema: str | None, repair: Repair) -> bool:
    table = quoted(address, schema, repair.table)
    match repair.action:
        case RepairAction.MAKE_DUE:
            return _make_due(cursor, address, table, repair.message_id)
        case RepairAction.WRITE_AGAIN:
            return _write(cursor, address, table, repair, kind="publish", headers=_JSON_HEADERS)
        case RepairAction.CANCEL_AGAIN:
            return _write(cursor, address, table, repair, kind="cancel", headers=None)
        case RepairAction.NOTHING:
            return False
        case _:
            assert_never(repair.action)


def _make_due(cursor: Any, address: DatabaseAddress, table: str, message_id: str) -> bool:
    """Make a pending row without a lease due. A row under a lease is being sent, or falls due when the lease ends."""
    now = address.backend.now_us
    sql = (
        f"UPDATE {table} SET due_at_us = {now} "  # noqa: S608 - checked names
        f"WHERE id = ? AND state = 'pending' AND token IS NULL AND due_at_us > {now}"
    )
    return _changed(cursor, address, sql, (message_id,))


def _write(
    cursor: Any, address: DatabaseAddress, table: str, repair: Repair, *, kind: str, headers: str | None
) -> bool:
    """Insert the message, or the cancel, with its original content and id, due now; not if the id is pending."""
    now, row = address.backend.now_us, repair.row or {}
    marks, dual = ", ".join("?" * len(_WRITTEN)), address.backend.from_nothing
    absent = f"WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE id = ?)"  # noqa: S608 - checked
    sql = (
        f"INSERT INTO {table} ({', '.join(_WRITTEN)}, headers, kind, state, due_at_us, attempts) "
        f"SELECT {marks}, ?, ?, 'pending', {now}, 0 {dual} {absent}"
    )
    return _changed(cursor, address, sql, (*(row[name] for name in _WRITTEN), headers, kind, repair.message_id))


def _changed(cursor: Any, address: DatabaseAddress, sql: str, parameters: Sequence[object]) -> bool:
    cursor.execute(address.backend.for_driver(sql), tuple(parameters))
    return bool(cursor.rowcount == 1)


def _by_database(repairs: Sequence[Repair]) -> list[tuple[DatabaseAddress, str | None, list[Repair]]]:
    by_outbox: dict[tuple[str, str | None], list[Repair]] = {}
    for repair in repairs:
        if repair.outbox is not None and repair.action is not RepairAction.NOTHING:
            by_outbox.setdefault((repair.outbox.url, repair.outbox.schema), []).append(repair)
    addresses = [(DatabaseAddress.of(url), schema, mine) for (url, schema), mine in by_outbox.items()]
    return [(address, address.schema_of(schema), mine) for address, schema, mine in addresses]


class RepairOutcome(StrEnum):
    """State of a row that a repair did not change."""

    DUE = "due already: the compensator sends them without a repair"
    HELD = "held by a sender: it sends them, or they fall due when its lease ends"
    PARKED = "parked since: decide about them by hand"
    GONE = "not in the outbox any more: sent or discarded since they were planned"
    WAITING = "waiting in the outbox again already"


def why_unchanged(repairs: Sequence[Repair]) -> Counter[RepairOutcome]:
    """Counts why applied repairs changed nothing: the row is due already, leased, deleted, or inserted already.

    Raises DatabaseUnavailable.
    """
    counts: Counter[RepairOutcome] = Counter(
        RepairOutcome.WAITING for repair in repairs if repair.action is not RepairAction.MAKE_DUE
    )
    tables: dict[tuple[str, str | None, str], list[str]] = {}
    for repair in repairs:
        if repair.action is RepairAction.MAKE_DUE and repair.outbox is not None:
            tables.setdefault((repair.outbox.url, repair.outbox.schema, repair.table), []).append(repair.message_id)
    for (url, schema, table), ids in tables.items():
        with reading(DatabaseAddress.of(url)) as reader:
            outcomes = list(_outcomes(reader, quoted(reader.address, reader.address.schema_of(schema), table), ids))
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
