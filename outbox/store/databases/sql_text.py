"""Statements that are written as text: names as the server reads them, and SQL that SQLAlchemy sends unchanged."""

from __future__ import annotations

from sqlalchemy import TextClause, text
from sqlalchemy.engine import Dialect


def name_in_sql(dialect: Dialect, *names: str | None) -> str:
    """Returns names as the server reads them in SQL, quoted where they need it and joined by dots; None is left out.

    For statements that are written as text; SQLAlchemy's own quoting doubles % for the driver, which text_of() does.
    """
    quote = dialect.identifier_preparer.quote
    joined = ".".join(quote(name) for name in names if name is not None)
    return joined.replace("%%", "%") if dialect.paramstyle in {"format", "pyformat"} else joined


def text_of(sql: str) -> TextClause:
    """Returns SQL without parameters as SQLAlchemy sends it unchanged: a colon in a name is no parameter's."""
    return text(sql.replace(":", r"\:"))
