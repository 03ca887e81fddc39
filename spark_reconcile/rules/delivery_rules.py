"""The verdicts on a message's way from the broker to one consumer group, in order of precedence.

Facts of the pair (message, group): counts (`stored`, `deliveries`, `acks`, `nacks`, `redrives`, `edits` among these,
`effects`: inbox rows), times in milliseconds (0: none), `sequence` (-1: no place in the topic yet), what the group did
last with it (`last_kind`), and of the group (`floor`: the first sequence that is its own, `seeks`, `deleted`,
`paused`, `filtered`, `has_inbox`). `wanted`: whether a group's filter matches the message. It reads nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from spark_reconcile.rules.fact_conditions import Fact, newer
from spark_reconcile.rules.verdict_rule import Severity, State, VerdictRule


class LastKind(IntEnum):
    """The last action on a message in a group."""

    NOTHING = 0
    DELIVERED = 1
    REQUEUED = 2
    ACKED = 3
    DIED = 4
    REDRIVEN = 5
    DISCARDED = 6


class FilterAnswer(IntEnum):
    """Whether the filter of a group matches a message."""

    YES = 1
    NO = 0
    NOT_KNOWN = -1
    CHANGED = -2
    """The group has had several filters since the message was appended."""


_now_ms, _late_after_ms = Fact("now_ms"), Fact("late_after_ms")
_fresh_since_ms = _now_ms - Fact("grace_ms")
_stored, _deliveries, _acks, _effects = Fact("stored"), Fact("deliveries"), Fact("acks"), Fact("effects")
_last_kind, _last_ms, _visible_ms = Fact("last_kind"), Fact("last_ms"), Fact("visible_ms")
_deliver_at_ms, _ready_ms, _effect_ms = Fact("deliver_at_ms"), Fact("ready_ms"), Fact("effect_ms")
_first_delivered_ms, _sequence, _canceled = Fact("first_delivered_ms"), Fact("sequence"), Fact("canceled")
_actions_reach_ms = Fact("actions_reach_ms")

_elsewhere = _stored.is_(0)
_unplaced = _sequence < 0
_is_delivered = _last_kind.is_(LastKind.DELIVERED)
_given_back = _last_kind.is_(LastKind.REQUEUED) | _last_kind.is_(LastKind.REDRIVEN)
_untouched = _acks.is_(0) & _last_kind.is_(LastKind.NOTHING)
_never_taken = _acks.is_(0) & Fact("filtered").is_(1)
_acked_not_handled = (_acks >= 1) & Fact("has_inbox").is_(1) & _effects.is_(0)

DELIVERY_RULES: Final[tuple[VerdictRule, ...]] = (
    VerdictRule(
        name="seen_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_elsewhere & (newer(_last_ms, _fresh_since_ms) | newer(_effect_ms, _fresh_since_ms)),
        meaning="Delivered or handled after the broker's message log was read.",
    ),
    VerdictRule(
        name="message_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_elsewhere & (Fact("broker_reach_ms") > 0),
        meaning="Delivered or handled; the message itself may be older than what the broker's log still holds.",
    ),
    VerdictRule(
        name="delivered_never_stored",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=_elsewhere & (_deliveries + _acks > 0),
        meaning="Delivered or acknowledged, and never stored by this broker.",
        cause="Damage in the logs, or two brokers' folders mixed.",
        cure="Check that messages/ and actions/ are of one broker.",
    ),
    VerdictRule(
        name="handled_never_stored",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=_elsewhere,
        meaning="The inbox notes an effect of a message that this broker never stored.",
        cause="The consumer reads from another broker as well, or its inbox was written by hand.",
        cure="Name the right broker and inbox; otherwise ask where the consumer's message came from.",
    ),
    VerdictRule(
        name="delivered_after_cancel",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=(_canceled >= 1) & (_deliveries >= 1),
        meaning="Canceled in time by the broker's own records, and delivered nevertheless.",
        cause="A fault of the broker.",
        cure="Report it; the consumer has acted on what its producer took back.",
    ),
    VerdictRule(
        name="handled_twice",
        state=State.DUPLICATE,
        severity=Severity.FINDING,
        when=_effects >= 2,
        meaning="The group's inboxes hold more than one effect of this message.",
        cause="Two databases serve one group, and each took effect once; or a dead letter was edited after its effect.",
        cure="Let one inbox serve one group; correct the second effect by hand.",
    ),
    VerdictRule(
        name="acknowledged_twice",
        state=State.DUPLICATE,
        severity=Severity.FINDING,
        when=_acks > Fact("redrives") + Fact("seeks") + 1,
        meaning="Acknowledged more often than it had generations (one; one more by redrive, seek, deleted group).",
        cause="A fault of the broker: an acknowledged message was delivered again.",
        cure="Without an inbox the effect has happened twice: correct it by hand.",
    ),
    VerdictRule(
        name="delivered_early",
        state=State.EARLY,
        severity=Severity.FINDING,
        when=(_deliveries >= 1) & (_first_delivered_ms < _deliver_at_ms),
        meaning="Delivered before its due time, both by the broker's clock.",
        cause="A fault of the broker.",
        cure="Report it; consumers that must not act early should look at deliver_at themselves.",
    ),
    VerdictRule(
        name="handled_early",
        state=State.EARLY,
        severity=Severity.FINDING,
        when=(_effects >= 1)
        & (_effect_ms >= Fact("earliest_ms"))
        & (_effect_ms + Fact("clock_skew_ms") < _deliver_at_ms),
        meaning="Its effect is older than its due time, by more than the clocks may be apart.",
        cause="Delivered early, or clocks further apart than clock_skew_seconds.",
        cure="Compare the database's clock with the broker's.",
    ),
    VerdictRule(
        name="group_deleted",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=Fact("deleted").is_(1) & _acks.is_(0) & (_canceled < 1) & (_sequence >= 0),
        meaning="The group was deleted before it acknowledged this message: from then on nothing is owed to it.",
    ),
    VerdictRule(
        name="dead",
        state=State.DEAD,
        severity=Severity.ATTENTION,
        when=_last_kind.is_(LastKind.DIED),
        meaning="A dead letter: the group used up its attempts.",
        cause="The broker's dead letter list gives the consumer's last reason.",
        cure="Mend the consumer, then redrive or discard the dead letters of this group.",
    ),
    VerdictRule(
        name="discarded",
        state=State.DISCARDED,
        severity=Severity.INFO,
        when=_last_kind.is_(LastKind.DISCARDED),
        meaning="A dead letter that an operator discarded: the group never gets it. The broker's log has who and why.",
    ),
    VerdictRule(
        name="effect_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_acked_not_handled & newer(_last_ms, _fresh_since_ms),
        meaning="Acknowledged after the inbox was read.",
    ),
    VerdictRule(
        name="inbox_replica_behind",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_acked_not_handled & newer(_last_ms, Fact("inbox_until_ms") - Fact("grace_ms")),
        meaning="Acknowledged, and the inbox's database, a replica, has not come so far.",
    ),
    VerdictRule(
        name="inbox_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_acked_not_handled & (Fact("first_ack_ms") < Fact("inbox_reach_ms")),
        meaning="Acknowledged, and older than the oldest row of the inbox.",
    ),
    VerdictRule(
        name="acknowledged_not_handled",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_acked_not_handled,
        meaning="Acknowledged, and the group's inbox has no effect of it.",
        cause="The consumer acknowledged before its transaction committed, or around its inbox.",
        cure="Check the effect by hand; seek the group back to have it delivered again.",
    ),
    VerdictRule(
        name="delivery_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=(_acks >= 1) & _deliveries.is_(0) & (_actions_reach_ms > 0),
        meaning="Acknowledged; the delivery may be older than what the action log still holds.",
    ),
    VerdictRule(
        name="acknowledged_never_delivered",
        state=State.PHANTOM,
        severity=Severity.FINDING,
        when=(_acks >= 1) & _deliveries.is_(0),
        meaning="Acknowledged, and never delivered.",
        cause="A fault of the broker, or damage in its action log.",
        cure="Report it; check whether the consumer saw the message.",
    ),
    VerdictRule(
        name="delivered_late",
        state=State.LATE,
        severity=Severity.ATTENTION,
        # Of what was ready before the action log begins, the first delivery may not be the first there was.
        when=(_acks >= 1) & (_ready_ms >= _actions_reach_ms) & (_first_delivered_ms > _ready_ms + _late_after_ms),
        meaning="Done; first delivered later after its due time than the bound allows.",
        cause="Too few consumers, or none, or a broker that was down.",
        cure="Start more consumers of this group; look at the delivery chart for when.",
    ),
    VerdictRule(
        name="edited",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=(_acks >= 1) & (Fact("edits") >= 1),
        meaning="A dead letter that an operator edited: the group got it under another id, and acknowledged it.",
    ),
    VerdictRule(
        name="done",
        state=State.SETTLED,
        severity=Severity.OK,
        when=_acks >= 1,
        meaning="Delivered in time, handled and acknowledged.",
    ),
    VerdictRule(
        name="canceled",
        state=State.CANCELED,
        severity=Severity.OK,
        when=_canceled >= 1,
        meaning="Canceled by its producer, and never delivered.",
    ),
    VerdictRule(
        name="scheduled",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unplaced & (_deliver_at_ms + Fact("grace_ms") > _now_ms),
        meaning="Scheduled: its time has not come, or came just now.",
    ),
    VerdictRule(
        name="cancel_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_unplaced
        & (_deliver_at_ms > 0)
        & (Fact("stored_ms") < _actions_reach_ms)
        & (_deliver_at_ms + _late_after_ms <= Fact("broker_seen_ms")),
        meaning="Scheduled, and never due by the log; it may have been canceled before the action log begins.",
    ),
    VerdictRule(
        name="not_fired",
        state=State.LATE,
        severity=Severity.ATTENTION,
        when=_unplaced & (_deliver_at_ms > 0),
        meaning="Its due time has passed, and the broker has not made it ready.",
        cause="The broker is down, or its schedule is stuck.",
        cure="Start the broker; what fell due meanwhile is dispatched at once.",
    ),
    VerdictRule(
        name="held_by_delay_cluster",
        state=State.LATE,
        severity=Severity.ATTENTION,
        when=_unplaced & Fact("delay_cluster").is_(1),
        meaning="The delay cluster holds it, although it was not scheduled for later.",
        cause="The broker, to which the cluster publishes, is down or refuses the message.",
        cure="Start the broker; `outbox delay status` and the nodes' logs say what is refused.",
    ),
    VerdictRule(
        name="placing_in_grace",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_unplaced & newer(Fact("stored_ms"), _fresh_since_ms),
        meaning="Stored just now, its place in the topic not seen yet.",
    ),
    VerdictRule(
        name="never_placed",
        state=State.LOST,
        severity=Severity.FINDING,
        when=_unplaced,
        meaning="Stored, neither scheduled nor placed in its topic: no group will ever be given it.",
        cause="A fault of the broker.",
        cure="Publish it again under a new id, and report it.",
    ),
    VerdictRule(
        name="in_flight",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_is_delivered & (_visible_ms + _late_after_ms > _now_ms),
        meaning="A consumer holds it, or its invisible time ended just now.",
    ),
    VerdictRule(
        name="action_log_out_of_reach",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_untouched
        & Fact("seeks").is_(0)
        & (Fact("stored_ms") < _actions_reach_ms)
        & (_deliver_at_ms < _actions_reach_ms),
        meaning="Nothing is known of its delivery, and it was ready before what the action log still holds begins.",
    ),
    VerdictRule(
        name="handled_not_acknowledged",
        state=State.PENDING,
        severity=Severity.INFO,
        when=_effects >= 1,
        meaning="Handled; the acknowledgement is missing, so it will come again and be dropped by the inbox.",
        cause="The consumer died between its commit and the acknowledgement.",
    ),
    VerdictRule(
        name="skipped",
        state=State.SETTLED,
        severity=Severity.INFO,
        when=_sequence < Fact("floor"),
        meaning="The group began, or was moved by a seek or a purge, behind this message: it is not the group's.",
    ),
    VerdictRule(
        name="retrying",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_given_back & (_visible_ms + _late_after_ms > _now_ms),
        meaning="Given back by its consumer; it comes again.",
    ),
    VerdictRule(
        name="paused",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=Fact("paused").is_(1),
        meaning="The group is paused.",
    ),
    VerdictRule(
        name="not_redelivered",
        state=State.LATE,
        severity=Severity.ATTENTION,
        when=_is_delivered | _given_back,
        meaning="Ready again for longer than the bound, and nobody took it.",
        cause="No consumer of this group is running, or too few.",
        cure="Start consumers of this group.",
    ),
    VerdictRule(
        name="filtered_out",
        state=State.SETTLED,
        severity=Severity.OK,
        when=_never_taken & Fact("wanted").is_(FilterAnswer.NO),
        meaning="The group's filter does not take it, by its headers.",
    ),
    VerdictRule(
        name="filter_changed",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_never_taken & Fact("wanted").is_(FilterAnswer.CHANGED),
        meaning="Never delivered, and the group's filter was changed later: either may have been applied.",
    ),
    VerdictRule(
        name="filtered_out_or_waiting",
        state=State.UNKNOWN,
        severity=Severity.INFO,
        when=_never_taken & Fact("wanted").is_(FilterAnswer.NOT_KNOWN),
        meaning="Never delivered; filter or headers are not in the log: it may have been filtered out.",
    ),
    VerdictRule(
        name="waiting",
        state=State.PENDING,
        severity=Severity.WAIT,
        when=_ready_ms + _late_after_ms > _now_ms,
        meaning="Ready, and not delivered yet.",
    ),
    VerdictRule(
        name="not_delivered",
        state=State.LATE,
        severity=Severity.ATTENTION,
        when=_acks.is_(0),
        meaning="Ready for longer than the bound, and nobody took it.",
        cause="No consumer of this group is running, or too few.",
        cure="Start consumers of this group.",
    ),
)
