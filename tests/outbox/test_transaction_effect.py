"""What a statement's text does to its transaction, as MySQL, MariaDB and SQLite document it."""

from __future__ import annotations

import pytest
from sqlalchemy.engine import make_url

from outbox.producer.transaction_effect import Effect, first_words, transaction_effect

MYSQL, SQLITE = make_url("mysql+pymysql://").get_dialect()(), make_url("sqlite://").get_dialect()()
ENDS_EVERYWHERE = [
    "COMMIT",
    " commit ;",
    "/* why */ Commit",
    "-- why\nROLLBACK",
    "ROLLBACK WORK",
    "ROLLBACK AND CHAIN",
    "BEGIN",
]
ENDS_ON_MYSQL = [
    "CREATE TABLE a (b INT)", "drop table a", "CREATE OR REPLACE TABLE a (b INT)", "ALTER TABLE a ADD c INT",
    "TRUNCATE a", "RENAME TABLE a TO b", "LOCK TABLES a WRITE", "lock table a read", "UNLOCK TABLES",
    "START TRANSACTION READ ONLY",
    "SET autocommit = 1", "SET @@session.autocommit=ON", "SET a = 1, autocommit = 1", "GRANT SELECT ON a TO b",
    "ANALYZE NO_WRITE_TO_BINLOG TABLE a", "OPTIMIZE TABLE a", "FLUSH TABLES", "/*!50000 COMMIT */", "#why\nCOMMIT",
    "SET STATEMENT max_statement_time = 1 FOR TRUNCATE a",
]  # fmt: skip
GOES_ON = [
    "SELECT 1", "select 1", "(SELECT 1)", "SHOW TABLES", "SET autocommit = 0", "SET NAMES utf8mb4",
    "WITH a AS (SELECT 1) SELECT 1",
    "CREATE TEMPORARY TABLE a (b INT)", "DROP TEMPORARY TABLE a", "CREATE OR REPLACE TEMPORARY TABLE a (b INT)",
    "INSERT INTO a VALUES ('COMMIT')", "UPDATE a SET b = 'ROLLBACK'", "REPLACE INTO a VALUES (1)", "XA END 'x'",
    "ANALYZE FORMAT=JSON SELECT 1", "EXPLAIN SELECT 1", "SELECT GROUP_CONCAT(a SEPARATOR '; ') FROM b",
    "INSERT INTO a VALUES ('it''s; COMMIT', \"\\\"; COMMIT\")", "UPDATE a SET b = 1; -- as; was asked", "SELECT 1 ; ",
]  # fmt: skip
MAY_END_ON_MYSQL = [
    "CALL settle()", "call shop.settle(1, 'x')", "/* why */ CALL settle", "/*!50000 CALL settle() */",
    "SET STATEMENT max_statement_time = 1 FOR CALL settle()", "EXECUTE prepared USING @a", "EXECUTE IMMEDIATE 'COMMIT'",
    "BEGIN NOT ATOMIC ROLLBACK; END", "begin rollback; end", "IF 1 THEN ROLLBACK; END IF",
    "CASE WHEN 1 THEN ROLLBACK; END CASE", "WHILE @a DO ROLLBACK; END WHILE", "REPEAT ROLLBACK; UNTIL 1 END REPEAT",
    "FOR i IN 1..2 DO ROLLBACK; END FOR", "LOOP ROLLBACK; END LOOP", "DECLARE i INT; BEGIN ROLLBACK; END",
    "UPDATE a SET b = ';'; ROLLBACK", "SELECT 1;COMMIT", "INSERT INTO a VALUES (1); /* so */ COMMIT",
]  # fmt: skip


@pytest.mark.parametrize("statement", [*ENDS_EVERYWHERE, *ENDS_ON_MYSQL])
def test_mysql_ends_the_transaction(statement: str) -> None:
    assert transaction_effect(statement, MYSQL).effect is Effect.ENDS


