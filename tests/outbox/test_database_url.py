"""Reading a database's URL, and the words in which a database's errors reach people. No server is asked."""

from __future__ import annotations

import pymysql
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from outbox.store.database import translate
from outbox.store.database_url import database_url, read_url
from outbox_core.common.errors import ConfigurationError, OutboxError, SchemaMissing

URL = make_url("mysql+pymysql://app:hunter2@db/shop?connect_timeout=5&ssl_key_password=hunter3")


def translated(code: int, said: str) -> OutboxError:
    """What becomes of this error of the server."""
    return translate(OperationalError("SELECT 1", {}, pymysql.err.OperationalError(code, said)), URL)


@pytest.mark.parametrize(
    "text", ["shop.db", "mysql+pymysql://app:hunter2@db:port/shop", "mysql+pymysql://a:hunter2@[::1/x"]
)
def test_what_is_no_url_is_refused_with_one_that_is_and_without_its_password(text: str) -> None:
    for read in (read_url, lambda one: database_url(one, password_file=None)):
        with pytest.raises(
            ConfigurationError, match=r"use one like mysql\+pymysql://user@host:3306/database"
        ) as refused:
            read(text)
        assert "hunter2" not in str(refused.value)


def test_a_database_that_the_url_names_and_that_is_not_there_is_to_be_created() -> None:
    error = translated(1049, "Unknown database 'shop'")

    assert isinstance(error, SchemaMissing)
    assert "there is no database 'shop'" in str(error)
    assert "create it" in str(error)


def test_a_schema_of_the_outbox_that_is_not_there_is_made_by_the_upgrade() -> None:
    assert "run: outbox db upgrade" in str(translated(1049, "Unknown database 'outbox'"))


def test_a_refused_user_is_told_to_look_at_the_password_and_one_without_a_privilege_at_the_grants() -> None:
    refused = str(translated(1045, "Access denied for user 'app'@'db' (using password: YES)"))
    lacking = str(translated(1142, "INSERT command denied to user 'app'@'db' for table 'message'"))

    assert "the user or its password" in refused
    assert "grants" not in refused
    assert "check its grants" in lacking
    assert "SELECT, INSERT, UPDATE, DELETE" in lacking


def test_an_error_shows_neither_password_nor_options_of_the_url() -> None:
    said = str(translated(2003, "Can't connect"))

    assert "mysql+pymysql://app:***@db/shop (" in said
    assert "hunter" not in said
