"""Errors of the delay cluster; a retry can help with all of them, on this node or on another one."""

from __future__ import annotations

from outbox_core.common.errors import BrokerUnavailable


class NotOwner(BrokerUnavailable):
    """The shard has no owner now, or this node may not act for it; the message names the shard and the reason."""
