"""The inbox: which messages a consumer group has handled, written in the handler's own transaction.

A message is known by its topic and id: others may publish to other topics under the same id. Not the handling.
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, insert, select
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import IntegrityError

from outbox.store.database import now_us
from outbox.store.schema import outbox_tables, schema_for


class InboxStore:
    """The inbox table's SQL. It opens no connection and commits nothing."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None) -> None:
        self._inbox = outbox_tables(schema_for(dialect, schema)).inbox
        self._now_us = now_us(dialect)
        self._insert = insert(self._inbox).values(
            consumer_group=bindparam("group"),
            message_id=bindparam("id"),
            topic=bindparam("on_topic"),
            handled_at_us=self._now_us,
        )

    def mark(self, connection: Connection, *, group: str, message_id: str, topic: str) -> bool:
        """Mark the message as handled; False when it was already.

        A concurrent duplicate waits here for the first one's transaction, then sees its outcome: handled, or rolled
        back and now ours to handle. The mark comes first in the transaction, so that it also keeps the order.
        """
        try:
            # In no savepoint: a duplicate undoes this statement alone, and after a deadlock there is no savepoint to
            # return to, so that its error would hide the deadlock's.
            connection.execute(self._insert, {"group": group, "id": message_id, "on_topic": topic})
        except IntegrityError:
            return False
        return True

    def handled(self, connection: Connection, *, group: str, message_id: str, topic: str) -> bool:
        """Whether the group has handled this message."""
        inbox = self._inbox
        statement = select(inbox.c.message_id).where(
            inbox.c.consumer_group == group, inbox.c.topic == topic, inbox.c.message_id == message_id
        )
        return connection.scalar(statement) is not None

    def purge(self, connection: Connection, *, older_than_us: int, limit: int) -> int:
        """Forget at most `limit` marks older than an age; returns how many.

        Keep them longer than any redelivery lasts. For a connection at READ COMMITTED: it locks what it deletes, and
        nothing of the consumers at work.
        """
        inbox = self._inbox
        old = (
            select(
                inbox.c.consumer_group.label("of_group"),
                inbox.c.topic.label("of_topic"),
                inbox.c.message_id.label("of_id"),
            )
            .where(inbox.c.handled_at_us < self._now_us - older_than_us)
            .order_by(inbox.c.handled_at_us)
            .limit(limit)
        )
        found = sorted(tuple(row) for row in connection.execute(old))
        if not found:
            return 0
        # One by one by the whole primary key: for a list of ids the optimizer may read all of a group, and would wait
        # for each mark that is not committed yet.
        statement = delete(inbox).where(
            inbox.c.consumer_group == bindparam("of_group"),
            inbox.c.topic == bindparam("of_topic"),
            inbox.c.message_id == bindparam("of_id"),
        )
        marks = [{"of_group": group, "of_topic": topic, "of_id": one} for group, topic, one in found]
        return connection.execute(statement, marks).rowcount
