"""Creates and upgrades the outbox tables with alembic."""

from outbox.migrate.schema_upgrade import upgrade

__all__ = ["upgrade"]
