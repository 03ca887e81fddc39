"""Checks for rules whose topic has no messages: a misspelt one is an error, any other a note. Reads nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.settings import Settings
from spark_reconcile.sources.sql_statements import CANCELS, Leg

if TYPE_CHECKING:
    from spark_reconcile.core.source_counts import LegCount

NEAR: Final = 0.8
"""The similarity ratio (difflib) from which one topic is taken for a misspelling of another."""
_PUBLISHED: Final = frozenset({Leg.OUTBOX, Leg.ARCHIVE, "messages"})


def check_rule_topics(settings: Settings, counts: Sequence[LegCount], *, now_ms: int) -> None:
    """Raises ConfigurationError for a rule whose topic looks like a misspelling of another.

    The conditions: rows older than the grace time require messages on the topic; it has never had an outbox row,
    archive row, message or action; and a similar topic has messages that no rule covers. Without the check, all these
    rows would be lost, and no message on the other topic would be compared.
    """
    covered = {rule.topic for rule in settings.rules}
    published = {count.topic for count in counts if count.leg in _PUBLISHED and count.topic and count.topic != CANCELS}
    for rule_number, rule in enumerate(settings.rules):
        asking = [
            count for count in _unanswered(settings, counts, rule_number) if count.first_ms < now_ms - settings.grace.ms
        ]
        near = difflib.get_close_matches(rule.topic, sorted(published - covered), n=1, cutoff=NEAR)
        if asking and near:
            raise ConfigurationError(
                f"rule {rule.name}: {sum(count.rows for count in asking):,} rows ask for messages on the topic "
                f"{rule.topic!r}, on which there has never been a message, an outbox row or an action of a group; did "
                f"you mean {near[0]!r}? If the topic is right, give {near[0]!r} a rule of its own"
            )


def note_on_topic(settings: Settings, counts: Sequence[LegCount], rule_number: int) -> str:
    """Returns a note on the topic of the rule with this number if it was never used; else empty."""
    if not _unanswered(settings, counts, rule_number):
        return ""
    return (
        f"no message, outbox row or action of a group has ever been on its topic {settings.rules[rule_number].topic!r}"
    )


def _unanswered(settings: Settings, counts: Sequence[LegCount], rule_number: int) -> list[LegCount]:
    """Returns the rows of a rule whose topic was never used; else none."""
    topic = settings.rules[rule_number].topic
    if any(count.topic == topic for count in counts if count.leg in _PUBLISHED or count.leg == "actions"):
        return []
    return [count for count in counts if count.leg == Leg.BUSINESS and count.note == str(rule_number) and count.rows]
