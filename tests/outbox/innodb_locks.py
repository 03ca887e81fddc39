"""What InnoDB says of locks: which transactions wait for one, and how many rows one has locked.

The server renews its view of transactions only where nobody has looked for a tenth of a second: who asks sooner is told
what was so before. Everybody asks through here, and so after a pause.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from sqlalchemy import Connection, TextClause, text

from tests.outbox.shop import Shop

_LOCK_WAITS: Final = text("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
_ROWS_LOCKED: Final = text("SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = :id")
_OPEN: Final = text("SELECT COUNT(*) FROM information_schema.innodb_trx")
_RENEWED_AFTER_SECONDS: Final = 0.15
_TRIES_MAX: Final = 400


def wait_for_lock_waits(shop: Shop, transactions: int = 1) -> None:
    """Return when so many transactions of the server, or more, wait for a lock. Raises TimeoutError after a minute."""
    for _ in range(_TRIES_MAX):
        if _ask(shop, _LOCK_WAITS) >= transactions:
            return
    raise TimeoutError(f"fewer than {transactions} transactions wait for a lock")


def rows_locked(shop: Shop, connection: Connection) -> int:
    """How many rows this connection's transaction has locked; 0 without a transaction."""
    return _ask(shop, _ROWS_LOCKED, id=connection.scalar(text("SELECT CONNECTION_ID()")))


def open_transactions(shop: Shop) -> int:
    """How many transactions the whole server has open."""
    return _ask(shop, _OPEN)


def _ask(shop: Shop, question: TextClause, **parameters: Any) -> int:
    threading.Event().wait(_RENEWED_AFTER_SECONDS)
    with shop.engine.connect() as connection:
        return int(connection.scalar(question, parameters) or 0)
