"""How MySQL and MariaDB are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote

import pymysql
from pymysql.cursors import Cursor, SSCursor

from outbox_core.common.errors import ConfigurationError
from outbox_core.common.mysql_session import pin_session
from outbox_core.common.table_namespace import TableNamespace, namespace_among
from spark_reconcile.core.plausible_times import EARLIEST_MS
from spark_reconcile.core.time_buckets import DAY_MS
from spark_reconcile.sources.databases.source_database import (
    CONNECT_SECONDS,
    DATE,
    INTEGERS,
    READ_SECONDS,
    TIMES,
    Address,
    Query,
    SourceDatabase,
    TimeBounds,
)

_DEFAULT_PORT: Final = 3306
_QUOTED_OR_VALUE: Final = re.compile(r"`(?:[^`]|``)*`|\?")
_TLS: Final = "ssl_"
_CHECK_HOSTNAME: Final = "ssl_check_hostname"
_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}
"""As SQLAlchemy reads them."""
_PASSED_ON: Final = frozenset({"unix_socket", "ssl_ca", "ssl_cert", "ssl_key", _CHECK_HOSTNAME})
_NOT_NEEDED: Final = frozenset({"charset"})
_NO_SUCH_TABLE: Final = frozenset({1146, 1049, 1054})
_NOT_UNDERSTOOD: Final = 1064
_NOT_GRANTED: Final = frozenset({1227, 1044, 1045})
_ACCESS_DENIED: Final = frozenset({1044, 1045, 1142, 1698})
_ASKED_OF_MYSQL: Final = ("SHOW REPLICA STATUS", "SHOW SLAVE STATUS")
_ASKED_OF_MARIADB: Final = ("SHOW ALL SLAVES STATUS",)
_IDENTITY: Final = ("server_uuid", "server_uid", "hostname", "port", "server_id", "datadir")
"""MySQL has the first, MariaDB may have the second; the others distinguish older MariaDB servers."""
_FRACTION: Final = re.compile(r"(?:datetime|timestamp)\((\d)\)")
_MILLISECOND_DIGITS: Final = 3


class MySqlSource(SourceDatabase):
    """MySQL and MariaDB, by PyMySQL."""

    # -- connections -------------------------------------------------------------------------------------------------

    schemes: frozenset[str] = frozenset({"mysql", "mariadb"})
    is_file: bool = False
    quote: str = "`"
    driver_error: type[Exception] = pymysql.MySQLError

    def address(self, url: SplitResult) -> Address | None:
        if not url.hostname:
            return None
        return Address(
            database=unquote(url.path.strip("/")),
            host=url.hostname,
            port=url.port or _DEFAULT_PORT,
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            options=_options(url.query),
        )

    def shown(self, address: Address) -> str:
        socket = dict(address.options).get("unix_socket")
        where = f"{address.host}:{address.port}" if socket is None else f"{address.host} ({socket})"
        return f"{where}/{address.database}"

    def tables_at(self, schema: str | None, *, current: str) -> TableNamespace:
        return namespace_among(schema, current=current)

    def open(self, address: Address, *, writes: bool = False) -> Any:
        connection = pymysql.connect(
            host=address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            database=address.database or None,
            charset="utf8mb4",
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            cursorclass=Cursor if writes else SSCursor,
            autocommit=not writes,
            **_connect_options(address),
        )
        try:
            with closing(connection.cursor(Cursor)) as cursor:
                pin_session(cursor)
        except BaseException:
            connection.close()
            raise
        return connection

    def begin_snapshot(self, cursor: Any) -> None:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")

    def begin_write(self, cursor: Any) -> None:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def for_driver(self, statement: str) -> str:
        return _QUOTED_OR_VALUE.sub(_for_driver, statement)  # a database's name may have ? and %

    # -- errors ------------------------------------------------------------------------------------------------------

    def is_table_missing(self, error: Exception) -> bool:
        return _code(error) in _NO_SUCH_TABLE

    def is_access_denied(self, error: Exception) -> bool:
        return _code(error) in _ACCESS_DENIED

    def undecodable_column(self, error: Exception) -> None:
        return None  # the server converts texts to the connection's character set

    def is_unsupported(self, error: Exception) -> bool:
        return _code(error) == _NOT_UNDERSTOOD

    def is_not_granted(self, error: Exception) -> bool:
        return _code(error) in _NOT_GRANTED

    # -- what a server says of itself --------------------------------------------------------------------------------

    version_query: str = "SELECT VERSION()"
    read_only_query: str = "SELECT @@global.read_only"
    identity_query: Query = Query(
        f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({', '.join('?' * len(_IDENTITY))})", _IDENTITY
    )

    def replica_statements(self, version: str) -> Sequence[str]:
        return _ASKED_OF_MARIADB if "mariadb" in version.lower() else _ASKED_OF_MYSQL

    # -- the catalog -------------------------------------------------------------------------------------------------

    def columns_query(self, table: str, schema: str | None) -> Query:
        return Query(
            "SELECT column_name, column_type FROM information_schema.columns "
            "WHERE table_schema = ? AND table_name = ? ORDER BY ordinal_position",
            (schema, table),
        )

    def tables_query(self, schema: str | None) -> Query:
        return Query("SELECT table_name FROM information_schema.tables WHERE table_schema = ?", (schema,))

    def leading_index_query(self, table: str, column: str, schema: str | None) -> Query:
        return Query(
            "SELECT 1 FROM information_schema.statistics "
            "WHERE table_schema = ? AND table_name = ? AND column_name = ? AND seq_in_index = 1 LIMIT 1",
            (schema, table, column),
        )

    def collation_query(self, table: str, column: str, schema: str | None) -> Query:
        return Query(
            "SELECT character_set_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = ? AND table_name = ? AND column_name = ?",
            (schema, table, column),
        )

    def row_count_query(self, table: str, schema: str | None, *, quoted_table: str) -> Query:
        return Query(
            "SELECT coalesce(table_rows, 0) FROM information_schema.tables WHERE table_schema = ? AND table_name = ?",
            (schema, table),
        )

    # -- expressions -------------------------------------------------------------------------------------------------

    now_us: str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    from_nothing: str = "FROM DUAL"

    def milli(self, column: str) -> str:
        return f"{column} DIV 1000"

    def whole_number(self, expression: str) -> str:
        return f"CAST({expression} AS SIGNED)"

    def text(self, column: str) -> str:
        return f"CAST({column} AS CHAR)"

    def key_text(self, column: str, kind: str) -> str:
        # Plus 0: the text of a ZEROFILL has zeros that the number has not, and that of a BIT is its bytes.
        is_number = kind.startswith((*INTEGERS, "bit", "decimal"))
        return f"CAST({column} + 0 AS CHAR)" if is_number else self.text(column)

    def hex_digits(self, column: str) -> str:
        return f"HEX({column})"

    def joined(self, parts: Sequence[str], *, by: str) -> str:
        return f"CONCAT_WS('{by}', {', '.join(parts)})"

    def collated(self, expression: str, *, charset: str, collation: str) -> str:
        return f"CONVERT({expression} USING {charset}) COLLATE {collation}"

    def time_ms(self, column: str, kind: str) -> str | None:
        return f"(({_since_epoch(column)}) DIV 1000)" if kind.startswith(TIMES) else None

    def time_unit_ms(self, column: str, kind: str) -> str:
        """DATETIME has whole seconds unless it says otherwise, and rounds half up."""
        if kind == DATE:
            return str(DAY_MS)
        digits = _FRACTION.match(kind)
        return str(10 ** max(0, _MILLISECOND_DIGITS - int(digits[1]))) if digits else "1000"

    def time_bounds(
        self, column: str, kind: str, bounds_ms: Sequence[int], *, latest_ms: int, is_sought: bool
    ) -> TimeBounds:
        no_such_day = _no_such_day(column, kind, latest_ms=latest_ms, is_sought=is_sought)
        return TimeBounds(column, f"{column} IS NULL OR {no_such_day}", [_datetime(bound) for bound in bounds_ms])


def _code(error: Exception) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def _for_driver(matched: re.Match[str]) -> str:
    return "%s" if matched[0] == "?" else matched[0].replace("%", "%%")


def _connect_options(address: Address) -> dict[str, Any]:
    """Returns the url's options as SQLAlchemy passes them on: with `ssl_ca` and the like as keywords of their own,
    PyMySQL encrypts, and verifies no certificate.
    """
    tls: dict[str, Any] = {}
    other_options: dict[str, Any] = {}
    for name, value in address.options:
        if name == _CHECK_HOSTNAME:
            tls["check_hostname"] = _FLAGS[value.lower()]
        elif name.startswith(_TLS):
            tls[name.removeprefix(_TLS)] = value
        else:
            other_options[name] = value
    return {**other_options, "ssl": tls} if tls else other_options


def _options(query: str) -> tuple[tuple[str, str], ...]:
    options = [(name, value) for name, value in parse_qsl(query) if name not in _NOT_NEEDED]
    for name, value in options:
        if name not in _PASSED_ON:
            raise ConfigurationError(
                f"the url's option {name!r} is not understood here; known: {', '.join(sorted(_PASSED_ON))}"
            )
        if name == _CHECK_HOSTNAME and value.lower() not in _FLAGS:
            raise ConfigurationError(f"the url's option {name} is true or false, not {value!r}")
    return tuple(options)


def _no_such_day(column: str, kind: str, *, latest_ms: int, is_sought: bool) -> str:
    """Condition: a date is of no day that the calendar has, like 31 February, or of month 00 or day 00.

    In an index these stand between the last moment of a month and the first of the next one; without an index on the
    column every row is looked at in any case.
    """
    if not is_sought:
        return f"({_since_epoch(column)}) IS NULL"
    last = datetime.fromtimestamp(latest_ms / 1000, UTC)
    months = [
        datetime(year, month, 1, tzinfo=UTC)
        for year in range(datetime.fromtimestamp(EARLIEST_MS / 1000, UTC).year, last.year + 1)
        for month in range(1, 13)
    ]
    # The last moment by the column's own precision: to look a finer one up in the index, MySQL rounds it up.
    digits = _FRACTION.match(kind)
    moment = "" if kind == DATE else " 23:59:59" + (f".{'9' * int(digits[1])}" if digits else "")
    return " OR ".join(
        f"({column} > '{month - timedelta(days=1):%Y-%m-%d}{moment}' AND {column} < '{month:%Y-%m-%d}')"
        for month in months
        if month <= last
    )


def _since_epoch(column: str) -> str:
    """A date as microseconds, null for a day that there is not: MariaDB counts 31 February on into March."""
    is_day = f"DAYOFMONTH({column}) BETWEEN 1 AND DAYOFMONTH(LAST_DAY({column}))"
    return f"CASE WHEN {is_day} THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column}) END"


def _datetime(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
