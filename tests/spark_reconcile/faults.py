"""One of every fault, planted at a known id, with the verdict that it must get. Nothing else in the world is amiss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outbox_core.journal import journal
from outbox_core.journal.dead_letter_records import Discarded, RedriveStopped
from outbox_core.messages.recurring_message import occurrence_id
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    PAID,
    REMINDER,
    SECOND_MS,
    TICKETS,
    World,
    never_stored,
)

Verdict = tuple[str, str, str, str, str]
"""(scope, message id or key, group or business rule, state, rule)"""
ANNOUNCED, REMINDED = "paid orders are announced", "travellers are reminded"


@dataclass(slots=True)
class Planted:
    """A world, and the verdicts in it that are not `settled` by the plain rules."""

    world: World
    expected: set[Verdict] = field(default_factory=set)

    def message(self, message: str, state: str, rule: str) -> None:
        self.expected.add(("message", message, "", state, rule))

    def delivery(self, message: str, group: str, state: str, rule: str) -> None:
        self.expected.add(("delivery", message, group, state, rule))

    def business(self, key: int, state: str, rule: str, of: str = ANNOUNCED) -> None:
        self.expected.add(("business", str(key), of, state, rule))


def plant_all(world: World) -> set[Verdict]:
    """Plant every fault once; returns the verdicts to come."""
    planted = Planted(world)
    for plant in FAULTS:
        plant(planted)
    return planted.expected


# -- business to broker --------------------------------------------------------------------------------------------


def never_published(p: Planted) -> None:
    p.business(p.world.order(), "lost", "no_message")


def too_new_to_judge(p: Planted) -> None:
    p.business(p.world.order(age_ms=5 * SECOND_MS), "pending", "message_in_grace")


def published_twice(p: Planted) -> None:
    order = p.world.order()
    for number in (1, 2):
        _stored_and_done(p.world, f"twice-{number}", str(order))
    p.business(order, "duplicate", "published_twice")


def left_unsent(p: Planted) -> None:
    order = p.world.order()
    p.message(p.world.unsent("unsent", key=str(order)), "unsent", "not_sent")
    p.business(order, "unsent", "message_unsent")


def being_sent(p: Planted) -> None:
    order = p.world.order(age_ms=SECOND_MS)
    p.message(p.world.unsent("fresh", key=str(order), age_ms=SECOND_MS), "pending", "in_grace")
    p.business(order, "pending", "message_pending")


def parked(p: Planted) -> None:
    order = p.world.order()
    p.message(p.world.unsent("parked", key=str(order), state="parked"), "parked", "parked")
    p.business(order, "parked", "message_parked")


def row_not_removed(p: Planted) -> None:
    order = p.world.order()
    p.world.unsent("left", key=str(order))
    sequence = p.world.store("left", key=str(order))
    for group in (TICKETS, MAIL):
        p.world.done("left", sequence, group, age_ms=HOUR_MS)
    p.message("left", "pending", "not_removed_yet")
    p.business(order, "pending", "message_pending")


def lost_by_the_broker(p: Planted) -> None:
    order = p.world.order()
    p.message(p.world.sent("lost", key=str(order)), "lost", "not_in_broker")
    p.business(order, "lost", "message_lost")


def lost_by_the_broker_and_asked_for_by_no_row(p: Planted) -> None:
    p.message(p.world.sent("lost-unasked", key="unasked-1"), "lost", "not_in_broker")
    p.message(p.world.sent("new-unasked", key="unasked-2", age_ms=SECOND_MS), "pending", "sent_in_grace")
    ahead = p.world.sent(
        "unnoted-unasked", key="unasked-3", topic=REMINDER, deliver_at_ms=NOW_MS + 2 * HOUR_MS, outcome="duplicate"
    )
    p.message(ahead, "pending", "schedule_not_in_log")


def sent_just_now(p: Planted) -> None:
    order = p.world.order(age_ms=SECOND_MS)
    p.message(p.world.sent("just-sent", key=str(order), age_ms=SECOND_MS), "pending", "sent_in_grace")
    p.business(order, "pending", "message_pending")


def sent_without_a_transaction(p: Planted) -> None:
    sequence = p.world.store("phantom", key="no-such-order")
    for group in (TICKETS, MAIL):
        p.world.done("phantom", sequence, group, age_ms=HOUR_MS)
    p.message("phantom", "phantom", "no_business_row")


def order_not_paid(p: Planted) -> None:
    order = p.world.order(status="OPEN")
    _stored_and_done(p.world, "not-paid", str(order))
    p.message("not-paid", "phantom", "no_business_row")


def unrecorded_on_a_topic_without_a_rule(p: Planted) -> None:
    p.world.sent("mailed", key=None, topic="newsletter")
    p.world.store("mailed", key=None, topic="newsletter")
    p.world.store("unrecorded", key=None, topic="newsletter")
    p.message("unrecorded", "phantom", "unrecorded")


def somebody_elses_topic(p: Planted) -> None:
    p.world.store("foreign", key=None, topic="weather")
    p.message("foreign", "unknown", "foreign_topic")


def recurring_messages_that_no_row_asks_for(p: Planted) -> None:
    asked_by_none, kept = (occurrence_id("daily", generation=1, at_ms=NOW_MS - hours * HOUR_MS) for hours in (3, 2))
    order = p.world.order()
    _stored_and_done_by_broker(p.world, asked_by_none, "all")
    _stored_and_done_by_broker(p.world, kept, str(order))
    p.message(asked_by_none, "settled", "recurring")
    p.message(kept, "settled", "recurring")
    p.business(order, "lost", "no_message")


def _stored_and_done_by_broker(world: World, message_id: str, key: str) -> None:
    sequence = world.store(message_id, key=key)
    for group in (TICKETS, MAIL):
        world.done(message_id, sequence, group, age_ms=HOUR_MS)


def archive_row_missing(p: Planted) -> None:
    order = p.world.order()
    sequence = p.world.store("unarchived", key=str(order))
    for group in (TICKETS, MAIL):
        p.world.done("unarchived", sequence, group, age_ms=HOUR_MS)
    p.message("unarchived", "settled", "archive_missing")


def stored_twice(p: Planted) -> None:
    order = p.world.order()
    _stored_and_done(p.world, "doubled", str(order))
    p.world.done("doubled", p.world.store("doubled", key=str(order)), MAIL, age_ms=HOUR_MS)
    p.message("doubled", "duplicate", "stored_twice")
    p.delivery("doubled", MAIL, "duplicate", "acknowledged_twice")
    p.business(order, "duplicate", "message_stored_twice")


def body_changed(p: Planted) -> None:
    order = p.world.order()
    p.world.sent("changed", key=str(order))
    sequence = p.world.store("changed", key=str(order), body="other")
    for group in (TICKETS, MAIL):
        p.world.done("changed", sequence, group, age_ms=HOUR_MS)
    p.message("changed", "mismatch", "body_differs")
    p.business(order, "mismatch", "message_mismatch")


def key_changed(p: Planted) -> None:
    order = p.world.order()
    p.world.sent("rekeyed", key=str(order))
    sequence = p.world.store("rekeyed", key="other")
    for group in (TICKETS, MAIL):
        p.world.done("rekeyed", sequence, group, age_ms=HOUR_MS)
    p.message("rekeyed", "mismatch", "key_differs")
    p.business(order, "mismatch", "message_mismatch")


def topic_changed(p: Planted) -> None:
    p.world.sent("rerouted", key=None, topic="newsletter")
    p.world.store("rerouted", key=None, topic="newsletter.old")
    p.message("rerouted", "mismatch", "topic_differs")
    p.delivery("rerouted", MAIL, "settled", "skipped")


def due_time_changed_on_the_way(p: Planted) -> None:
    due_ms = NOW_MS - 30 * MINUTE_MS
    p.world.sent("shifted", key=None, topic="newsletter", deliver_at_ms=due_ms)
    p.world.store("shifted", key=None, topic="newsletter", deliver_at_ms=due_ms + 1)
    p.message("shifted", "mismatch", "due_differs")


def canceled_in_time(p: Planted) -> None:
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "canceled", order, due_ms)
    p.world.actions.append(
        journal.Canceled(at_ms=NOW_MS - 50 * MINUTE_MS, ids=["canceled", "never-heard-of"], topics=["", ""])
    )
    p.message(p.world.sent_cancel("cancel-request", "canceled", "canceled"), "settled", "cancel_accepted")
    p.message("canceled", "canceled", "canceled")
    p.message("never-heard-of", "canceled", "canceled_unpublished")
    p.delivery("canceled", MAIL, "canceled", "canceled")
    p.business(order, "canceled", "message_canceled", REMINDED)


def cancel_left_unsent(p: Planted) -> None:
    p.message(p.world.unsent_cancel("cancel-unsent", "nobody"), "unsent", "not_sent")
    p.message(p.world.unsent_cancel("cancel-parked", "nobody", state="parked"), "parked", "parked")
    p.message(p.world.unsent_cancel("cancel-fresh", "nobody", age_ms=SECOND_MS), "pending", "in_grace")


def cancel_that_lost_the_race(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "raced", order, due_ms)
    p.world.done("raced", p.world.fire("raced", age_ms=20 * MINUTE_MS), MAIL, age_ms=20 * MINUTE_MS, topic=REMINDER)
    for name, of, answer in (("cancel-late", "raced", "too_late"), ("cancel-lost", "no-such-message", "unknown")):
        cancel = p.world.sent_cancel(name, of, answer, age_ms=19 * MINUTE_MS)
        p.message(cancel, "settled", "cancel_without_effect")


def handed_out_though_the_cancel_was_answered(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "promised", order, due_ms)
    p.world.done("promised", p.world.fire("promised", age_ms=20 * MINUTE_MS), MAIL, age_ms=20 * MINUTE_MS,
                 topic=REMINDER)  # fmt: skip
    # Its note comes after the hand-out: by itself it takes nothing back.
    p.world.actions.append(journal.Canceled(at_ms=NOW_MS - 18 * MINUTE_MS, ids=["promised"], topics=[""]))
    cancel = p.world.sent_cancel("cancel-promised", "promised", "canceled", age_ms=19 * MINUTE_MS)
    p.message(cancel, "settled", "cancel_accepted")
    p.message("promised", "canceled", "canceled")
    p.delivery("promised", MAIL, "phantom", "delivered_after_cancel")
    p.business(order, "canceled", "message_canceled", REMINDED)


def cancel_that_the_broker_forgot(p: Planted) -> None:
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "still-scheduled", order, due_ms)
    p.message(p.world.sent_cancel("cancel-forgotten", "still-scheduled", "canceled"), "lost", "cancel_not_noted")
    p.message("still-scheduled", "canceled", "canceled")
    p.delivery("still-scheduled", MAIL, "canceled", "canceled")
    p.business(order, "canceled", "message_canceled", REMINDED)
    fresh = p.world.sent_cancel("cancel-just-sent", "of-a-message-that-nobody-has", "canceled", age_ms=SECOND_MS)
    p.message(fresh, "pending", "sent_in_grace")


def held_by_its_table_until_it_is_due(p: Planted) -> None:
    for message, due_ms, state, rule in (
        ("held-until-due", NOW_MS + 24 * HOUR_MS, "pending", "held_until_due"),
        ("held-for-too-long", NOW_MS - 20 * MINUTE_MS, "unsent", "not_sent"),
    ):
        order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
        p.message(p.world.unsent(message, key=str(order), topic=REMINDER), state, rule)
        p.world.outbox[-1].update(deliver_at_ms=due_ms, due_at_us=due_ms * 1000, attempts=0)
        p.business(order, state, f"message_{state}", REMINDED)


def withdrawn_from_its_table(p: Planted) -> None:
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("withdrawn", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, outcome="withdrawn")
    p.message("withdrawn", "canceled", "canceled")
    p.business(order, "canceled", "message_canceled", REMINDED)
    _withdrawal(p, "cancel-withdrew", "withdrawn")


def withdrawn_and_published_again_under_its_id(p: Planted) -> None:
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("moved-on", key=str(order), topic=REMINDER, deliver_at_ms=due_ms - MINUTE_MS, outcome="withdrawn")
    p.world.archive[-1]["sent_at_us"] -= SECOND_MS
    _withdrawal(p, "cancel-moved-on", "moved-on")
    _scheduled(p.world, "moved-on", order, due_ms)
    p.delivery("moved-on", MAIL, "pending", "scheduled")


def delivered_though_it_was_withdrawn(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "not-withdrawn", order, due_ms)
    p.world.archive[-1]["outcome"] = "withdrawn"
    p.world.done("not-withdrawn", p.world.fire("not-withdrawn", age_ms=20 * MINUTE_MS), MAIL, age_ms=20 * MINUTE_MS,
                 topic=REMINDER)  # fmt: skip
    p.message("not-withdrawn", "canceled", "canceled")
    p.delivery("not-withdrawn", MAIL, "phantom", "delivered_after_cancel")
    p.business(order, "canceled", "message_canceled", REMINDED)


def discarded_from_the_outbox(p: Planted) -> None:
    order = p.world.order()
    p.message(p.world.sent("given-up", key=str(order), outcome="discarded"), "discarded", "discarded")
    p.business(order, "discarded", "message_discarded")
    p.message(p.world.sent_cancel("cancel-given-up", "nobody", "discarded"), "discarded", "discarded")
    p.message(p.world.sent("given-up-unasked", key="unasked-4", outcome="discarded"), "discarded", "discarded")


def discarded_and_published_again(p: Planted) -> None:
    _discarded(p.world, "tried-again", str(p.world.order()))
    _stored_and_done(p.world, "tried-again", p.world.archive[-1]["message_key"])
    order = p.world.order()
    p.message(_discarded(p.world, "replaced", str(order)), "discarded", "discarded")
    _stored_and_done(p.world, "in-its-place", str(order))
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    early = p.world.sent("too-early", key=str(order), topic=REMINDER, deliver_at_ms=due_ms - HOUR_MS,
                         outcome="discarded")  # fmt: skip
    p.message(early, "discarded", "discarded")
    _scheduled(p.world, "at-its-time", order, due_ms)
    p.delivery("at-its-time", MAIL, "pending", "scheduled")


def discarded_on_a_misspelt_topic(p: Planted) -> None:
    for message in ("redirected", "redirected-unrecorded"):
        p.message(_discarded(p.world, message, None, topic="newsleter"), "discarded", "discarded")
    p.world.sent("redirected", key=None, topic="newsletter")
    for message in ("redirected", "redirected-unrecorded"):
        p.world.store(message, key=None, topic="newsletter")
    p.message("redirected-unrecorded", "phantom", "unrecorded")


def discarded_after_it_had_arrived(p: Planted) -> None:
    order = p.world.order()
    _stored_and_done(p.world, "arrived", str(order))
    p.world.archive[-1].update(outcome="discarded", sent_at_us=(NOW_MS - MINUTE_MS) * 1000, attempts=2)


def lost_and_written_again_and_discarded(p: Planted) -> None:
    order = p.world.order()
    p.world.sent("lost-then-given-up", key=str(order))
    p.world.sent("lost-then-given-up", key=str(order), outcome="discarded")
    p.world.archive[-1]["sent_at_us"] += MINUTE_MS * 1000
    p.message("lost-then-given-up", "discarded", "discarded")
    p.business(order, "discarded", "message_discarded")


def row_and_message_disagree_on_the_time(p: Planted) -> None:
    due_ms = NOW_MS + HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms + MINUTE_MS)
    _scheduled(p.world, "moved", order, due_ms)
    p.delivery("moved", MAIL, "pending", "scheduled")
    p.business(order, "mismatch", "due_time_differs", REMINDED)


def moved_as_the_cure_says(p: Planted) -> None:
    for name, moved_ms in (("moved-later", HOUR_MS), ("moved-earlier", -HOUR_MS)):
        due_ms = NOW_MS + 2 * HOUR_MS
        order = p.world.order(status="BOOKED", remind_at_ms=due_ms + moved_ms)
        _scheduled(p.world, f"{name}-canceled", order, due_ms)
        p.world.actions.append(journal.Canceled(at_ms=NOW_MS - 50 * MINUTE_MS, ids=[f"{name}-canceled"], topics=[""]))
        p.message(f"{name}-canceled", "canceled", "canceled")
        p.delivery(f"{name}-canceled", MAIL, "canceled", "canceled")
        _scheduled(p.world, name, order, due_ms + moved_ms)
        p.delivery(name, MAIL, "pending", "scheduled")


def moved_and_canceled_alone(p: Planted) -> None:
    due_ms = NOW_MS + 2 * HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms + HOUR_MS)
    _scheduled(p.world, "not-announced-again", order, due_ms)
    p.world.actions.append(journal.Canceled(at_ms=NOW_MS - 50 * MINUTE_MS, ids=["not-announced-again"], topics=[""]))
    p.message("not-announced-again", "canceled", "canceled")
    p.delivery("not-announced-again", MAIL, "canceled", "canceled")
    p.business(order, "mismatch", "due_time_differs", REMINDED)


# -- broker to consumer --------------------------------------------------------------------------------------------


def scheduled_ahead(p: Planted) -> None:
    due_ms = NOW_MS + 24 * HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "scheduled", order, due_ms)
    p.delivery("scheduled", MAIL, "pending", "scheduled")


def fired_in_time(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "fired", order, due_ms)
    sequence = p.world.fire("fired", age_ms=20 * MINUTE_MS)
    p.world.done("fired", sequence, MAIL, age_ms=20 * MINUTE_MS, topic=REMINDER)


def never_fired(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "stuck", order, due_ms)
    p.delivery("stuck", MAIL, "late", "not_fired")


def note_lost_by_a_kill(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "noteless", order, due_ms)
    p.world.without_note("noteless")
    sequence = p.world.fire("noteless", age_ms=20 * MINUTE_MS)
    p.world.done("noteless", sequence, MAIL, age_ms=20 * MINUTE_MS, topic=REMINDER)


def note_lost_and_fired_twice(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "fired-twice", order, due_ms)
    p.world.without_note("fired-twice")
    for _ in range(2):
        sequence = p.world.fire("fired-twice", age_ms=20 * MINUTE_MS)
    p.world.done("fired-twice", sequence, MAIL, age_ms=20 * MINUTE_MS, topic=REMINDER)
    p.message("fired-twice", "duplicate", "stored_twice")
    p.business(order, "duplicate", "message_stored_twice", REMINDED)


def fired_and_nobody_asked_for_it(p: Planted) -> None:
    _scheduled(p.world, "fired-phantom", 9_999, NOW_MS - 20 * MINUTE_MS)
    p.world.without_note("fired-phantom")
    p.world.done("fired-phantom", p.world.fire("fired-phantom", age_ms=20 * MINUTE_MS), MAIL, age_ms=20 * MINUTE_MS,
                 topic=REMINDER)  # fmt: skip
    p.world.archive[:] = [row for row in p.world.archive if row["id"] != "fired-phantom"]
    p.message("fired-phantom", "phantom", "no_business_row")


def known_to_the_schedule_alone(p: Planted) -> None:
    due_ms = NOW_MS + 2 * HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("unnoted", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, outcome="duplicate")
    p.message("unnoted", "pending", "schedule_not_in_log")
    p.business(order, "pending", "message_pending", REMINDED)


def known_to_the_schedule_and_never_fired(p: Planted) -> None:
    due_ms = NOW_MS - 30 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("forgotten-note", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, outcome="duplicate")
    p.message("forgotten-note", "lost", "not_in_broker")
    p.business(order, "lost", "message_lost", REMINDED)


def scheduled_and_lost_at_once(p: Planted) -> None:
    due_ms = NOW_MS + 2 * HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("lost-ahead", key=str(order), topic=REMINDER, deliver_at_ms=due_ms)
    p.message("lost-ahead", "lost", "not_in_broker")
    p.business(order, "lost", "message_lost", REMINDED)


def delivered_early(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "early", order, due_ms)
    sequence = p.world.fire("early", age_ms=20 * MINUTE_MS + 2)
    p.world.deliver("early", sequence, MAIL, age_ms=20 * MINUTE_MS + 1, topic=REMINDER)
    p.world.ack("early", sequence, MAIL, age_ms=19 * MINUTE_MS, topic=REMINDER)
    p.delivery("early", MAIL, "early", "delivered_early")


def delivered_after_cancel(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    _scheduled(p.world, "undead", order, due_ms)
    p.world.actions.append(journal.Canceled(at_ms=NOW_MS - 30 * MINUTE_MS, ids=["undead"], topics=[""]))
    sequence = p.world.fire("undead", age_ms=20 * MINUTE_MS)
    p.world.done("undead", sequence, MAIL, age_ms=20 * MINUTE_MS, topic=REMINDER)
    p.message("undead", "canceled", "canceled")
    p.delivery("undead", MAIL, "phantom", "delivered_after_cancel")
    p.business(order, "canceled", "message_canceled", REMINDED)


def delivered_late(p: Planted) -> None:
    sequence = _stored(p.world, "late")
    p.world.done("late", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.done("late", sequence, MAIL, age_ms=50 * MINUTE_MS)
    p.delivery("late", MAIL, "late", "delivered_late")


def nobody_takes_it(p: Planted) -> None:
    sequence = _stored(p.world, "ignored")
    p.world.done("ignored", sequence, TICKETS, age_ms=HOUR_MS)
    p.delivery("ignored", MAIL, "late", "not_delivered")


def waiting(p: Planted) -> None:
    sequence = _stored(p.world, "waiting", age_ms=10 * SECOND_MS)
    p.world.done("waiting", sequence, TICKETS, age_ms=10 * SECOND_MS)
    p.delivery("waiting", MAIL, "pending", "waiting")


def in_flight(p: Planted) -> None:
    sequence = _stored(p.world, "held")
    p.world.done("held", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("held", sequence, MAIL, age_ms=HOUR_MS, invisible_ms=2 * HOUR_MS)
    p.delivery("held", MAIL, "pending", "in_flight")


def retrying(p: Planted) -> None:
    sequence = _stored(p.world, "retrying")
    p.world.done("retrying", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("retrying", sequence, MAIL, age_ms=HOUR_MS)
    _nack(p.world, sequence, age_ms=59 * MINUTE_MS, visible_ms=NOW_MS + MINUTE_MS)
    p.delivery("retrying", MAIL, "pending", "retrying")


def never_redelivered(p: Planted) -> None:
    sequence = _stored(p.world, "forgotten")
    p.world.done("forgotten", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("forgotten", sequence, MAIL, age_ms=HOUR_MS)
    _nack(p.world, sequence, age_ms=59 * MINUTE_MS, visible_ms=NOW_MS - 50 * MINUTE_MS)
    p.delivery("forgotten", MAIL, "late", "not_redelivered")


def dead_letter(p: Planted) -> None:
    sequence = _stored(p.world, "dead")
    p.world.done("dead", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("dead", sequence, MAIL, age_ms=HOUR_MS)
    _die(p.world, sequence, age_ms=50 * MINUTE_MS)
    p.delivery("dead", MAIL, "dead", "dead")


def discarded_letter(p: Planted) -> None:
    sequence = _stored(p.world, "discarded")
    p.world.done("discarded", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("discarded", sequence, MAIL, age_ms=HOUR_MS)
    _die(p.world, sequence, age_ms=50 * MINUTE_MS)
    p.world.actions.append(
        Discarded(topic=PAID, group=MAIL, at_ms=NOW_MS - HOUR_MS // 2, entries=[(sequence, 1)], by="ops", why="wrong")
    )
    p.delivery("discarded", MAIL, "discarded", "discarded")


def edited_letters(p: Planted) -> None:
    """Each has its effect, if any, under another id; nobody published that, and other groups never hear of it."""
    for message, state, rule in (
        ("edited", "settled", "edited"), ("edited-twice", "settled", "edited"), ("edited-dead", "dead", "dead"),
        ("edited-unhandled", "lost", "acknowledged_not_handled"), ("edited-late", "late", "not_redelivered"),
        ("edited-handled", "duplicate", "handled_twice"),
    ):  # fmt: skip
        sequence = _stored(p.world, message)
        p.world.done(message, sequence, MAIL, age_ms=HOUR_MS)
        p.world.deliver(message, sequence, TICKETS, age_ms=HOUR_MS)
        _die(p.world, sequence, age_ms=50 * MINUTE_MS, group=TICKETS)
        new_id = p.world.edit(message, sequence, TICKETS, age_ms=40 * MINUTE_MS)
        p.delivery(message, TICKETS, state, rule)
        if message == "edited-late":
            continue
        p.world.deliver(message, sequence, TICKETS, age_ms=39 * MINUTE_MS, number=2)
        if message in {"edited-dead", "edited-twice"}:
            _die(p.world, sequence, age_ms=38 * MINUTE_MS, group=TICKETS)
        if message == "edited-dead":
            continue
        if message == "edited-handled":
            p.world.handle(message, age_ms=55 * MINUTE_MS)
        if message == "edited-twice":
            new_id = p.world.edit(new_id, sequence, TICKETS, age_ms=37 * MINUTE_MS)
            p.world.deliver(message, sequence, TICKETS, age_ms=36 * MINUTE_MS, number=3)
        if message != "edited-unhandled":
            p.world.handle(new_id, age_ms=35 * MINUTE_MS)
        p.world.ack(message, sequence, TICKETS, age_ms=34 * MINUTE_MS)


def edit_that_a_kill_cut_short(p: Planted) -> None:
    """What it would have become is in the log, and no action names it."""
    sequence = _stored(p.world, "edit-cut")
    p.world.done("edit-cut", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("edit-cut", sequence, MAIL, age_ms=HOUR_MS)
    _die(p.world, sequence, age_ms=50 * MINUTE_MS)
    p.world.write_edited("edit-cut", sequence, age_ms=40 * MINUTE_MS)
    p.delivery("edit-cut", MAIL, "dead", "dead")


def redrive_that_was_stopped(p: Planted) -> None:
    sequence = _stored(p.world, "stopped")
    p.world.done("stopped", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("stopped", sequence, MAIL, age_ms=HOUR_MS)
    _die(p.world, sequence, age_ms=50 * MINUTE_MS)
    common: dict[str, Any] = {"topic": PAID, "group": MAIL, "entries": [(sequence, 1)]}
    p.world.actions.append(journal.Redriven(**common, at_ms=NOW_MS - 40 * MINUTE_MS))
    p.world.actions.append(RedriveStopped(**common, at_ms=NOW_MS - 39 * MINUTE_MS, by="ops"))
    p.delivery("stopped", MAIL, "dead", "dead")


def redriven_and_done(p: Planted) -> None:
    sequence = _stored(p.world, "redriven")
    p.world.done("redriven", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.deliver("redriven", sequence, MAIL, age_ms=HOUR_MS)
    _die(p.world, sequence, age_ms=50 * MINUTE_MS)
    at_ms = NOW_MS - 40 * MINUTE_MS
    p.world.actions.append(journal.Redriven(topic=PAID, group=MAIL, at_ms=at_ms, entries=[(sequence, 1)]))
    p.world.deliver("redriven", sequence, MAIL, age_ms=39 * MINUTE_MS, number=2)
    p.world.ack("redriven", sequence, MAIL, age_ms=38 * MINUTE_MS)


def acknowledged_before_its_effect(p: Planted) -> None:
    sequence = _stored(p.world, "unhandled")
    p.world.done("unhandled", sequence, MAIL, age_ms=HOUR_MS)
    p.world.deliver("unhandled", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.ack("unhandled", sequence, TICKETS, age_ms=59 * MINUTE_MS)
    p.delivery("unhandled", TICKETS, "lost", "acknowledged_not_handled")


def handled_and_not_acknowledged(p: Planted) -> None:
    sequence = _stored(p.world, "unacked")
    p.world.done("unacked", sequence, MAIL, age_ms=HOUR_MS)
    p.world.deliver("unacked", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.handle("unacked", age_ms=59 * MINUTE_MS)
    p.delivery("unacked", TICKETS, "pending", "handled_not_acknowledged")


def handled_never_stored(p: Planted) -> None:
    p.world.handle("from-nowhere", age_ms=HOUR_MS)
    p.delivery("from-nowhere", TICKETS, "phantom", "handled_never_stored")


def delivered_never_stored(p: Planted) -> None:
    p.delivery(_hand_out_what_is_not_stored(p.world, age_ms=HOUR_MS), MAIL, "phantom", "delivered_never_stored")


def acknowledged_never_delivered(p: Planted) -> None:
    sequence = _stored(p.world, "acked-only")
    p.world.done("acked-only", sequence, TICKETS, age_ms=HOUR_MS)
    p.world.ack("acked-only", sequence, MAIL, age_ms=HOUR_MS - 50)
    p.delivery("acked-only", MAIL, "phantom", "acknowledged_never_delivered")


# -- what is too new to judge, and what only the broker can do wrong -----------------------------------------------


def published_just_before_its_row(p: Planted) -> None:
    p.world.sent("early-word", key="no-order-yet", age_ms=SECOND_MS)
    sequence = p.world.store("early-word", key="no-order-yet", age_ms=SECOND_MS)
    for group in (TICKETS, MAIL):
        p.world.done("early-word", sequence, group, age_ms=SECOND_MS)
    p.message("early-word", "pending", "business_in_grace")


def stored_just_before_the_archive_was_read(p: Planted) -> None:
    p.world.store("just-stored", key=None, topic="newsletter", age_ms=SECOND_MS)
    p.message("just-stored", "pending", "unrecorded_in_grace")


def handed_out_just_after_the_log_was_read(p: Planted) -> None:
    p.delivery(_hand_out_what_is_not_stored(p.world, age_ms=SECOND_MS), MAIL, "pending", "seen_in_grace")


def acknowledged_just_after_the_inbox_was_read(p: Planted) -> None:
    sequence = _stored(p.world, "acked-now", age_ms=30 * SECOND_MS)
    p.world.done("acked-now", sequence, MAIL, age_ms=30 * SECOND_MS)
    p.world.deliver("acked-now", sequence, TICKETS, age_ms=20 * SECOND_MS)
    p.world.ack("acked-now", sequence, TICKETS, age_ms=SECOND_MS)
    p.delivery("acked-now", TICKETS, "pending", "effect_in_grace")


def handled_before_it_was_due(p: Planted) -> None:
    due_ms = NOW_MS - 20 * MINUTE_MS
    order = p.world.order()
    p.world.sent("hasty", key=str(order), deliver_at_ms=due_ms)
    p.world.store("hasty", key=str(order), deliver_at_ms=due_ms, scheduled=True)
    sequence = p.world.fire("hasty", age_ms=20 * MINUTE_MS, topic=PAID)
    p.world.done("hasty", sequence, MAIL, age_ms=20 * MINUTE_MS)
    p.world.deliver("hasty", sequence, TICKETS, age_ms=20 * MINUTE_MS)
    p.world.handle("hasty", age_ms=20 * MINUTE_MS + 5 * SECOND_MS)
    p.world.ack("hasty", sequence, TICKETS, age_ms=19 * MINUTE_MS)
    p.delivery("hasty", TICKETS, "early", "handled_early")


def stored_and_never_placed(p: Planted) -> None:
    for message, age_ms, state, rule in (
        ("unplaced", HOUR_MS, "lost", "never_placed"), ("unplaced-yet", SECOND_MS, "pending", "placing_in_grace")
    ):  # fmt: skip
        order = p.world.order(age_ms=age_ms)
        p.world.sent(message, key=str(order), age_ms=age_ms)
        p.world.store(message, key=str(order), age_ms=age_ms, scheduled=True)
        for group in (TICKETS, MAIL):
            p.delivery(message, group, state, rule)


def published_before_the_group_began(p: Planted) -> None:
    p.world.sent("before-its-time", key=None, topic="newsletter.old")
    p.world.store("before-its-time", key=None, topic="newsletter.old")
    p.world.actions.append(
        journal.Declared(topic="newsletter.old", group=MAIL, at_ms=NOW_MS - 30 * MINUTE_MS, position=9, settings={})
    )
    p.delivery("before-its-time", MAIL, "settled", "skipped")


def held_back_by_a_pause(p: Planted) -> None:
    night = {"topic": "newsletter.paused", "group": MAIL}
    p.world.sent("held-back", key=None, topic="newsletter.paused")
    p.world.store("held-back", key=None, topic="newsletter.paused")
    p.world.actions.append(journal.Declared(**night, at_ms=NOW_MS - 2 * HOUR_MS, position=0, settings={}))
    p.world.actions.append(journal.Paused(**night, at_ms=NOW_MS - 2 * HOUR_MS, paused=True))
    p.delivery("held-back", MAIL, "pending", "paused")


def due_just_now_and_known_to_the_schedule_alone(p: Planted) -> None:
    due_ms = NOW_MS - 90 * SECOND_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms)
    p.world.sent("not-yet-fired", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, outcome="duplicate")
    p.message("not-yet-fired", "late", "not_fired")


FAULTS: tuple[Callable[[Planted], None], ...] = (
    never_published, too_new_to_judge, published_twice, left_unsent, being_sent, parked, row_not_removed,
    lost_by_the_broker, lost_by_the_broker_and_asked_for_by_no_row, sent_just_now, sent_without_a_transaction,
    order_not_paid,
    unrecorded_on_a_topic_without_a_rule, somebody_elses_topic, archive_row_missing, stored_twice, body_changed,
    recurring_messages_that_no_row_asks_for,
    key_changed, topic_changed, due_time_changed_on_the_way, canceled_in_time, cancel_left_unsent,
    cancel_that_lost_the_race, handed_out_though_the_cancel_was_answered, cancel_that_the_broker_forgot,
    held_by_its_table_until_it_is_due, withdrawn_from_its_table, withdrawn_and_published_again_under_its_id,
    delivered_though_it_was_withdrawn, discarded_from_the_outbox, discarded_and_published_again,
    discarded_on_a_misspelt_topic, discarded_after_it_had_arrived, lost_and_written_again_and_discarded,
    row_and_message_disagree_on_the_time, moved_as_the_cure_says, moved_and_canceled_alone,
    scheduled_ahead, fired_in_time, never_fired, note_lost_by_a_kill, note_lost_and_fired_twice,
    fired_and_nobody_asked_for_it, known_to_the_schedule_alone, known_to_the_schedule_and_never_fired,
    scheduled_and_lost_at_once, delivered_early, delivered_after_cancel, delivered_late, nobody_takes_it, waiting,
    in_flight, retrying, never_redelivered, dead_letter, discarded_letter, edited_letters,
    edit_that_a_kill_cut_short, redrive_that_was_stopped, redriven_and_done,
    acknowledged_before_its_effect,
    handled_and_not_acknowledged, handled_never_stored, delivered_never_stored, acknowledged_never_delivered,
    published_just_before_its_row, stored_just_before_the_archive_was_read, handed_out_just_after_the_log_was_read,
    acknowledged_just_after_the_inbox_was_read, handled_before_it_was_due, stored_and_never_placed,
    published_before_the_group_began, held_back_by_a_pause, due_just_now_and_known_to_the_schedule_alone,
)  # fmt: skip


def _stored(world: World, message: str, *, age_ms: int = HOUR_MS) -> int:
    """An order whose message is in the broker; what the groups did with it is for the caller to say."""
    order = world.order(age_ms=age_ms)
    world.sent(message, key=str(order), age_ms=age_ms)
    return world.store(message, key=str(order), age_ms=age_ms)


def _stored_and_done(world: World, message: str, key: str) -> None:
    world.sent(message, key=key)
    sequence = world.store(message, key=key)
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=HOUR_MS)


def _discarded(world: World, message: str, key: str | None, *, topic: str = PAID) -> str:
    """A message that an operator discarded, before another was published under its id."""
    world.sent(message, key=key, topic=topic, outcome="discarded")
    world.archive[-1]["sent_at_us"] -= SECOND_MS * 1000
    return message


def _scheduled(world: World, message: str, order: int, due_ms: int) -> None:
    world.sent(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms)
    world.store(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True)


def _withdrawal(p: Planted, name: str, of: str) -> None:
    """The cancel of a message that its table still held: archived as soon as it was created."""
    p.message(p.world.sent_cancel(name, of, "canceled"), "settled", "cancel_accepted")
    p.world.archive[-1]["sent_at_us"] = p.world.archive[-1]["created_at_us"]


def _hand_out_what_is_not_stored(world: World, *, age_ms: int) -> str:
    """Another message must come after it, or the log would have lost its end. Returns the name of the message."""
    sequence = world.place(PAID)
    message = never_stored(PAID, sequence)
    world.deliver(message, sequence, MAIL, age_ms=age_ms)
    return message


def _nack(world: World, sequence: int, *, age_ms: int, visible_ms: int) -> None:
    world.actions.append(
        journal.Requeued(topic=PAID, group=MAIL, at_ms=NOW_MS - age_ms, entries=[(sequence, 1, visible_ms, 1)])
    )


def _die(world: World, sequence: int, *, age_ms: int, group: str = MAIL) -> None:
    world.actions.append(
        journal.Died(topic=PAID, group=group, at_ms=NOW_MS - age_ms, entries=[(sequence, 1, 1)], reason="no")
    )
