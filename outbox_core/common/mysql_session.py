"""The session variables of MySQL, MariaDB and Galera on which statements of ours depend, and their pinning on
connections that we open. No driver: it takes any DB-API cursor.

The business's connections keep their variables: our statements there depend on none of these (decision 121).
"""

from __future__ import annotations

from typing import Any, Final

_MODES: Final = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"
_PINNED: Final = (
    # These two cut and refuse what reads, the list of tables too, which SHOW returns.
    "sql_select_limit = 18446744073709551615",
    "sql_big_selects = 1",
    # Refuses to change or delete rows by a list of keys.
    "sql_safe_updates = 0",
    # So without PAD_CHAR_TO_FULL_LENGTH, which adds blanks to keys in columns of type CHAR; EMPTY_STRING_IS_NULL;
    # NO_BACKSLASH_ESCAPES, which asyncmy does not know; IGNORE_SPACE and ORACLE, which reserve more words.
    # SQLAlchemy quotes names by what the first connection of an engine had, which may be the business's: ANSI_QUOTES
    # stays as it is.
    f"sql_mode = IF(FIND_IN_SET('ANSI_QUOTES', @@SESSION.sql_mode), 'ANSI_QUOTES,{_MODES}', '{_MODES}')",
    # Else a COMMIT begins the next transaction, or ends the connection.
    "completion_type = 0",
    # Without these the servers do not look for duplicates, and MariaDB locks an empty table as a whole at an INSERT.
    "foreign_key_checks = 1",
    "unique_checks = 1",
    # SQLAlchemy reads columns and indexes of SHOW CREATE TABLE by their quotes.
    "sql_quote_show_create = 1",
    "sql_auto_is_null = 0",
    # Ids and keys that are alike at their beginning would be sorted as equal ones.
    "max_sort_length = 1024",
    # Errors are told apart by their texts where several have one code.
    "lc_messages = 'en_US'",
    # TIMESTAMP columns are read in it.
    "time_zone = '+00:00'",
    # A slow reader of many rows is cut off.
    "net_write_timeout = 60",
    "net_read_timeout = 30",
    "default_storage_engine = 'InnoDB'",
)
_PINNED_ON_MYSQL: Final = (
    "max_execution_time = 0",
    "transaction_read_only = 0",
    # Above it a list of keys is not looked up: all rows are read, and a DELETE waits for those that others have locked.
    "range_optimizer_max_mem_size = 8388608",
)
_PINNED_ON_MARIADB: Final = (
    "max_statement_time = 0",
    "tx_read_only = 0",
    # The same for lists of keys: one becomes a join, the other leaves the index.
    "in_predicate_conversion_threshold = 0",
    "optimizer_max_sel_arg_weight = 32000",
)
_SYNC_ALL: Final = 15
"""Before any statement a node waits for all that was committed on the others: reads, UPDATE and DELETE, INSERT, SHOW.

Without it a node that is behind reads a key's order without its oldest message, and a settlement finds no row.
"""


def pin_session(cursor: Any) -> None:
    """Sets all of these that the server has, on the cursor's connection, and commits nothing."""
    # First, and without a literal: under utf16 the servers do not understand the literals of the next statement.
    cursor.execute("SET SESSION collation_connection = utf8mb4_general_ci")
    # Comments by version, so that it is one statement for every server: MariaDB ignores those of MySQL 5.7 to 9.
    own = f"/*!80000 , {_session(_PINNED_ON_MYSQL)} */ /*M!100600 , {_session(_PINNED_ON_MARIADB)} */"
    cursor.execute(f"SET {_session(_PINNED)} {own}")
    cursor.execute("SHOW SESSION VARIABLES WHERE variable_name = 'wsrep_on' AND value = 'ON'")
    if cursor.fetchall():
        cursor.execute(f"SET SESSION wsrep_sync_wait = {_SYNC_ALL}")


def _session(assignments: tuple[str, ...]) -> str:
    return ", ".join(f"SESSION {assignment}" for assignment in assignments)
