"""Brings the outbox tables up to date, by alembic."""

from outbox.migrate.schema_upgrade import upgrade

__all__ = ["upgrade"]
