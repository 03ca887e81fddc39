"""Kinds of faults between the broker and consumer groups, for one booking each, as in faults.

They need the broker's actions and an inbox. Nothing is written to a disk here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from benchmarks.reconcile.planting import (
    DUE_AFTER_MS,
    FILTERED,
    GROUPS,
    HANDED_AFTER_MS,
    HANDLED_AFTER_MS,
    JOINED,
    MAIL,
    MINUTE_MS,
    PAUSED,
    SECOND_MS,
    TICKETS,
    Kind,
    Message,
    Planted,
    made_just_now,
    reminder,
    renamed,
    rewritten,
)
from outbox_core.journal import journal


def scheduled(p: Planted, one: Message) -> None:
    due = reminder(p, one, due_ms=p.now_ms + 24 * 60 * MINUTE_MS)
    p.schedule(due)
    p.delivery(due, MAIL, "scheduled")


def fired_in_time(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.done(due, p.fire(due), since_ms=due.due_ms)


def stuck(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.delivery(due, MAIL, "not_fired")


def delivered_early(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.done(due, p.fire(due), since_ms=(due.due_ms or 0) - HANDED_AFTER_MS - 1)
    p.delivery(due, MAIL, "delivered_early")


def delivered_after_cancel(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.actions.append(journal.Canceled(at_ms=one.created_ms + MINUTE_MS, ids=[due.id], topics=[""]))
    p.done(due, p.fire(due), since_ms=due.due_ms)
    p.message(due, "canceled", "message_canceled")
    p.delivery(due, MAIL, "delivered_after_cancel")


def handled_early(p: Planted, one: Message) -> None:
    due = one._replace(due_ms=one.created_ms + DUE_AFTER_MS)
    p.asked(due)
    p.sent(due)
    p.schedule(due)
    place, since_ms = p.fire(due), one.created_ms + DUE_AFTER_MS
    p.done(due, place, but=TICKETS, since_ms=since_ms)
    p.hand(due, place, TICKETS, at_ms=since_ms)
    p.handle(due, at_ms=since_ms - 5 * SECOND_MS)
    p.ack(due, place, TICKETS, at_ms=since_ms + SECOND_MS)
    p.delivery(due, TICKETS, "handled_early")


def delivered_late(p: Planted, one: Message) -> None:
    place = _stored(p, one, but=MAIL)
    p.hand(one, place, MAIL, at_ms=one.created_ms + DUE_AFTER_MS)
    p.ack(one, place, MAIL, at_ms=one.created_ms + DUE_AFTER_MS + SECOND_MS)
    p.delivery(one, MAIL, "delivered_late")


def ignored(p: Planted, one: Message) -> None:
    _stored(p, one, but=MAIL)
    p.delivery(one, MAIL, "not_delivered")


def waiting(p: Planted, one: Message) -> None:
    fresh = made_just_now(p, one)
    _stored(p, fresh, but=MAIL)
    p.delivery(fresh, MAIL, "waiting")


def in_flight(p: Planted, one: Message) -> None:
    p.hand(one, _stored(p, one, but=MAIL), MAIL, held_ms=p.now_ms - one.created_ms + 60 * MINUTE_MS)
    p.delivery(one, MAIL, "in_flight")


def retrying(p: Planted, one: Message) -> None:
    _given_back(p, one, visible_ms=p.now_ms + MINUTE_MS)
    p.delivery(one, MAIL, "retrying")


def never_redelivered(p: Planted, one: Message) -> None:
    _given_back(p, one, visible_ms=one.created_ms + MINUTE_MS)
    p.delivery(one, MAIL, "not_redelivered")


def dead(p: Planted, one: Message) -> None:
    _die(p, one)
    p.delivery(one, MAIL, "dead")


def redriven(p: Planted, one: Message) -> None:
    place = _die(p, one)
    at_ms = one.created_ms + 2 * MINUTE_MS
    p.actions.append(journal.Redriven(topic=one.topic, group=MAIL, at_ms=at_ms, entries=[(place, 1)]))
    p.hand(one, place, MAIL, at_ms=at_ms + SECOND_MS)
    p.ack(one, place, MAIL, at_ms=at_ms + 2 * SECOND_MS)


def unhandled(p: Planted, one: Message) -> None:
    place = _stored(p, one, but=TICKETS)
    p.hand(one, place, TICKETS)
    p.ack(one, place, TICKETS)
    p.delivery(one, TICKETS, "acknowledged_not_handled")


def acknowledged_just_now(p: Planted, one: Message) -> None:
    place = _stored(p, one, but=TICKETS)
    p.hand(one, place, TICKETS)
    p.ack(one, place, TICKETS, at_ms=p.now_ms - SECOND_MS)
    p.delivery(one, TICKETS, "effect_in_grace")


def unacknowledged(p: Planted, one: Message) -> None:
    p.hand(one, _stored(p, one, but=TICKETS), TICKETS)
    p.handle(one)
    p.delivery(one, TICKETS, "handled_not_acknowledged")


def handled_twice(p: Planted, one: Message) -> None:
    _stored(p, one)
    p.second_inbox.append((one.id, one.topic, one.created_ms + HANDLED_AFTER_MS + 1))
    p.delivery(one, TICKETS, "handled_twice")


def acknowledged_twice(p: Planted, one: Message) -> None:
    p.ack(one, _stored(p, one), MAIL, at_ms=one.created_ms + MINUTE_MS)
    p.delivery(one, MAIL, "acknowledged_twice")


def acknowledged_never_delivered(p: Planted, one: Message) -> None:
    p.ack(one, _stored(p, one, but=MAIL), MAIL)
    p.delivery(one, MAIL, "acknowledged_never_delivered")


def delivered_never_stored(p: Planted, one: Message) -> None:
    _never_stored(p, one, "delivered_never_stored")


def delivered_just_now(p: Planted, one: Message) -> None:
    _never_stored(p, made_just_now(p, one), "seen_in_grace")


def handled_never_stored(p: Planted, one: Message) -> None:
    p.handle(one)
    p.delivery(one, TICKETS, "handled_never_stored")


def unplaced(p: Planted, one: Message) -> None:
    _unplaced(p, one, "never_placed")


def unplaced_yet(p: Planted, one: Message) -> None:
    _unplaced(p, made_just_now(p, one), "placing_in_grace")


def held_back_by_a_pause(p: Planted, one: Message) -> None:
    _not_taken(p, one, PAUSED, "paused")


def published_before_the_group_began(p: Planted, one: Message) -> None:
    _not_taken(p, one, JOINED, "skipped")


def passed_by_a_filter(p: Planted, one: Message) -> None:
    _not_taken(p, one, FILTERED, "filtered_out")


def wanted_by_a_filter_and_never_taken(p: Planted, one: Message) -> None:
    _not_taken(p, one, FILTERED, "not_delivered", headers={"type": "urgent"})


DELIVERY_KINDS: Final[tuple[Kind, ...]] = (
    scheduled, fired_in_time, stuck, delivered_early, delivered_after_cancel, handled_early, delivered_late,
    ignored, waiting, in_flight, retrying, never_redelivered, dead, redriven, unhandled, acknowledged_just_now,
    unacknowledged, handled_twice, acknowledged_twice, acknowledged_never_delivered, delivered_never_stored,
    delivered_just_now, handled_never_stored, unplaced, unplaced_yet, held_back_by_a_pause,
    published_before_the_group_began, passed_by_a_filter, wanted_by_a_filter_and_never_taken,
)  # fmt: skip


def group_actions(at_ms: int) -> list[journal.Action]:
    """What the log says of the groups as a whole, before anything else."""
    settings: dict[str, dict[str, Any]] = {FILTERED: {"filter": "type = 'urgent'"}}
    found: list[journal.Action] = [
        journal.Declared(
            topic=topic, group=group, at_ms=at_ms, position=1 << 40 if topic == JOINED else 0,
            settings=settings.get(topic, {}),
        )
        for topic, groups in GROUPS.items() for group in groups
    ]  # fmt: skip
    return [*found, journal.Paused(topic=PAUSED, group=MAIL, at_ms=at_ms, paused=True)]


def _stored(p: Planted, one: Message, *, but: str = "") -> int:
    """Asked for, sent, stored, and done in all groups `but` one."""
    p.asked(one)
    p.sent(one)
    place = p.store(one)
    p.done(one, place, but=but)
    return place


def _given_back(p: Planted, one: Message, *, visible_ms: int) -> int:
    place = _stored(p, one, but=MAIL)
    p.hand(one, place, MAIL)
    at_ms, entry = one.created_ms + SECOND_MS, (place, 1, visible_ms, 1)
    p.actions.append(journal.Requeued(topic=one.topic, group=MAIL, at_ms=at_ms, entries=[entry]))
    return place


def _die(p: Planted, one: Message) -> int:
    place = _stored(p, one, but=MAIL)
    p.hand(one, place, MAIL)
    at_ms, entry = one.created_ms + MINUTE_MS, (place, 1, 1)
    p.actions.append(journal.Died(topic=one.topic, group=MAIL, at_ms=at_ms, entries=[entry], reason="no"))
    return place


def _never_stored(p: Planted, one: Message, rule: str) -> None:
    """Handed out under a sequence that the log does not have, by which the verdict names it, and with that time."""
    place = p.place(one.topic)
    p.hand(one, place, MAIL)
    p.delivery(one._replace(id=f"{one.topic}#{place}", created_ms=one.created_ms + HANDED_AFTER_MS), MAIL, rule)


def _unplaced(p: Planted, one: Message, rule: str) -> None:
    p.asked(one)
    p.sent(one)
    p.schedule(one)
    for group in GROUPS[one.topic]:
        p.delivery(one, group, rule)


def _not_taken(
    p: Planted, one: Message, topic: str, rule: str, *, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    news = renamed(one, "news", topic=topic, key=None)
    p.sent(news)
    p.store(news)
    p.stored[-1] = rewritten(p.stored[-1], headers=dict(headers))
    p.delivery(news, MAIL, rule)
