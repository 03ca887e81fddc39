"""The verdicts on a message's way from the business transaction to the broker, in order of precedence.

Facts: counts of rows a source has of this id (`outbox`, `parked`, `archive`, `broker`, `canceled`, `business`), flags
(0 or 1; `timed`: its row was due with the message from the beginning), times in milliseconds (0: none), since when a
source is complete (`..._reach_ms`), and until when (`..._until_ms`). Of a `cancel`, which is a row of its own: whether
the broker answered that it `took_effect`, and whether it noted that (`cancel_noted`, -1: not known). It reads nothing.
"""

from __future__ import annotations

from typing import Final

from spark_reconcile.rules.fact_conditions import Fact, newer
from spark_reconcile.rules.verdict_rule import Severity, State, VerdictRule

_outbox, _parked, _archive, _broker = Fact("outbox"), Fact("parked"), Fact("archive"), Fact("broker")
_canceled, _covered, _business = Fact("canceled"), Fact("covered"), Fact("business")
_created_ms, _sent_ms, _accepted_ms = Fact("created_ms"), Fact("sent_ms"), Fact("accepted_ms")
_deliver_at_ms, _broker_reach_ms = Fact("deliver_at_ms"), Fact("broker_reach_ms")
_cancel, _cancels_reach_ms = Fact("cancel"), Fact("cancels_reach_ms")
_fresh_since_ms = Fact("now_ms") - Fact("grace_ms")
_business_until_ms = Fact("business_until_ms") - Fact("grace_ms")
_archive_until_ms = Fact("archive_until_ms") - Fact("grace_ms")

_unpublished = _outbox.is_(0) & _archive.is_(0)
# The arrival of a scheduled message is older than the log, or was lost in a power cut, and the broker knew the resend.
_without_note = _broker.is_(0) & (_deliver_at_ms > _sent_ms) & ((_sent_ms < _broker_reach_ms) | (Fact("repeated") >= 1))

_older_than_the_messages = (
    _cancel.is_(0) & _broker.is_(0) & (_sent_ms < _broker_reach_ms) & (_deliver_at_ms < _broker_reach_ms)
)
# Only the archive has it, and the broker's log, which covers that time, does not: no consumer can have seen it, so it
# is no phantom, whether or not a business row requires it. It is lost, or in transit.
_never_arrived = _outbox.is_(0) & (_archive >= 1) & _broker.is_(0) & ~_older_than_the_messages
_unasked_for = _covered.is_(1) & _business.is_(0) & ~_never_arrived

