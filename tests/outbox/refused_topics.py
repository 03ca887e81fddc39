"""A rule of the business's on a table of the outbox's, which takes no row of a topic that is not listed."""

from __future__ import annotations

from tests.outbox.shop import Shop


def refuse_topics(shop: Shop, table: str) -> None:
    """Refuse every row of this table: `inbox` or `message`."""
    namespace = shop.database.namespace
    name = namespace.named(table)
    if namespace.schema is None:
        shop.execute(f"CREATE TRIGGER refuse BEFORE INSERT ON {name} BEGIN SELECT RAISE(ABORT, 'no such topic'); END")
        return
    column = "VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY"
    shop.execute(f"CREATE TABLE {namespace.schema}.topics (name {column}) ENGINE=InnoDB")
    shop.execute(
        f"ALTER TABLE {namespace.schema}.{name} ADD CONSTRAINT listed FOREIGN KEY (topic) "
        f"REFERENCES {namespace.schema}.topics (name)"
    )
