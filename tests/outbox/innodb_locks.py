"""Waits until InnoDB says that transactions wait for locks."""

from __future__ import annotations

import threading
from typing import Final

from sqlalchemy import text

from tests.outbox.shop import Shop

_ASKED: Final = text("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
_EVERY_SECONDS: Final = 0.15
"""The server renews the view only where nobody has looked for a tenth of a second: who asks more often sees no news."""
_TRIES_MAX: Final = 400


def wait_for_lock_waits(shop: Shop, transactions: int = 1) -> None:
    """Return when so many transactions of the server, or more, wait for a lock. Raises TimeoutError after a minute."""
    with shop.engine.connect() as connection:
        for _ in range(_TRIES_MAX):
            threading.Event().wait(_EVERY_SECONDS)
            if (connection.scalar(_ASKED) or 0) >= transactions:
                return
            connection.rollback()
    raise TimeoutError(f"fewer than {transactions} transactions wait for a lock")
