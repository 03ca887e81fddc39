"""Decides why a group with waiting messages gets none. Pure: the watch (outbox_broker/engine/stall_watch.py) collects
the facts, and the route, the metric and the events tell the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StallReason(StrEnum):
    """What has to happen before the group gets a message is in the first place: the order is that of decide_stall()."""

    PAUSED = "paused"
    """An operator paused the group."""
    NO_CONSUMER = "no_consumer"
    """Messages are ready, and no consumer waits for any, or has asked lately."""
    CONSUMERS_BUSY = "consumers_busy"
    """Messages are ready, and the consumers, which hold others, do not ask for more."""
    GROUP_IN_FLIGHT_LIMIT = "group_in_flight_limit"
    """The group has `group_in_hand_max` unsettled messages, those that wait for another attempt among them."""
    BROKER_IN_FLIGHT_LIMIT = "broker_in_flight_limit"
    """All groups together have `in_hand_max` messages in flight, and this one has `group_in_hand_min` of its own."""
    KEY_ORDER = "key_order"
    """Each message that waits is behind an earlier one of its key, which is in flight or waits for another attempt."""
    RETRY_LATER = "retry_later"
    """Each message that waits has a time before which it is not delivered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFacts:
    """What is known of a group at one moment. Collected without a scan of its messages."""

    waiting: int
    """Messages that are not delivered, or wait for another attempt."""
    in_flight: int
    next_visible_ms: int | None
    """When the next unsettled message becomes visible; None: there is none."""
    has_fresh: bool
    """Whether a message at or above the group's position is durable."""
    filed: int
    """Messages that an ordered group has filed and not delivered."""
    has_filed_ready: bool
    """Whether one of them is the first of its key."""
    room: int
    """How many more messages the group may have unsettled."""
    room_of_all: int
    """How many more messages it may have in flight, by the limit of all groups together and its own minimum."""
    paused: bool
    is_asked_for: bool
    """Whether a consumer waits, or asked lately."""


def decide_stall(facts: StallFacts, *, now_ms: int) -> StallReason | None:
    """Returns why nothing is delivered; None if nothing waits, or what waits goes to the next consumer that asks."""
    is_visible = facts.next_visible_ms is not None and facts.next_visible_ms <= now_ms
    if not facts.waiting and not (facts.in_flight and is_visible):
        return None
    if facts.paused:
        return StallReason.PAUSED
    has_new = facts.has_fresh or facts.has_filed_ready
    if is_visible or (has_new and facts.room > 0 and facts.room_of_all > 0):
        if facts.is_asked_for:
            return None
        # What is in flight and not visible is held by a consumer that is alive, as far as its invisible time tells.
        return StallReason.CONSUMERS_BUSY if facts.in_flight and not is_visible else StallReason.NO_CONSUMER
    if has_new:
        return StallReason.GROUP_IN_FLIGHT_LIMIT if facts.room <= 0 else StallReason.BROKER_IN_FLIGHT_LIMIT
    if facts.filed:
        return StallReason.KEY_ORDER
    # What is left waits for its time; or, if nothing is unsettled, for the sync of its publish.
    return StallReason.RETRY_LATER if facts.next_visible_ms is not None else None
