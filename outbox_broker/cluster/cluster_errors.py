"""Errors of the delay cluster; a retry can help with all of them, on this node or on another one."""

from __future__ import annotations

from outbox_core.common.errors import BrokerUnavailable


class CoordinatorUnavailable(BrokerUnavailable):
    """ZooKeeper did not confirm a request in time; a write may have happened."""


class SessionEnded(CoordinatorUnavailable):
    """The session with ZooKeeper is over: nothing that it owned is owned any more."""


class NotOwner(BrokerUnavailable):
    """The shard has no owner now, or this node may not act for it; the message names the shard and the reason."""
