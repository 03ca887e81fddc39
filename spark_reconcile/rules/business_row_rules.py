"""The verdicts on business rows and the messages that they must have, in order of precedence.

Facts of one (rule, key): `asked` (business rows under that key of all rules on the topic, nearly always 1) and the
times of the newest and the oldest, `messages` under that key and topic, the time of the newest, and how many of these
have which verdict of their own (`lost`, `unsent`, ...). It reads nothing.
"""

from __future__ import annotations

from typing import Final

from spark_reconcile.rules.fact_conditions import Fact, newer
from spark_reconcile.rules.verdict_rule import Severity, State, VerdictRule

_asked, _messages, _oldest_ms = Fact("asked"), Fact("messages"), Fact("oldest_ms")
_fresh_since_ms = Fact("now_ms") - Fact("grace_ms")
_newest_ms = Fact("newest_ms")
_discarded = Fact("discarded")
_live = _messages - Fact("canceled") - _discarded

BUSINESS_ROW_RULES: Final[tuple[VerdictRule, ...]] = (
    VerdictRule(
        name="no_key",
        state=State.UNKNOWN,
        severity=Severity.FINDING,
        when=Fact("keyless").is_(1),
        meaning="The row has no key, so its message cannot be distinguished from others.",
        cause="The rule's key column is null or empty.",
        cure="Give the row its key, or leave such rows out by the rule's where.",
    ),
    VerdictRule(
        name="impossible_time",
        state=State.UNKNOWN,
        severity=Severity.FINDING,
        when=(_messages < _asked) & (Fact("impossible").is_(1) | (_newest_ms > Fact("latest_ms"))),
        meaning="Its message is missing, and the row's time cannot be true: it may be lost or on its way.",
        cause="time_column or time_unit is not what the table has, or the row was written with a wrong clock.",
        cure="Correct the rule, or the row's time; leave rows without a true time out by the rule's where.",
    ),
    VerdictRule(
        name="message_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(_messages < _asked) & newer(_newest_ms, _fresh_since_ms),
        meaning="Its message is missing, and the row is newer than the grace time.",
    ),
    VerdictRule(
        name="message_replica_behind",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(_messages < _asked) & newer(_newest_ms, Fact("archive_until_ms") - Fact("grace_ms")),
        meaning="Its message is missing, and the outbox's database, a replica, has not come so far.",
    ),
    VerdictRule(
        name="message_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=(_messages < _asked) & (_oldest_ms < Fact("archive_reach_ms")) & (_oldest_ms < Fact("broker_reach_ms")),
        meaning="Older than what either the archive or the broker's log still holds: its message cannot be looked for.",
    ),
    VerdictRule(
        name="message_key_spelling_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=(_messages < _asked) & Fact("respelled").is_(1),
        meaning="Its message is there, under a key that the column's collation calls equal.",
        echo=True,
    ),
    VerdictRule(
        name="no_message",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_messages.is_(0),
        meaning="The row asks for a message, and neither the outbox, the archive nor the broker has one.",
        cause="The business code wrote the row around publish(), or in another transaction.",
        cure="Publish the message from the row; find the code path that does not.",
    ),
    VerdictRule(
        name="too_few_messages",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_messages < _asked,
        meaning="More business rows, of all rules on the topic, than messages under this key.",
        cause="The business code wrote a row around publish().",
        cure="Publish the missing message; find the code path that does not.",
    ),
    VerdictRule(
        name="row_replica_behind",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(Fact("due_differs").is_(1) | (_live > _asked))
        & newer(Fact("newest_message_ms"), Fact("business_until_ms") - Fact("grace_ms")),
        meaning="Its newest message does not fit, and the business table, a replica, has not come so far.",
    ),
    VerdictRule(
        name="due_time_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("due_differs").is_(1),
        meaning="The row's due time and its message's are not the same.",
        cause="The row was changed after the message was published.",
        cure="Cancel the message, and publish it again with the row's time.",
    ),
    VerdictRule(
        name="message_mismatch",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("mismatch") >= 1,
        meaning="Its message is a mismatch.",
        echo=True,
    ),
    VerdictRule(
        name="message_lost",
        state=State.LOST,
        severity=Severity.FINDING,
        when=Fact("lost") >= 1,
        meaning="Its message is lost.",
        echo=True,
    ),
    VerdictRule(
        name="message_unsent",
        state=State.UNSENT,
        severity=Severity.FINDING,
        when=Fact("unsent") >= 1,
        meaning="Its message is unsent.",
        echo=True,
    ),
    VerdictRule(
        name="message_stored_twice",
        state=State.DUPLICATE,
        severity=Severity.FINDING,
        when=Fact("duplicate") >= 1,
        meaning="Its message was stored twice.",
        echo=True,
    ),
    VerdictRule(
        name="message_parked",
        state=State.PARKED,
        severity=Severity.ATTENTION,
        when=Fact("parked") >= 1,
        meaning="Its message is parked.",
        echo=True,
    ),
    VerdictRule(
        name="published_twice",
        state=State.DUPLICATE,
        severity=Severity.FINDING,
        when=_live > _asked,
        meaning="More messages, under ids of their own, than business rows of all rules on the topic under this key.",
        cause="The business code published more than once; no duplicate window or inbox can see that.",
        cure="Give the message an id made from the row (message_id=...), so that a repeat is known as one.",
    ),
    VerdictRule(
        name="message_discarded",
        state=State.DISCARDED,
        severity=Severity.INFO,
        when=(_live < _asked) & (_discarded >= 1),
        meaning="Its message was discarded.",
        echo=True,
    ),
    VerdictRule(
        name="message_canceled",
        state=State.CANCELED,
        severity=Severity.OK,
        when=_live < _asked,
        meaning="Its message was canceled.",
        echo=True,
    ),
    VerdictRule(
        name="message_pending",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=Fact("pending") >= 1,
        meaning="Its message is on its way to the broker.",
        echo=True,
    ),
    VerdictRule(
        name="message_unknown",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=Fact("unknown") >= 1,
        meaning="Its message cannot be judged.",
        echo=True,
    ),
    VerdictRule(
        name="announced",
        state=State.SETTLED,
        severity=Severity.OK,
        when=_messages >= _asked,
        meaning="The broker has its message.",
    ),
)