@pytest.mark.parametrize("statement", ENDS_EVERYWHERE)
def test_sqlite_ends_the_transaction(statement: str) -> None:
    assert transaction_effect(statement, SQLITE).effect is Effect.ENDS


@pytest.mark.parametrize("statement", ["CREATE TABLE a (b INT)", "DROP TABLE a", "ALTER TABLE a ADD c INT"])
def test_the_tables_of_sqlite_are_made_and_dropped_inside_the_transaction(statement: str) -> None:
    assert transaction_effect(statement, SQLITE).effect is Effect.WRITES


@pytest.mark.parametrize("statement", MAY_END_ON_MYSQL)
def test_what_runs_statements_that_are_not_in_its_text_or_several_may_end_the_transaction(statement: str) -> None:
    assert transaction_effect(statement, MYSQL).effect is Effect.MAY_END


@pytest.mark.parametrize("statement", ["BEGIN", "BEGIN WORK", "begin;", "BEGIN -- here"])
def test_a_begin_that_opens_no_block_ends_the_transaction_before_it(statement: str) -> None:
    assert transaction_effect(statement, MYSQL).effect is Effect.ENDS


@pytest.mark.parametrize("statement", GOES_ON)
def test_the_transaction_goes_on(statement: str) -> None:
    assert transaction_effect(statement, MYSQL).effect in {Effect.READS, Effect.WRITES}


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO a VALUES (1)",
        "with b as (select 1) update a set c = 1",
        "replace a values (1)",
        "set statement max_statement_time=1, lock_wait_timeout=1 for update a set b = 1",
    ],
)
def test_what_changes_rows_writes(statement: str) -> None:
    assert transaction_effect(statement, MYSQL).effect is Effect.WRITES


@pytest.mark.parametrize(
    ("statement", "effect"),
    [
        ("SAVEPOINT `Here`", Effect.BEGINS_SAVEPOINT),
        ("savepoint here;", Effect.BEGINS_SAVEPOINT),
        ("ROLLBACK TO SAVEPOINT here", Effect.ROLLS_BACK_TO_SAVEPOINT),
        ("rollback work to HERE", Effect.ROLLS_BACK_TO_SAVEPOINT),
        ('ROLLBACK TRANSACTION TO SAVEPOINT "here"', Effect.ROLLS_BACK_TO_SAVEPOINT),
        ("RELEASE SAVEPOINT here", Effect.RELEASES_SAVEPOINT),
        ("RELEASE here", Effect.RELEASES_SAVEPOINT),
    ],
)
def test_savepoints_are_told_apart_by_name_without_case_and_quotes(statement: str, effect: Effect) -> None:
    found = transaction_effect(statement, MYSQL)

    assert (found.effect, found.savepoint) == (effect, "here")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("/* 'secret' */ SET PASSWORD = 'secret'", "SET PASSWORD"),
        ("CALL  shop.settle('secret')", "CALL shop.settle"),
        ("CALL `my proc`('secret')", "CALL `my proc`"),
        ("EXECUTE IMMEDIATE'secret'", "EXECUTE IMMEDIATE"),
        ("IF 4711 > @a THEN ROLLBACK; END IF", "IF"),
        ("BEGIN NOT ATOMIC ROLLBACK; END", "BEGIN NOT ATOMIC"),
        ("SET autocommit=1", "SET autocommit"),
        ("SET STATEMENT max_statement_time=1 FOR /* so */ CALL settle(1)", "CALL settle"),
        ("rollback", "rollback"),
    ],
)
def test_an_error_shows_the_first_words_and_no_value(statement: str, words: str) -> None:
    assert first_words(statement) == words


def test_what_reads_within_settings_of_its_own_reads() -> None:
    statement = "SET STATEMENT max_statement_time=1 FOR SELECT 1 FROM a FOR UPDATE"

    assert transaction_effect(statement, MYSQL).effect is Effect.READS
