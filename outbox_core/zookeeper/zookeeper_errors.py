"""Errors of a session with ZooKeeper; a retry can help with all of them."""

from __future__ import annotations

from outbox_core.common.errors import BrokerUnavailable


class CoordinatorUnavailable(BrokerUnavailable):
    """ZooKeeper did not confirm a request in time; a write may have happened."""


class SessionEnded(CoordinatorUnavailable):
    """The session with ZooKeeper is over: nothing that it owned is owned any more."""
