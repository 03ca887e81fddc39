"""Counts of a message table's rows that stop at a limit, so that they never scan millions of rows. Builds SQL only."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, FromClause, Subquery, case, func, literal, select
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import database_of
from outbox.store.schema import along_due_index

RETRYING_ATTEMPTS: Final = 7
"""A pending row with so many attempts counts as retrying: by the default backoff it has been refused for a minute. The
producer's own attempt counts, an outage of the broker does not.
"""
OVERDUE_SECONDS: Final = 60.0
"""A message that is due for longer is overdue: `outbox status` and `outbox doctor` fail."""


def count_rows(message: FromClause, condition: ColumnElement[bool], *, rows_max: int) -> Any:
    """Returns a scalar subquery: how many rows the condition holds for, at most `rows_max`."""
    inner = select(literal(1)).select_from(message).where(condition).limit(rows_max).subquery()
    return select(func.count()).select_from(inner).scalar_subquery()


def sample_pending(
    message: FromClause, pending: ColumnElement[bool], *, rows_max: int, table: str | None, dialect: Dialect
) -> Subquery:
    """Returns a subquery with `attempts` and `wanted_at_us` of the `rows_max` pending rows that fall due first.

    The index (state, due_at_us, id) does not contain them, so that each row is looked up: `table` is the name for a
    hint that makes MySQL and MariaDB scan the index; None: no hint, the server chooses.
    """
    sample = (
        select(message.c.attempts, _wanted_at_us(message, dialect).label("wanted_at_us"))
        .where(pending)
        .order_by(message.c.state, message.c.due_at_us, message.c.id)
        .limit(rows_max)
    )
    if table is not None:
        sample = along_due_index(sample, message, table=table, dialect=dialect)
    return sample.subquery()


def retrying_rows(sample: Subquery) -> ColumnElement[int]:
    """Returns how many rows of the sample are retrying."""
    return func.count(case((sample.c.attempts >= RETRYING_ATTEMPTS, 1)))


def oldest_wanted_age_us(sample: Subquery, now_us: ColumnElement[int]) -> ColumnElement[int]:
    """Returns for how long the oldest row of the sample is wanted; NULL without a row, negative if none is yet."""
    return now_us - func.min(sample.c.wanted_at_us)


def _wanted_at_us(message: FromClause, dialect: Dialect) -> ColumnElement[int]:
    """Returns since when a message should be at the broker: its commit, or its due time if it waits for that here.

    Not its `due_at_us`: each probe of an outage puts the row off, and would make it young again. A row that waits for
    its due time here, for a timing store, is never due before it; one that the broker is to delay is due before.
    """
    database = database_of(dialect)
    deliver_at_us = message.c.deliver_at_ms * 1000
    waits_here = message.c.due_at_us >= deliver_at_us
    wanted_at_us = case(
        (waits_here, database.greatest(message.c.created_at_us, deliver_at_us)), else_=message.c.created_at_us
    )
    return database.least(message.c.due_at_us, wanted_at_us)
