"""${message}

Revision: ${up_revision}
Follows: ${down_revision | comma,n}
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    namespace = context.config.attributes["namespace"]
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    namespace = context.config.attributes["namespace"]
    ${downgrades if downgrades else "pass"}
