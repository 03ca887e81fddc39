"""Worlds beside the planted faults: each needs a rule, a group, an archive or an inbox more, or several hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replace_record
from sqlalchemy import create_engine, text

from outbox_core.journal import journal
from outbox_core.journal.deletion_records import DeletedGroup
from spark_reconcile import BusinessRule, Condition, InboxSource, Operator, Settings
from tests.fixtures.databases import Database, sqlite_database
from tests.spark_reconcile.faults import ANNOUNCED, REMINDED, Planted, Verdict, plant_all
from tests.spark_reconcile.timed_ids import timed_id, with_timed_ids
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    REMINDER,
    TICKETS,
    World,
    archived,
    sha,
)

SECRET = "the body of a message"
REFUND, PICKED, LIMITS = "refund", "newsletter.picked", "lim.a"
REFUNDS = BusinessRule(name="refunds", table="refund", key_column="order_id", time_column="at", topic=REFUND)


def with_a_body(p: Planted) -> None:
    p.world.store("with-body", key="no-such-order", body=SECRET)
    p.message("with-body", "phantom", "no_business_row")
    for group in (TICKETS, MAIL):
        p.delivery("with-body", group, "late", "not_delivered")


def without_a_key_and_twice_under_one(p: Planted) -> None:
    for number, key in enumerate(("7", "8", "8")):
        p.world.store(p.world.sent(f"refunded-{number}", key=key, topic=REFUND), key=key, topic=REFUND)
    p.expected.add(("business", None, REFUNDS.name, "unknown", "no_key"))  # type: ignore[arg-type]
    p.business(7, "lost", "too_few_messages", of=REFUNDS.name)


def turned_away_by_the_inbox(p: Planted) -> None:
    order = p.world.order()
    message = p.world.sent("again", key=str(order), outcome="duplicate")
    sequence = p.world.store(message, key=str(order))
    p.world.done(message, sequence, MAIL, age_ms=HOUR_MS)
    p.world.deliver(message, sequence, TICKETS, age_ms=HOUR_MS)
    p.world.handle(message, age_ms=HOUR_MS - 10)
    p.world.deliver(message, sequence, TICKETS, age_ms=HOUR_MS - MINUTE_MS, number=2)
    p.world.ack(message, sequence, TICKETS, age_ms=HOUR_MS - MINUTE_MS - 10)


def handled_in_two_inboxes(p: Planted) -> None:
    """A message whose effect the other inbox holds, too, and no other effect."""
    p.delivery("good-1", TICKETS, "duplicate", "handled_twice")


def handled_in_an_inbox_that_was_purged_since(p: Planted) -> None:
    """The other inbox has no row of the time before `good-1`, and this one has."""
    age_ms = 150 * MINUTE_MS
    p.world.settled(age_ms=3 * HOUR_MS)
    order = p.world.order(age_ms=age_ms)
    message = p.world.sent("purged-elsewhere", key=str(order), age_ms=age_ms)
    sequence = p.world.store(message, key=str(order), age_ms=age_ms)
    p.world.done(message, sequence, MAIL, age_ms=age_ms)
    p.world.deliver(message, sequence, TICKETS, age_ms=age_ms - 20)
    p.world.ack(message, sequence, TICKETS, age_ms=age_ms - 40)
    p.delivery(message, TICKETS, "unknown", "inbox_out_of_reach")


def older_than_the_archive_whose_only_earlier_time_cannot_be_true(p: Planted) -> None:
    p.world.store(p.world.sent("sent-in-1970", key=None, topic="newsletter.1970"), key=None, topic="newsletter.1970")
    p.world.archive[-1]["sent_at_us"] = 5_000_000
    p.world.sent("oldest-archived", key=None, topic="newsletter", age_ms=5 * HOUR_MS)
    p.world.store("oldest-archived", key=None, topic="newsletter", age_ms=5 * HOUR_MS)
    p.world.store("older-than-the-archive", key=None, topic="newsletter", age_ms=6 * HOUR_MS)
    p.message("older-than-the-archive", "unknown", "archive_out_of_reach")


def passed_by_a_filter_that_was_changed(p: Planted) -> None:
    picky = {"topic": PICKED, "group": "picky", "position": 0}
    for at_ms, filter_ in ((NOW_MS - 23 * HOUR_MS, "type = 'yes'"), (NOW_MS - MINUTE_MS, None)):
        p.world.actions.append(journal.Declared(**picky, at_ms=at_ms, settings={"filter": filter_}))
    for number in range(3):
        message = p.world.sent(f"picked-{number + 1}", key=None, topic=PICKED, age_ms=2 * HOUR_MS)
        p.world.store(message, key=None, topic=PICKED, age_ms=2 * HOUR_MS)
    p.world.done("picked-1", 0, "picky", age_ms=2 * HOUR_MS, topic=PICKED)
    for message in ("picked-2", "picked-3"):
        p.delivery(message, "picky", "unknown", "filter_changed")


def dropped_before_a_group_had_settled_them(p: Planted) -> None:
    for position in (2, 3):
        at_ms = NOW_MS - 3 * HOUR_MS + position
        p.world.actions.append(journal.Dropped(topic=PICKED, group="picky", at_ms=at_ms, position=position))


def canceled_after_their_delivery(p: Planted) -> None:
    order = p.world.order()
    sequence = p.world.store(p.world.sent("done-before-its-cancel", key=str(order)), key=str(order))
    for group in (TICKETS, MAIL):
        p.world.done("done-before-its-cancel", sequence, group, age_ms=HOUR_MS)
    order = p.world.order(status="BOOKED", remind_at_ms=NOW_MS - HOUR_MS)
    p.world.sent("reminded", key=str(order), topic=REMINDER, deliver_at_ms=NOW_MS - HOUR_MS)
    p.world.store("reminded", key=str(order), topic=REMINDER, deliver_at_ms=NOW_MS - HOUR_MS, scheduled=True)
    p.world.done("reminded", p.world.fire("reminded", age_ms=HOUR_MS), MAIL, age_ms=HOUR_MS, topic=REMINDER)
    p.world.actions.append(
        journal.Canceled(at_ms=NOW_MS - 50 * MINUTE_MS, ids=["done-before-its-cancel", "reminded"], topics=["", ""])
    )


def canceled_on_one_of_two_topics(p: Planted) -> None:
    """An id on two topics; both messages were due an hour ago, and the cancel is good for one of them."""
    message, due_ms = "on-two-topics", NOW_MS - HOUR_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=3 * HOUR_MS)
    for topic, key, age_ms in ((REMINDER, str(order), 3 * HOUR_MS), (LIMITS, "k", 4 * HOUR_MS)):
        p.world.sent(message, key=key, topic=topic, deliver_at_ms=due_ms, age_ms=age_ms)
        p.world.store(message, key=key, topic=topic, deliver_at_ms=due_ms, scheduled=True, age_ms=age_ms)
    p.world.actions.append(
        journal.Canceled(at_ms=NOW_MS - 2 * HOUR_MS, ids=[message], topics=[LIMITS], scope=("lim.*",))
    )
    p.world.sent_cancel("cancel-on-one", message, "canceled", age_ms=2 * HOUR_MS)
    p.delivery(message, MAIL, "late", "not_fired")
    p.message(message, "canceled", "canceled")
    p.message("cancel-on-one", "settled", "cancel_accepted")


OTHERS: tuple[Callable[[Planted], None], ...] = (
    with_a_body, without_a_key_and_twice_under_one, turned_away_by_the_inbox, handled_in_two_inboxes,
    handled_in_an_inbox_that_was_purged_since, older_than_the_archive_whose_only_earlier_time_cannot_be_true,
    passed_by_a_filter_that_was_changed, dropped_before_a_group_had_settled_them, canceled_after_their_delivery,
    canceled_on_one_of_two_topics,
)  # fmt: skip
"""Worlds that need a rule, a group or an inbox more. Each has ids, keys, topics and groups of its own, by which its
verdicts are found among those of the union.
"""


def write_refunds(database: Database) -> None:
    """One row without a key, and two under each of two keys."""
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE refund (order_id INTEGER NULL, at BIGINT)"))
        connection.execute(
            text("INSERT INTO refund VALUES (NULL, :at), (7, :at), (7, :at), (8, :at), (8, :at)"),
            {"at": (NOW_MS - HOUR_MS) * 1000},
        )
    engine.dispose()


# -- everything: faults and others, and what stands in several hours -------------------------------------------------

KEYLESS = "KEYLESS"
"""The status of orders whose rule, `nameless`, finds no key in them."""
WITHOUT_KEY = [(NOW_MS - 4 * HOUR_MS + MINUTE_MS, 2), (NOW_MS - 3 * HOUR_MS, 1), (NOW_MS - HOUR_MS, 1)]
"""Verdicts on them: the newest time in an hour, and how many rows it has."""
BOTH_RULES = {"901": 2, "902": 3, "903": 1}
"""Keys that two rules ask for a message each, and how many each has."""
ASTRAY = timed_id("astray", NOW_MS - 30 * HOUR_MS)
"""An id that was made by a clock that was wrong by a day."""
CENTURIES_MS = 10_413_792_000_000
"""2300-01-01"""
LARGEST = 2**63 - 1
"""A sentinel: what a BIGINT holds at most."""


def spelled_in_another_way(p: Planted) -> None:
    order = p.world.order(age_ms=2 * HOUR_MS)
    done(p.world, "spelled", key=f"{order} ", age_ms=2 * HOUR_MS)
    p.message("spelled", "mismatch", "key_spelling_differs")
    p.business(order, "mismatch", "message_key_spelling_differs")


def of_a_group_that_was_deleted(p: Planted) -> None:
    ended = {"topic": "newsletter.ended", "group": "ended"}
    p.world.actions.append(journal.Declared(**ended, at_ms=NOW_MS - 20 * HOUR_MS, position=0, settings={}))
    p.world.actions.append(DeletedGroup(**ended, at_ms=NOW_MS - 30 * MINUTE_MS))
    _of_no_rule(p.world, "of-a-deleted-group", topic="newsletter.ended")
    p.delivery("of-a-deleted-group", "ended", "settled", "group_deleted")


def rejected_by_a_filter(p: Planted) -> None:
    choosy = {"topic": "newsletter.filtered", "group": "choosy", "settings": {"filter": "type = 'yes'"}}
    p.world.actions.append(journal.Declared(**choosy, at_ms=NOW_MS - 20 * HOUR_MS, position=0))
    _of_no_rule(p.world, "rejected", topic="newsletter.filtered")
    p.delivery("rejected", "choosy", "settled", "filtered_out")


def archived_in_the_table_and_in_a_file(p: Planted) -> None:
    _of_no_rule(p.world, ARCHIVED_TWICE)
    p.message(ARCHIVED_TWICE, "settled", "archived_twice")


def published_twice_in_two_hours(p: Planted) -> None:
    order = p.world.order(age_ms=4 * HOUR_MS)
    for age_ms in (4 * HOUR_MS, 2 * HOUR_MS):
        done(p.world, f"of-{age_ms}", key=str(order), age_ms=age_ms)
    p.business(order, "duplicate", "published_twice")


def of_a_row_in_the_next_hour_or_in_none(p: Planted) -> None:
    """All is well: a row a minute after its message, and rows whose time is missing or cannot be true."""
    p.world.order(age_ms=2 * HOUR_MS + 29 * MINUTE_MS)
    done(p.world, "of-the-hour-before", key=str(p.world.last_order), age_ms=2 * HOUR_MS + 31 * MINUTE_MS)
    for paid_at_us in (None, -5, CENTURIES_MS * 1000):
        p.world.order()
        p.world.orders[-1]["paid_at_us"] = paid_at_us
        done(p.world, f"of-a-row-of-{paid_at_us}", key=str(p.world.last_order), age_ms=2 * HOUR_MS)


def archived_at_a_time_that_cannot_be_true(p: Planted) -> None:
    """All is well: the broker has them, on a topic without a rule."""
    for created_at_us in (-5_000_000, CENTURIES_MS * 1000):
        _of_no_rule(p.world, f"archived-at-{created_at_us}")
        p.world.archive[-1]["created_at_us"] = created_at_us


def with_the_largest_number_of_its_column(p: Planted) -> None:
    """Each is one row's verdict, and none but the due time of an archive row is a fault."""
    for column in ("created_at_us", "sent_at_us", "deliver_at_ms"):
        _of_no_rule(p.world, f"largest-{column}")
        p.world.archive[-1][column] = LARGEST
    p.message("largest-deliver_at_ms", "mismatch", "due_differs")
    p.world.unsent("largest-unsent", key=None, topic="newsletter", age_ms=2 * HOUR_MS)
    p.world.outbox[-1]["deliver_at_ms"] = LARGEST
    p.message("largest-unsent", "unsent", "not_sent")
    p.world.settled(age_ms=2 * HOUR_MS)
    p.world.inbox[-1]["handled_at_us"] = LARGEST
    p.world.settled(age_ms=2 * HOUR_MS)
    p.world.orders[-1]["paid_at_us"] = LARGEST