MESSAGE_RULES: Final[tuple[VerdictRule, ...]] = (
    VerdictRule(
        name="body_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("body_differs").is_(1),
        meaning="The body's SHA-256 is not the same in the outbox, the archive and every copy in the broker.",
        cause="Damage on the way, or two messages published under one id.",
        cure="Compare the bodies by hand; publish the right one under a new id.",
    ),
    VerdictRule(
        name="topic_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("topic_differs").is_(1),
        meaning="The outbox and the broker name different topics for this id.",
        cause="Something between them rewrote the topic.",
        cure="Find who rewrites topics; publish to the right topic under a new id.",
    ),
    VerdictRule(
        name="key_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("key_differs").is_(1),
        meaning="The outbox and the broker hold different keys for this id.",
        cause="Something between them rewrote the key.",
        cure="Find who rewrites keys; order per key is not what the producer asked for.",
    ),
    VerdictRule(
        name="due_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=Fact("due_differs").is_(1),
        meaning="The outbox and the broker hold different due times for this id.",
        cause="Something between them rewrote the due time.",
        cure="Cancel it in the broker, and publish it again with the right time.",
    ),
    VerdictRule(
        name="stored_twice",
        state=State.DUPLICATE,
        severity=Severity.FINDING,
        when=_broker >= 2,
        meaning="The broker stored the same id more than once.",
        cause="A resend came after the broker's duplicate window had passed.",
        cure="Consumers with an inbox drop the repeat; widen the broker's duplicate window.",
    ),
    VerdictRule(
        name="parked",
        state=State.PARKED,
        severity=Severity.ATTENTION,
        when=_parked >= 1,
        meaning="Set aside in the outbox: the broker refused the message for good.",
        cause="The row's last_error says why.",
        cure="outbox messages retry ID once the cause is removed, or outbox messages discard ID.",
    ),
    VerdictRule(
        name="canceled",
        state=State.CANCELED,
        severity=Severity.OK,
        when=(_canceled >= 1) & ~(_unpublished & _broker.is_(0)),
        meaning="Its producer canceled it before it fell due.",
    ),
    VerdictRule(
        name="canceled_unpublished",
        state=State.CANCELED,
        severity=Severity.INFO,
        when=_canceled >= 1,
        meaning="A cancel for an id that no source here has ever seen.",
        cause="The message was never published, or its records are older than what is kept.",
    ),
    VerdictRule(
        # Parked by hand, it may have been sent before: then the broker's copy decides.
        name="discarded",
        state=State.DISCARDED,
        severity=Severity.INFO,
        when=(Fact("discarded") >= 1) & _broker.is_(0),
        meaning="Set aside in the outbox, and then discarded by an operator: nothing sends it. The archive has when.",
    ),
    VerdictRule(
        # Before what is said of messages that nobody asked for: no outbox has it, and no business row asks for it.
        name="recurring",
        state=State.SETTLED,
        severity=Severity.OK,
        when=_unpublished & (_broker >= 1) & Fact("recurring").is_(1),
        meaning="An occurrence of a recurring message: the broker itself published it, at its time.",
    ),
    VerdictRule(
        name="business_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unasked_for & newer(_created_ms, _fresh_since_ms),
        meaning="No business row asks for it yet, and it is newer than the grace time.",
    ),
    VerdictRule(
        name="business_replica_behind",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unasked_for & newer(_created_ms, _business_until_ms),
        meaning="No business row asks for it yet, and the business table, a replica, has not come so far.",
    ),
    VerdictRule(
        name="business_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_unasked_for & (_created_ms < Fact("business_reach_ms")),
        meaning="Older than the oldest business row: no telling whether one asked for it.",
    ),
    VerdictRule(
        name="key_spelling_differs",
        state=State.MISMATCH,
        severity=Severity.FINDING,
        when=_unasked_for & Fact("respelled").is_(1),
        meaning="Its key and that of a business row without a message are equal by the collation of the row's key "
        "column (case, trailing blanks, accents, ß and ss, Unicode forms); where none compares them, they differ only "
        "in case or in trailing blanks.",
        cause="A database whose collation compares such keys as equal, or code that changes how a key is written.",
        cure="Let the code publish the key exactly as its row has it. Nothing is lost: do not publish it again.",
    ),
    VerdictRule(
        name="no_business_row",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=_unasked_for,
        meaning="A message on a topic that a rule covers, and no business row asks for it.",
        cause="It was sent although its transaction rolled back, or published around the business code.",
        cure="Find the producer by the message's key and time; consumers may have acted on it.",
    ),
    VerdictRule(
        name="archive_missing",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=_unpublished & _broker.is_(1) & _covered.is_(1),
        meaning="The business row and the broker agree; the archive has no row of it.",
        cause="The archive is off (--no-archive) or purged.",
    ),
    VerdictRule(
        name="unrecorded_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unpublished & newer(_accepted_ms, _fresh_since_ms),
        meaning="In the broker, not in the outbox, and newer than the grace time.",
    ),
    VerdictRule(
        name="outbox_replica_behind",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unpublished & newer(_accepted_ms, _archive_until_ms),
        meaning="In the broker, not in the outbox, and the outbox's database, a replica, has not come so far.",
    ),
    VerdictRule(
        name="archive_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_unpublished & (_accepted_ms < Fact("archive_reach_ms")),
        meaning="In the broker, and older than the oldest row of the archive.",
        cause="The archive was purged, or is off: no telling who published the message.",
        cure="Keep the archive longer than the broker keeps messages.",
    ),
    VerdictRule(
        name="foreign_topic",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_unpublished & Fact("topic_known").is_(0),
        meaning="On a topic that no outbox here has ever published to.",
        cause="Another producer, whose outbox is not among the sources.",
    ),
    VerdictRule(
        name="unrecorded",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=_unpublished,
        meaning="In the broker, and neither the outbox nor the archive has ever held it.",
        cause="Sent although its transaction rolled back, or sent around the outbox.",
        cure="Find the producer by the message's key and time; consumers may have acted on it.",
    ),
    VerdictRule(
        name="not_removed_yet",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(_outbox >= 1) & (_broker >= 1),
        meaning="The broker has it; its row still stands in the outbox.",
        cause="The sender died between the broker's answer and the removal; the resend will be a known duplicate.",
    ),
    VerdictRule(
        name="in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(_outbox >= 1) & newer(_created_ms, _fresh_since_ms),
        meaning="Committed, not sent yet, and newer than the grace time.",
    ),
    VerdictRule(
        name="held_until_due",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=(_outbox >= 1) & Fact("timed").is_(1) & (_deliver_at_ms + Fact("grace_ms") > Fact("now_ms")),
        meaning="Scheduled: its table holds it until it is due, and it is sent then.",
    ),
    VerdictRule(
        name="not_sent",
        state=State.UNSENT,
        severity=Severity.FINDING,
        when=_outbox >= 1,
        meaning="Committed and still not sent after the grace time.",
        cause="The sender died and no compensator looks after this database, or the broker is out.",
        cure="Check that a compensator runs on this database: outbox compensator once --url URL --broker URL.",
    ),
    VerdictRule(
        name="cancel_without_effect",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=_cancel.is_(1) & Fact("took_effect").is_(0),
        meaning="A cancel to which the broker answered that it came too late, or that it knows no such message.",
    ),
    VerdictRule(
        name="cancel_accepted",
        state=State.SETTLED,
        severity=Severity.OK,
        when=_cancel.is_(1) & Fact("cancel_noted").is_(1),
        meaning="A cancel that came in time: the broker answered so and noted it, or its table still held the message.",
    ),
    VerdictRule(
        name="sent_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_broker.is_(0) & newer(_sent_ms, _fresh_since_ms),
        meaning="Sent after the broker's log was read.",
    ),
    VerdictRule(
        # Lost at once where the broker answered `stored`, which it does with the message on the disk. `duplicate` says
        # only that it knew the id.
        name="schedule_not_in_log",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_without_note & (_deliver_at_ms + Fact("grace_ms") > Fact("now_ms")),
        meaning="Scheduled, and the broker's log has no note of it; the message itself will be there when it is due.",
    ),
    VerdictRule(
        # As long as the broker has written nothing later: one that is down loses nothing, and a schedule that forgot
        # a message is found out. The schedule itself is not read: its format is the broker's, and changes while read.
        name="not_fired",
        state=State.LATE,
        severity=Severity.ATTENTION,
        when=_without_note
        & (_deliver_at_ms >= _broker_reach_ms)
        & (_deliver_at_ms + Fact("late_after_ms") > Fact("broker_seen_ms")),
        meaning="Its due time has passed, and the broker has done nothing since.",
        cause="The broker is down, or its schedule is stuck.",
        cure="Start the broker; what fell due meanwhile is dispatched at once.",
    ),
    VerdictRule(
        name="broker_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_older_than_the_messages | (_cancel.is_(1) & (_sent_ms < _cancels_reach_ms)),
        meaning="Sent, and older than what the broker's log still holds.",
    ),
    VerdictRule(
        # The broker writes a cancel to its schedule, then to its action log, and answers when both are durable; it
        # notes a repeated one again. So an answer without a note is a loss, told before the message is due and not
        # after.
        name="cancel_not_noted",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_cancel.is_(1),
        meaning="The archive says that the broker took this cancel; the broker's log has no note of it.",
        cause="The broker lost what it had answered for, or this is another broker's folder.",
        cure="Cancel the message again before it is due: its id stands as the cancel's key where it is known.",
    ),
    VerdictRule(
        name="cancel_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=(_without_note | (_broker.is_(0) & (_deliver_at_ms > 0) & Fact("delay_cluster").is_(1)))
        & (_sent_ms < _cancels_reach_ms),
        meaning="Scheduled, and never due by the log; it may have been canceled before the action log begins.",
    ),
    VerdictRule(
        name="not_in_broker",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_broker.is_(0),
        meaning="The archive says that the broker accepted it; the broker's log does not have it.",
        cause="The broker lost what it had answered for, or this is another broker's folder.",
        cure="Publish it again from the business row, under the same id; without such a row, ask its producer first.",
    ),
    VerdictRule(
        name="archived_twice",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=(_archive >= 2) & _broker.is_(1),
        meaning="Committed, sent, and stored by the broker once; the archive has more than one row of it.",
        cause="Rows that were moved to files still stand in the table, or a repair wrote the message again.",
        cure="Remove the rows from one of them; nothing was sent or counted twice.",
    ),
    VerdictRule(
        name="stored",
        state=State.SETTLED,
        severity=Severity.OK,
        when=(_archive >= 1) & _broker.is_(1),
        meaning="Committed, sent, and stored by the broker once.",
    ),
)
