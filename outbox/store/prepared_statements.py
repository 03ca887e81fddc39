"""Statements that are compiled once and then run directly on the driver: for those that run for every batch of rows.

SQLAlchemy builds an IN list of hundreds of parameters again for each execution, which takes longer than the server's
response: 60 % of the sender thread's time, and a quarter of a compensator's. Statements are still written in
SQLAlchemy's expression language; only the compilation is done ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from sqlalchemy import BindParameter, Connection, CursorResult, String, bindparam
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

from outbox.store.databases.database_port import Failure
from outbox.store.databases.supported import database_of, failure_of

_SIZES: Final = (1, 10, 50, 200, 1_000)
"""Lists are padded to one of these lengths with their last id, so that few statements are compiled. Longer ones are run
in parts."""


@dataclass(frozen=True, slots=True)
class PreparedStatement:
    """A compiled statement, and the names of its parameters in order.

    `constants` are parameters that the compiler has added.
    """

    sql: str
    names: tuple[str, ...]
    constants: Mapping[str, object]

    def run(self, connection: Connection, values: Mapping[str, object]) -> CursorResult[Any]:
        """Run it on the connection; results are as the driver gives them."""
        bound_values = {**self.constants, **values} if self.constants else values
        return connection.exec_driver_sql(self.sql, tuple(bound_values[name] for name in self.names))


def prepare(dialect: Dialect, statement: ClauseElement) -> PreparedStatement:
    """Compile a statement whose parameters are all named by bindparam()."""
    # exec_driver_sql takes a tuple of parameters, which all our drivers accept in their positional style.
    positional = cast("Any", type(dialect))(paramstyle=database_of(dialect).paramstyle)
    compiled = cast("Any", statement.compile(dialect=positional))
    constants = {name: constant for name, constant in compiled.params.items() if constant is not None}
    return PreparedStatement(str(compiled), tuple(compiled.positiontup or ()), constants)


@dataclass(frozen=True, slots=True)
class HintedStatement:
    """A statement with an index hint, and the same without it: an index that was created by hand may have another name,
    and then the server chooses.
    """

    hinted: PreparedStatement
    plain: PreparedStatement

    def run(self, connection: Connection, values: Mapping[str, object]) -> CursorResult[Any]:
        """Run it on the connection; results are as the driver gives them."""
        try:
            return self.hinted.run(connection, values)
        except DBAPIError as error:
            if failure_of(error.orig) is not Failure.INDEX_MISSING:
                raise
            return self.plain.run(connection, values)


Build = Callable[[list[BindParameter[str]]], ClauseElement]
"""Builds the statement, given the parameters for the ids. Must be the same object each time: it is the cache's key."""


class PreparedByIds:
    """Statements over lists of row ids, each compiled once for each of a few lengths. Safe in any thread."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._prepared: dict[tuple[object, int], PreparedStatement] = {}

    def rows(self, connection: Connection, build: Build, ids: Sequence[str], **values: object) -> list[tuple[Any, ...]]:
        """Returns the rows of a SELECT, as the driver gives them; in the statement's order among 1,000 ids."""
        return [tuple(row) for part in _parts(ids) for row in self._run(connection, build, part, values)]

    def count(self, connection: Connection, build: Build, ids: Sequence[str], **values: object) -> int:
        """Returns the row count of an UPDATE, DELETE or INSERT. Rows are locked in the sorted order of ids."""
        return sum(self._run(connection, build, part, values).rowcount for part in _parts(ids))

    def _run(
        self, connection: Connection, build: Build, ids: list[str], values: dict[str, object]
    ) -> CursorResult[Any]:
        size = next(size for size in _SIZES if size >= len(ids))
        prepared = self._prepared.get((build, size))
        if prepared is None:
            bound = [bindparam(f"id_{index}", type_=String()) for index in range(size)]
            prepared = self._prepared[(build, size)] = prepare(self._dialect, build(bound))
        padded = (*ids, *(ids[-1:] * (size - len(ids))))
        return prepared.run(connection, {**values, **{f"id_{index}": row_id for index, row_id in enumerate(padded)}})


def _parts(ids: Sequence[str]) -> Iterator[list[str]]:
    """Yields the sorted ids in parts of at most the greatest length."""
    ordered = sorted(ids)
    for start in range(0, len(ordered), _SIZES[-1]):
        yield ordered[start : start + _SIZES[-1]]