def in_the_outbox_again_an_hour_after_it_was_sent(p: Planted) -> None:
    _of_no_rule(p.world, "again-in-the-outbox", age_ms=3 * HOUR_MS)
    p.world.unsent("again-in-the-outbox", key=None, topic="newsletter", age_ms=2 * HOUR_MS)
    p.message("again-in-the-outbox", "pending", "not_removed_yet")


def stored_again_an_hour_later(p: Planted) -> None:
    _of_no_rule(p.world, "stored-again", age_ms=3 * HOUR_MS)
    again = replace_record(p.world.stored[-1], sequence=p.world.place("newsletter"), stored_at_ms=NOW_MS - 2 * HOUR_MS)
    p.world.stored.append(again)
    p.message("stored-again", "duplicate", "stored_twice")


def delivered_hours_late(p: Planted) -> None:
    order = p.world.order(age_ms=4 * HOUR_MS)
    sequence = p.world.store(p.world.sent("hours-late", key=str(order), age_ms=4 * HOUR_MS), key=str(order),
                             age_ms=4 * HOUR_MS)  # fmt: skip
    p.world.done("hours-late", sequence, MAIL, age_ms=4 * HOUR_MS)
    p.world.done("hours-late", sequence, TICKETS, age_ms=2 * HOUR_MS)
    p.delivery("hours-late", TICKETS, "late", "delivered_late")


