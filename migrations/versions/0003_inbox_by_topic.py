"""Changes the inbox's primary key: a message is identified by its topic and id.

Revision: 0003
Follows: 0002
Code of revision 0002 works with it: it names the columns that it writes, and has always written the topic. So every
existing row keeps its meaning.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from outbox.migrate import idempotent_ddl as steps

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the topic to the key."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    steps.replace_primary_key(f"{prefix}inbox", ["consumer_group", "topic", "message_id"], schema=schema)


def downgrade() -> None:
    """Remove the topic from the key. Of marks of one id on several topics only one can be kept."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    group, message, topic = (sa.column(name, sa.String) for name in ("consumer_group", "message_id", "topic"))
    inbox = sa.table(f"{prefix}inbox", group, message, topic, schema=schema)
    kept = sa.select(group, message, sa.func.min(topic)).select_from(inbox).group_by(group, message).subquery()
    op.execute(sa.delete(inbox).where(sa.tuple_(group, message, topic).not_in(sa.select(kept))))
    steps.replace_primary_key(f"{prefix}inbox", ["consumer_group", "message_id"], schema=schema)
