"""Continuity: whether a driver's transaction is still the one that began, where no text of a statement tells.

A stored procedure may commit or roll back, so may what goes past SQLAlchemy on the driver's own connection, and SQLite
rolls back for some errors of one statement. A savepoint and the driver's status show it; neither is enough alone
(decision 115).
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import DBAPIConnection

from outbox.store.databases.database_port import Failure
from outbox.store.databases.supported import failure_of, known_database

UNSEEN: Final = "a statement that went past SQLAlchemy"
"""What ended the transaction, where only the driver's status shows that something did."""

# One name is enough: a doubt is settled before the next one. MySQL and MariaDB alone have statements that raise doubts.
_BEGIN: Final = "SAVEPOINT outbox_continuity"
_RELEASE: Final = "RELEASE SAVEPOINT outbox_continuity"


class Continuity:
    """What is known of one transaction of a driver's connection. Not thread-safe, as the connection is not."""

    __slots__ = ("_driver_connection", "_errors", "_has_transaction", "_was_open", "begins_by_itself", "doubted")

    def __init__(self, driver_connection: DBAPIConnection | None, dialect: Dialect) -> None:
        self._driver_connection: Any = driver_connection
        database = known_database(dialect)
        self._has_transaction = (
            None if database is None or driver_connection is None else database.transaction_status.get(dialect.driver)
        )
        self._was_open: bool = False
        self._errors: type[Exception] = dialect.loaded_dbapi.Error
        self.begins_by_itself: bool = database is None or database.begins_by_itself
        """Whether a statement behind its end begins another one; so do those of a database that is not ours."""
        self.doubted: str | None = None
        """The words of the statement that may have ended the transaction, until the server is asked."""

    def doubt(self, words: str) -> None:
        """Called before a statement that may end the transaction: begin the savepoint that ends with it. Raises the
        driver's error; `words`: the statement's, for the answer.

        The savepoint begins no transaction and no snapshot where there is none yet, and a SET TRANSACTION inside the
        procedure works as before. One that the procedure itself makes and rolls back to is inside ours, and harmless.
        """
        self._send(_BEGIN)
        self.doubted = words

    def settle(self) -> str | None:
        """Returns the words of the statement that has ended the transaction, if one has. Raises the driver's error.

        It is sent as late as can be: the result sets of a procedure are lost with the next statement. Another
        transaction may have begun, which has not our savepoint; nor has this one where the procedure has rolled back to
        an older savepoint, so that a part of it is gone.
        """
        words = self.doubted
        if words is None:
            return None
        try:
            self._send(_RELEASE)
        except self._errors as error:
            if failure_of(error) is not Failure.SAVEPOINT_MISSING:
                raise
            self.doubted, self._was_open = None, False
            return words
        self.doubted = None
        return None

    def check_status(self) -> bool:
        """Returns whether the driver's status shows that the transaction has ended since the last look. No I/O."""
        if self._has_transaction is None:
            return False
        was_open, self._was_open = self._was_open, self._has_transaction(self._driver_connection)
        return was_open and not self._was_open

    @property
    def has_seen_none(self) -> bool:
        """Returns whether the driver tells of transactions, and has told of none yet."""
        return self._has_transaction is not None and not self._was_open

    def expect_end(self) -> None:
        """Called before a statement whose text says that it ends the transaction: it is no news then."""
        self._was_open, self.doubted = False, None

    def _send(self, statement: str) -> None:
        with closing(self._driver_connection.cursor()) as cursor:
            cursor.execute(statement)