def handed_out_hours_after_its_cancel_was_answered(p: Planted) -> None:
    due_ms = NOW_MS - 50 * MINUTE_MS
    order = p.world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=4 * HOUR_MS)
    p.world.sent("broken-word", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=4 * HOUR_MS)
    p.world.store("broken-word", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True,
                  age_ms=4 * HOUR_MS)  # fmt: skip
    p.world.done("broken-word", p.world.fire("broken-word", age_ms=50 * MINUTE_MS), MAIL, age_ms=50 * MINUTE_MS,
                 topic=REMINDER)  # fmt: skip
    p.world.actions.append(journal.Canceled(at_ms=NOW_MS - 40 * MINUTE_MS, ids=["broken-word"], topics=[""]))
    cancel = p.world.sent_cancel("cancel-of-hours-before", "broken-word", "canceled", age_ms=2 * HOUR_MS)
    p.message(cancel, "settled", "cancel_accepted")
    p.message("broken-word", "canceled", "canceled")
    p.delivery("broken-word", MAIL, "phantom", "delivered_after_cancel")
    p.business(order, "canceled", "message_canceled", REMINDED)


def asked_for_by_two_rules(p: Planted) -> None:
    for key, messages in BOTH_RULES.items():
        p.world.orders.append({**p.world.orders[0], "id": int(key), "paid_at_us": (NOW_MS - 2 * HOUR_MS) * 1000})
        for number in range(messages):
            done(p.world, f"of-{key}-{number}", key=key, age_ms=2 * HOUR_MS)
    for rule in (ANNOUNCED, "second"):
        p.business(902, "duplicate", "published_twice", rule)
        p.business(903, "lost", "too_few_messages", rule)


