"""Stored procedures of the shop that end the transaction of their caller, and some that do not. Not a test."""

from __future__ import annotations

from tests.outbox.shop import Shop

PROCEDURES = {
    "abandon": "BEGIN DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; END; SIGNAL SQLSTATE '45000'; END",
    "abandon_loudly": (
        "BEGIN DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END; SIGNAL SQLSTATE '45000'; END"
    ),
    "settle": "BEGIN INSERT INTO payment VALUES (50, ''); COMMIT; END",
    "settle_and_begin": "BEGIN COMMIT; START TRANSACTION; INSERT INTO payment VALUES (50, ''); END",
    "list_and_abandon": "BEGIN SELECT 1; SELECT 2; ROLLBACK; END",
    "list_one_and_abandon": "BEGIN SELECT 1; ROLLBACK; END",
    "abandon_part": "BEGIN ROLLBACK TO SAVEPOINT older; END",
    "good": "BEGIN INSERT INTO payment VALUES (50, ''); SELECT 1; SELECT 2; END",
    "good_inside": "BEGIN SAVEPOINT own; INSERT INTO payment VALUES (51, ''); ROLLBACK TO SAVEPOINT own; END",
    "good_serializable": "BEGIN SET TRANSACTION ISOLATION LEVEL SERIALIZABLE; INSERT INTO payment VALUES (50, ''); END",
}  # fmt: skip


def make_procedures(shop: Shop) -> None:
    """Make them in the shop's database."""
    with shop.engine.begin() as connection:
        for name, body in PROCEDURES.items():
            connection.exec_driver_sql(f"CREATE PROCEDURE {name}() {body}")
