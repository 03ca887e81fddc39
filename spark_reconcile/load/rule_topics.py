"""Rules whose topic nothing was ever published to: refused where it looks misspelt, else named. Reads nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.settings import Settings
from spark_reconcile.sources.sql_statements import CANCELS, Leg

if TYPE_CHECKING:
    from spark_reconcile.core.counts import LegCount

NEAR: Final = 0.8
"""How much of two topics must be alike, as difflib measures it, for one to be taken for the other misspelt."""
_PUBLISHED: Final = frozenset({Leg.OUTBOX, Leg.ARCHIVE, "messages"})


def check_rule_topics(settings: Settings, counts: Sequence[LegCount], *, now_ms: int) -> None:
    """Raises ConfigurationError for a rule whose topic looks like another one's, misspelt.

    It does where rows older than the grace time ask for messages on the topic, no outbox row, archive row, message or
    action has ever been on it, and a topic with messages that no rule covers is nearly the same. Every one of these
    rows would be called lost, and every message on the other topic would go unchecked.
    """
    covered = {rule.topic for rule in settings.rules}
    published = {one.topic for one in counts if one.leg in _PUBLISHED and one.topic and one.topic != CANCELS}
    for number, rule in enumerate(settings.rules):
        asking = [one for one in _unanswered(settings, counts, number) if one.first_ms < now_ms - _grace_ms(settings)]
        near = difflib.get_close_matches(rule.topic, sorted(published - covered), n=1, cutoff=NEAR)
        if asking and near:
            raise ConfigurationError(
                f"rule {rule.name}: {sum(one.rows for one in asking):,} rows ask for messages on the topic "
                f"{rule.topic!r}, on which there has never been a message, an outbox row or an action of a group; did "
                f"you mean {near[0]!r}? If the topic is right, give {near[0]!r} a rule of its own"
            )


def note_on_topic(settings: Settings, counts: Sequence[LegCount], number: int) -> str:
    """What is to be known of the topic of the rule with this number; empty where something was on it."""
    if not _unanswered(settings, counts, number):
        return ""
    return f"no message, outbox row or action of a group has ever been on its topic {settings.rules[number].topic!r}"


def _unanswered(settings: Settings, counts: Sequence[LegCount], number: int) -> list[LegCount]:
    """The rows of a rule, where nothing has ever been on its topic."""
    topic = settings.rules[number].topic
    if any(one.topic == topic for one in counts if one.leg in _PUBLISHED or one.leg == "actions"):
        return []
    return [one for one in counts if one.leg == Leg.BUSINESS and one.note == str(number) and one.rows]


def _grace_ms(settings: Settings) -> int:
    return int(settings.grace.seconds * 1000)