def without_a_key_in_three_hours(p: Planted) -> None:
    without_keys(p.world)
    p.expected.add(("business", None, "nameless", "unknown", "no_key"))  # type: ignore[arg-type]


def lost_under_the_id_of_a_wrong_clock(p: Planted) -> None:
    order = p.world.order(age_ms=2 * HOUR_MS)
    p.message(p.world.sent(ASTRAY, key=str(order), age_ms=2 * HOUR_MS), "lost", "not_in_broker")
    p.business(order, "lost", "message_lost")


IN_SEVERAL_HOURS: tuple[Callable[[Planted], None], ...] = (
    spelled_in_another_way, of_a_group_that_was_deleted, rejected_by_a_filter, archived_in_the_table_and_in_a_file,
    published_twice_in_two_hours, archived_at_a_time_that_cannot_be_true, of_a_row_in_the_next_hour_or_in_none,
    with_the_largest_number_of_its_column, in_the_outbox_again_an_hour_after_it_was_sent,
    stored_again_an_hour_later, delivered_hours_late, handed_out_hours_after_its_cancel_was_answered,
    asked_for_by_two_rules, without_a_key_in_three_hours,
)  # fmt: skip
ARCHIVED_TWICE = "archived-twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """A world with every plant, and the verdicts in it that are not plain. `of_no_hour`: those that a whole run alone
    gives: no time tells in which hour the row was written, so its message may be in any.
    """

    world: World
    expected: set[Verdict]
    of_no_hour: set[Verdict]


def everything(*, timed: bool) -> Everything:
    """Every plant there is, beside messages for which all is well. `timed`: their ids tell when they were made."""
    world = World()
    world.groups()
    for number in range(60):
        world.settled(age_ms=2 * HOUR_MS + number * 2 * MINUTE_MS)
    planted = Planted(world, plant_all(world))
    for plant in (*OTHERS, *IN_SEVERAL_HOURS):
        plant(planted)
    if timed:
        planted.expected = with_timed_ids(world, planted.expected)
    lost_under_the_id_of_a_wrong_clock(planted)
    nowhere = Planted(world)
    nowhere.business(world.order(), "unknown", "impossible_time")
    world.orders[-1]["paid_at_us"] = CENTURIES_MS * 1000
    return Everything(world=world, expected=planted.expected, of_no_hour=nowhere.expected)


def write_everything(world: World, folder: Path) -> Settings:
    """Write that world with all that its plants need beside it; returns the settings that reconcile it."""
    database, other = (
        sqlite_database(folder),
        Database(name="sqlite", url=f"sqlite:///{folder / 'other.db'}", schema=None),
    )
    settings = world.write(database, folder)
    World(inbox=world.inbox[:1]).write_tables(other)
    write_refunds(database)
    settings = replace(
        two_rules_more(settings), inboxes=[*settings.inboxes, InboxSource(group=TICKETS, url=other.url)]
    )  # fmt: skip
    settings = replace(settings, rules=[*settings.rules, REFUNDS])
    return archived(
        settings, folder / "moved", [row for row in world.archive if row["body_sha256"] == sha(ARCHIVED_TWICE)]
    )


def without_keys(world: World) -> None:
    """Four rows of the rule that finds no key, in three hours."""
    for age_ms in (4 * HOUR_MS, 4 * HOUR_MS - MINUTE_MS, 3 * HOUR_MS, HOUR_MS):
        world.order(age_ms=age_ms, status=KEYLESS)


def two_rules_more(settings: Settings) -> Settings:
    """A second one on the keys of BOTH_RULES, and one that finds no key."""
    announced = settings.rules[0]
    again = [Condition(column="id", operator=Operator.IN, values=tuple(map(int, BOTH_RULES)))]
    keyless = [Condition(column="status", values=(KEYLESS,))]
    nameless = replace(announced, name="nameless", key_column="remind_at_us", topic="voucher", where=keyless)
    return replace(settings, rules=[*settings.rules, replace(announced, name="second", where=again), nameless])


def done(world: World, message: str, *, key: str, age_ms: int) -> None:
    """A message that went all the way; its business row is another's matter."""
    sequence = world.store(world.sent(message, key=key, age_ms=age_ms), key=key, age_ms=age_ms)
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=age_ms)


def _of_no_rule(world: World, message: str, *, topic: str = "newsletter", age_ms: int = 2 * HOUR_MS) -> None:
    world.store(world.sent(message, key=None, topic=topic, age_ms=age_ms), key=None, topic=topic, age_ms=age_ms)
