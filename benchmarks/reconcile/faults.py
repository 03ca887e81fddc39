"""Kinds of faults, for one booking each: their records, and the expected verdicts.

A kind is a function of a booking that nothing else is written for. KINDS need no more than the three tables of
benchmarks.reconcile.records; MORE_KINDS need the outbox and the broker's actions as well, a few a moment that is
still going on. What consumers do wrong stands in delivery_faults. Nothing is written to a disk here.
"""

from __future__ import annotations

from typing import Final

from benchmarks.reconcile.planting import (
    MAIL,
    MINUTE_MS,
    NEWS,
    OLD_NEWS,
    SECOND_MS,
    WEATHER,
    Kind,
    Message,
    Planted,
    cancel,
    made_just_now,
    reminder,
    renamed,
)
from outbox_core.journal import journal

# -- what three tables show ----------------------------------------------------------------------------------------


def lost(p: Planted, one: Message) -> None:
    p.asked(one)
    p.sent(one)
    p.message(one, "not_in_broker", "message_lost")


def phantom(p: Planted, one: Message) -> None:
    p.whole(one)
    p.message(one, "no_business_row")


def changed(p: Planted, one: Message) -> None:
    p.asked(one)
    p.sent(one)
    p.done(one, p.store(one._replace(body=f"{one.body}!")))
    p.message(one, "body_differs", "message_mismatch")


def rekeyed(p: Planted, one: Message) -> None:
    p.asked(one)
    p.sent(one)
    p.done(one, p.store(one._replace(key=f"{one.key}-other")))
    p.message(one, "key_differs", "message_mismatch")


def rerouted(p: Planted, one: Message) -> None:
    news = renamed(one, "news", topic=NEWS, key=None)
    p.sent(news)
    p.store(news._replace(topic=OLD_NEWS))
    p.message(news, "topic_differs")


def shifted(p: Planted, one: Message) -> None:
    due = one._replace(due_ms=one.created_ms)
    p.asked(due)
    p.sent(due)
    p.done(due, p.store(due._replace(due_ms=one.created_ms + 1)))
    p.message(due, "due_differs", "message_mismatch")


def doubled(p: Planted, one: Message) -> None:
    p.asked(one)
    p.whole(one)
    p.store(one)
    p.message(one, "stored_twice", "message_stored_twice")


def unannounced(p: Planted, one: Message) -> None:
    p.asked(one)
    p.row(one, "no_message")


def one_message_for_two(p: Planted, one: Message) -> None:
    p.asked(one)
    p.asked(one)
    p.whole(one)
    p.row(one, "too_few_messages")


def published_twice(p: Planted, one: Message) -> None:
    p.asked(one)
    p.whole(one)
    p.whole(renamed(one, "again"))
    p.row(one, "published_twice")


def moved(p: Planted, one: Message) -> None:
    # By more than the unit of the column: less is what rounding may be.
    p.asked(one._replace(due_ms=one.created_ms + 2))
    p.whole(one._replace(due_ms=one.created_ms))
    p.row(one, "due_time_differs")


def keyless(p: Planted, one: Message) -> None:
    p.asked(one._replace(key=None))
    p.row(one._replace(key=None), "no_key")


def unarchived(p: Planted, one: Message) -> None:
    p.asked(one)
    p.done(one, p.store(one))
    p.message(one, "archive_missing")


def unrecorded(p: Planted, one: Message) -> None:
    news = renamed(one, "news", topic=NEWS, key=None)
    p.whole(renamed(news, "known"))
    p.store(news)
    p.message(news, "unrecorded")


def foreign(p: Planted, one: Message) -> None:
    told = renamed(one, "weather", topic=WEATHER, key=None)
    p.store(told)
    p.message(told, "foreign_topic")


# -- on the way to the broker --------------------------------------------------------------------------------------


def unsent(p: Planted, one: Message) -> None:
    p.asked(one)
    p.outbox.append((one, "pending"))
    p.message(one, "not_sent", "message_unsent")


def parked(p: Planted, one: Message) -> None:
    p.asked(one)
    p.outbox.append((one, "parked"))
    p.message(one, "parked", "message_parked")


def discarded(p: Planted, one: Message) -> None:
    p.asked(one)
    p.sent(one, sent_ms=one.created_ms + MINUTE_MS, outcome="discarded")
    p.message(one, "discarded", "message_discarded")


def not_removed(p: Planted, one: Message) -> None:
    p.asked(one)
    p.outbox.append((one, "pending"))
    p.done(one, p.store(one))
    p.message(one, "not_removed_yet", "message_pending")


