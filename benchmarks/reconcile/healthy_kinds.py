"""Kinds of bookings with unusual records but no fault, for instance a group that seeks.

Together with the kinds of faults and delivery_faults that end well, they are the variety of a random world. Nothing is
written to a disk here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from benchmarks.reconcile.planting import (
    ACKED_AFTER_MS,
    HANDED_AFTER_MS,
    HANDLED_AFTER_MS,
    MAIL,
    SECOND_MS,
    TICKETS,
    Kind,
    Message,
    Planted,
    renamed,
)
from outbox_core.journal import journal

REPLAYED, ADVANCED = "newsletter.replayed", "newsletter.advanced"
"""Topics without a rule whose group is moved by a seek, back and ahead."""
BULLETINS: Final = ("bulletin.one", "bulletin.three", "bulletin.seven")
BULLETIN_GROUPS: Final = {"bulletin.one": 1, "bulletin.three": 3, "bulletin.seven": 7}
"""Topics without a rule that many groups, none with an inbox, have."""


def given_back_once(p: Planted, one: Message) -> None:
    """A consumer failed at it, and the next one did not."""
    place = _stored(p, one, but=MAIL)
    p.hand(one, place, MAIL)
    at_ms = one.created_ms + SECOND_MS
    entry = (place, 1, at_ms + SECOND_MS, 1)
    p.actions.append(journal.Requeued(topic=one.topic, group=MAIL, at_ms=at_ms, entries=[entry]))
    _done_again(p, one, place, MAIL, at_ms=at_ms + 2 * SECOND_MS)


def handed_out_again(p: Planted, one: Message) -> None:
    """A consumer died with it, and it came again when its invisible time was over."""
    place = _stored(p, one, but=MAIL)
    p.hand(one, place, MAIL)
    _done_again(p, one, place, MAIL, at_ms=one.created_ms + 40 * SECOND_MS)


def deduplicated_by_the_inbox(p: Planted, one: Message) -> None:
    """The consumer died between its commit and the acknowledgement; the inbox turned the second delivery away."""
    place = _stored(p, one, but=TICKETS)
    p.hand(one, place, TICKETS)
    p.handle(one)
    _done_again(p, one, place, TICKETS, at_ms=one.created_ms + 40 * SECOND_MS)


def handled_at_the_desk(p: Planted, one: Message) -> None:
    """The group's other database has the effect."""
    place = _stored(p, one, but=TICKETS)
    p.hand(one, place, TICKETS)
    p.second_inbox.append((one.id, one.topic, one.created_ms + HANDLED_AFTER_MS))
    p.ack(one, place, TICKETS)


def resent(p: Planted, one: Message) -> None:
    """The sender died before it read the broker's answer; the compensator sent it again, and the broker knew it."""
    p.asked(one)
    p.sent(one, outcome="duplicate")
    p.done(one, p.store(one))


def under_one_key(p: Planted, one: Message) -> None:
    """Three bookings and three messages share a key."""
    for number in range(3):
        p.asked(one)
        p.whole(renamed(one, f"same key {number}"))


def for_many_groups(p: Planted, one: Message) -> None:
    """A message that none, some or many groups have."""
    topic = BULLETINS[one.created_ms % len(BULLETINS)]
    news = renamed(one, "bulletin", topic=topic, key=None)
    p.sent(news)
    place = p.store(news)
    for number in range(BULLETIN_GROUPS[topic]):
        p.hand(news, place, f"reader-{number}", at_ms=news.created_ms + HANDED_AFTER_MS)
        p.ack(news, place, f"reader-{number}", at_ms=news.created_ms + ACKED_AFTER_MS)


VARIETY: Final[tuple[Kind, ...]] = (
    given_back_once, handed_out_again, deduplicated_by_the_inbox, handled_at_the_desk, resent, under_one_key,
    for_many_groups,
)  # fmt: skip


def plant_seeks(p: Planted, bookings: Sequence[Message], random: Random) -> None:
    """Two topics: a group that went back and did some messages twice, and one that was moved ahead of some.

    The bookings are used for nothing else.
    """
    half = len(bookings) // 2
    for topic, some, plant in ((REPLAYED, bookings[:half], _replayed), (ADVANCED, bookings[half:], _advanced)):
        if some:
            plant(p, [renamed(one, topic, topic=topic, key=None) for one in some], random.randrange(len(some)))


def seeking_groups(at_ms: int) -> list[journal.Action]:
    """The declarations of the groups on these topics, before anything else."""
    names = [(topic, MAIL) for topic in (REPLAYED, ADVANCED)]
    names += [(topic, f"reader-{number}") for topic, count in BULLETIN_GROUPS.items() for number in range(count)]
    return [journal.Declared(topic=topic, group=group, at_ms=at_ms, position=0, settings={}) for topic, group in names]


def _replayed(p: Planted, news: Sequence[Message], position: int) -> None:
    """Everything is done; then the group goes back, and does the last ones again."""
    at_ms = news[-1].created_ms + 60 * SECOND_MS
    places = [_sent_and_stored(p, one) for one in news]
    for one, place in zip(news, places, strict=True):
        _done_again(p, one, place, MAIL, at_ms=one.created_ms + HANDED_AFTER_MS)
    _seek(p, REPLAYED, places[position], at_ms)
    for one, place in zip(news[position:], places[position:], strict=True):
        _done_again(p, one, place, MAIL, at_ms=at_ms + SECOND_MS)


def _advanced(p: Planted, news: Sequence[Message], position: int) -> None:
    """Nobody takes the first ones; soon after the message at `position` the group is moved to it, and goes on."""
    at_ms = news[position].created_ms + 30 * SECOND_MS
    places = [_sent_and_stored(p, one) for one in news]
    _seek(p, ADVANCED, places[position], at_ms)
    for one, place in zip(news, places, strict=True):
        if place < places[position]:
            p.delivery(one, MAIL, "skipped")
        else:
            _done_again(p, one, place, MAIL, at_ms=max(at_ms, one.created_ms) + SECOND_MS)


def _seek(p: Planted, topic: str, position: int, at_ms: int) -> None:
    p.actions.append(journal.Sought(topic=topic, group=MAIL, at_ms=at_ms, position=position, generation=2))


def _stored(p: Planted, one: Message, *, but: str) -> int:
    """Asked for, sent, stored, and done in all groups `but` one."""
    p.asked(one)
    place = _sent_and_stored(p, one)
    p.done(one, place, but=but)
    return place


def _sent_and_stored(p: Planted, one: Message) -> int:
    p.sent(one)
    return p.store(one)


def _done_again(p: Planted, one: Message, place: int, group: str, *, at_ms: int) -> None:
    """Handed out and acknowledged then."""
    p.hand(one, place, group, at_ms=at_ms)
    p.ack(one, place, group, at_ms=at_ms + SECOND_MS)
