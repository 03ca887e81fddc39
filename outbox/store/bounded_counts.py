"""Counts of a message table's rows that stop at a limit, so that they never scan millions of rows. Builds SQL only."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, FromClause, func, literal, select
from sqlalchemy.engine import Dialect

from outbox.store.schema import along_due_index

RETRYING_ATTEMPTS: Final = 7
"""A pending row with so many attempts counts as retrying: by the default backoff it has been refused for a minute. The
producer's own attempt counts, an outage of the broker does not.
"""


def count_rows(message: FromClause, condition: ColumnElement[bool], *, rows_max: int) -> Any:
    """Returns a scalar subquery: how many rows the condition holds for, at most `rows_max`."""
    inner = select(literal(1)).select_from(message).where(condition).limit(rows_max).subquery()
    return select(func.count()).select_from(inner).scalar_subquery()


def count_retrying(
    message: FromClause, pending: ColumnElement[bool], *, rows_max: int, table: str | None, dialect: Dialect
) -> Any:
    """Returns a scalar subquery: how many of the `rows_max` pending rows that fall due first are retrying.

    The index (state, due_at_us, id) does not contain the attempts, so that each row is looked up: `table` is the name
    for a hint that makes MySQL and MariaDB scan the index; None: no hint, the server chooses.
    """
    sample = (
        select(message.c.attempts)
        .where(pending)
        .order_by(message.c.state, message.c.due_at_us, message.c.id)
        .limit(rows_max)
    )
    if table is not None:
        sample = along_due_index(sample, message, table=table, dialect=dialect)
    inner = sample.subquery()
    return select(func.count()).select_from(inner).where(inner.c.attempts >= RETRYING_ATTEMPTS).scalar_subquery()