def canceled(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    _noted(p, due, at_ms=one.created_ms + MINUTE_MS)
    _answered(p, due, "canceled", "cancel_accepted")
    p.message(due, "canceled", "message_canceled")
    p.delivery(due, MAIL, "canceled")


def canceled_without_a_row(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    _noted(p, due, at_ms=one.created_ms + MINUTE_MS)
    p.message(due, "canceled", "message_canceled")
    p.delivery(due, MAIL, "canceled")


def cancel_left_unsent(p: Planted, one: Message) -> None:
    p.outbox.append((cancel(one), "pending"))
    p.message(cancel(one), "not_sent")


def cancel_parked(p: Planted, one: Message) -> None:
    p.outbox.append((cancel(one), "parked"))
    p.message(cancel(one), "parked")


def cancel_too_late(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.done(due, p.fire(due), since_ms=due.due_ms)
    _answered(p, due, "too_late", "cancel_without_effect")


def cancel_forgotten(p: Planted, one: Message) -> None:
    due = reminder(p, one, due_ms=p.now_ms + 60 * MINUTE_MS)
    p.schedule(due)
    _answered(p, due, "canceled", "cancel_not_noted")
    p.message(due, "canceled", "message_canceled")
    p.delivery(due, MAIL, "canceled")


def cancel_broken(p: Planted, one: Message) -> None:
    due = reminder(p, one)
    p.schedule(due)
    p.done(due, p.fire(due), since_ms=due.due_ms)
    _noted(p, due, at_ms=(due.due_ms or 0) + MINUTE_MS)
    _answered(p, due, "canceled", "cancel_accepted")
    p.message(due, "canceled", "message_canceled")
    p.delivery(due, MAIL, "delivered_after_cancel")


def canceled_unheard_of(p: Planted, one: Message) -> None:
    p.actions.append(journal.Canceled(at_ms=one.created_ms, ids=[one.id], topics=[""]))
    p.message(one, "canceled_unpublished")


def sent_just_now(p: Planted, one: Message) -> None:
    p.asked(one)
    p.sent(one, sent_ms=p.now_ms - SECOND_MS)
    p.message(one, "sent_in_grace", "message_pending")


def stored_just_now(p: Planted, one: Message) -> None:
    news = renamed(one, "news", topic=NEWS, key=None)
    p.store(news, stored_ms=p.now_ms - SECOND_MS)
    p.message(news, "unrecorded_in_grace")


def out_of_sight(p: Planted, one: Message) -> None:
    due = reminder(p, one, due_ms=p.now_ms + 2 * 60 * MINUTE_MS, outcome="duplicate")
    p.message(due, "schedule_not_in_log", "message_pending")


def not_yet_fired(p: Planted, one: Message) -> None:
    due = reminder(p, one, due_ms=p.now_ms - 90 * SECOND_MS, outcome="duplicate")
    p.message(due, "not_fired")


def newest_row_unannounced(p: Planted, one: Message) -> None:
    fresh = made_just_now(p, one)
    p.asked(fresh)
    p.row(fresh, "message_in_grace")


def newest_row_not_seen(p: Planted, one: Message) -> None:
    fresh = made_just_now(p, one)
    p.whole(fresh)
    p.message(fresh, "business_in_grace")


def being_sent(p: Planted, one: Message) -> None:
    fresh = made_just_now(p, one)
    p.asked(fresh)
    p.outbox.append((fresh, "pending"))
    p.message(fresh, "in_grace", "message_pending")


KINDS: Final[tuple[Kind, ...]] = (
    lost, phantom, changed, doubled, unannounced, rekeyed, rerouted, shifted, one_message_for_two, published_twice,
    moved, keyless, unarchived, unrecorded, foreign,
)  # fmt: skip
MORE_KINDS: Final[tuple[Kind, ...]] = (
    unsent, parked, discarded, not_removed, canceled, canceled_without_a_row, cancel_left_unsent, cancel_parked,
    cancel_too_late, cancel_forgotten, cancel_broken, canceled_unheard_of, sent_just_now, stored_just_now, out_of_sight,
    not_yet_fired, newest_row_unannounced, newest_row_not_seen, being_sent,
)  # fmt: skip


def _noted(p: Planted, one: Message, *, at_ms: int) -> None:
    """The broker wrote the cancel down."""
    p.actions.append(journal.Canceled(at_ms=at_ms, ids=[one.id], topics=[""]))


def _answered(p: Planted, one: Message, answer: str, rule: str) -> None:
    """The cancel was sent; the archive has the broker's answer, and the cancel gets this verdict."""
    p.sent(cancel(one), outcome=answer)
    p.message(cancel(one), rule)
