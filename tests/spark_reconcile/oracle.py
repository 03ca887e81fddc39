"""The verdicts once more, as a person would write them down: the tests hold the rule tables against these."""

from __future__ import annotations

from collections.abc import Mapping

Facts = Mapping[str, int]


def message_rule(f: Facts) -> str:  # noqa: C901 - one question after the other, on purpose
    """The rule that decides on a message."""
    fresh = f["now_ms"] - f["grace_ms"]
    for name in ("body", "topic", "key", "due"):
        if f[f"{name}_differs"]:
            return f"{name}_differs"
    if f["broker"] > 1:
        return "stored_twice"
    if f["parked"]:
        return "parked"
    if f["canceled"]:
        return "canceled" if f["outbox"] or f["archive"] or f["broker"] else "canceled_unpublished"
    if f["discarded"] and not f["broker"]:
        return "discarded"
    if f["recurring"] and f["broker"] and not f["outbox"] and not f["archive"]:
        return "recurring"
    never_arrived = f["archive"] and not f["outbox"] and not f["broker"] and not _older_than_the_broker_log(f)
    if f["covered"] and not f["business"] and not never_arrived:
        if fresh < f["created_ms"] <= f["latest_ms"]:
            return "business_in_grace"
        if f["business_until_ms"] - f["created_ms"] < f["grace_ms"] and f["created_ms"] <= f["latest_ms"]:
            return "business_replica_behind"
        if f["created_ms"] < f["business_reach_ms"]:
            return "business_out_of_reach"
        return "key_spelling_differs" if f["respelled"] else "no_business_row"
    if f["outbox"]:
        if f["broker"]:
            return "not_removed_yet"
        if fresh < f["created_ms"] <= f["latest_ms"]:
            return "in_grace"
        return "held_until_due" if f["timed"] and f["now_ms"] - f["deliver_at_ms"] < f["grace_ms"] else "not_sent"
    if f["archive"] and f["cancel"]:
        return _sent_cancel(f)
    if f["archive"]:
        if not f["broker"]:
            return _not_in_broker(f)
        return "stored" if f["archive"] == 1 else "archived_twice"
    if f["covered"]:
        return "archive_missing"
    if fresh < f["accepted_ms"] <= f["latest_ms"]:
        return "unrecorded_in_grace"
    if f["archive_until_ms"] - f["accepted_ms"] < f["grace_ms"] and f["accepted_ms"] <= f["latest_ms"]:
        return "outbox_replica_behind"
    if f["accepted_ms"] < f["archive_reach_ms"]:
        return "archive_out_of_reach"
    return "unrecorded" if f["topic_known"] else "foreign_topic"


def _sent_cancel(f: Facts) -> str:
    if not f["took_effect"]:
        return "cancel_without_effect"
    if f["cancel_noted"] == 1:
        return "cancel_accepted"
    if f["now_ms"] - f["sent_ms"] < f["grace_ms"] and f["sent_ms"] <= f["latest_ms"]:
        return "sent_in_grace"
    return "broker_out_of_reach" if f["sent_ms"] < f["cancels_reach_ms"] else "cancel_not_noted"


def _older_than_the_broker_log(f: Facts) -> bool:
    return max(f["sent_ms"], f["deliver_at_ms"]) < f["broker_reach_ms"]


def _not_in_broker(f: Facts) -> str:
    due_ms, reach_ms = f["deliver_at_ms"], f["broker_reach_ms"]
    if f["now_ms"] - f["grace_ms"] < f["sent_ms"] <= f["latest_ms"]:
        return "sent_in_grace"
    scheduled = due_ms > f["sent_ms"] and (f["sent_ms"] < reach_ms or f["repeated"])
    if scheduled:
        if f["now_ms"] - due_ms < f["grace_ms"]:
            return "schedule_not_in_log"
        if due_ms >= reach_ms and f["broker_seen_ms"] - due_ms < f["late_after_ms"]:
            return "not_fired"
    if _older_than_the_broker_log(f):
        return "broker_out_of_reach"
    may_be_canceled = scheduled or (f["delay_cluster"] and due_ms)
    return "cancel_out_of_reach" if may_be_canceled and f["sent_ms"] < f["cancels_reach_ms"] else "not_in_broker"


def delivery_rule(f: Facts) -> str:  # noqa: C901 - one question after the other, on purpose
    """The rule that decides on a message in a group."""
    fresh = f["now_ms"] - f["grace_ms"]
    late = f["late_after_ms"]
    if not f["stored"]:
        if any(fresh < f[name] <= f["latest_ms"] for name in ("last_ms", "effect_ms")):
            return "seen_in_grace"
        if f["broker_reach_ms"] > 0:
            return "message_out_of_reach"
        return "delivered_never_stored" if f["deliveries"] or f["acks"] else "handled_never_stored"
    if f["canceled"] and f["deliveries"]:
        return "delivered_after_cancel"
    if f["effects"] > 1:
        return "handled_twice"
    if f["acks"] > 1 + f["redrives"] + f["seeks"]:
        return "acknowledged_twice"
    if f["deliveries"] and f["first_delivered_ms"] < f["deliver_at_ms"]:
        return "delivered_early"
    if f["effects"] and f["earliest_ms"] <= f["effect_ms"] < f["deliver_at_ms"] - f["clock_skew_ms"]:
        return "handled_early"
    if f["deleted"] and not f["acks"] and not f["canceled"] and f["sequence"] != -1:
        return "group_deleted"
    if f["last_kind"] == 4:
        return "dead"
    if f["last_kind"] == 6:
        return "discarded"
    if f["acks"]:
        if f["has_inbox"] and not f["effects"]:
            if fresh < f["last_ms"] <= f["latest_ms"]:
                return "effect_in_grace"
            if f["inbox_until_ms"] - f["last_ms"] < f["grace_ms"] and f["last_ms"] <= f["latest_ms"]:
                return "inbox_replica_behind"
            return "inbox_out_of_reach" if f["first_ack_ms"] < f["inbox_reach_ms"] else "acknowledged_not_handled"
        if not f["deliveries"]:
            return "delivery_out_of_reach" if f["actions_reach_ms"] > 0 else "acknowledged_never_delivered"
        if f["ready_ms"] >= f["actions_reach_ms"] and f["first_delivered_ms"] - f["ready_ms"] > late:
            return "delivered_late"
        return "edited" if f["edits"] else "done"
    if f["canceled"]:
        return "canceled"
    if f["sequence"] == -1:
        if f["now_ms"] - f["deliver_at_ms"] < f["grace_ms"]:
            return "scheduled"
        if f["deliver_at_ms"]:
            unsure = f["stored_ms"] < f["actions_reach_ms"] and f["broker_seen_ms"] - f["deliver_at_ms"] >= late
            return "cancel_out_of_reach" if unsure else "not_fired"
        if f["delay_cluster"]:
            return "held_by_delay_cluster"
        return "placing_in_grace" if fresh < f["stored_ms"] <= f["latest_ms"] else "never_placed"
    held, given_back = f["last_kind"] == 1, f["last_kind"] in {2, 5}
    soon = f["now_ms"] - f["visible_ms"] < late
    if held and soon:
        return "in_flight"
    if f["last_kind"] == 0 and not f["seeks"] and max(f["stored_ms"], f["deliver_at_ms"]) < f["actions_reach_ms"]:
        return "action_log_out_of_reach"
    if f["effects"]:
        return "handled_not_acknowledged"
    if f["sequence"] < f["floor"]:
        return "skipped"
    if given_back and soon:
        return "retrying"
    if f["paused"]:
        return "paused"
    if held or given_back:
        return "not_redelivered"
    if f["filtered"] and f["wanted"] != 1:
        return {0: "filtered_out", -1: "filtered_out_or_waiting", -2: "filter_changed"}[f["wanted"]]
    return "waiting" if f["now_ms"] - f["ready_ms"] < late else "not_delivered"


def business_rule(f: Facts) -> str:  # noqa: C901 - one question after the other, on purpose
    """The rule that decides on the business rows of one key."""
    if f["keyless"]:
        return "no_key"
    if f["messages"] < f["asked"]:
        if f["impossible"] or f["newest_ms"] > f["latest_ms"]:
            return "impossible_time"
        if f["newest_ms"] > f["now_ms"] - f["grace_ms"]:
            return "message_in_grace"
        if f["archive_until_ms"] - f["newest_ms"] < f["grace_ms"]:
            return "message_replica_behind"
        if f["oldest_ms"] < min(f["archive_reach_ms"], f["broker_reach_ms"]):
            return "message_out_of_reach"
        if f["respelled"]:
            return "message_key_spelling_differs"
        return "too_few_messages" if f["messages"] else "no_message"
    live = f["messages"] - f["canceled"] - f["discarded"]
    ahead = f["newest_message_ms"] > f["latest_ms"]
    behind = f["business_until_ms"] - f["newest_message_ms"] < f["grace_ms"] and not ahead
    if behind and (f["due_differs"] or live > f["asked"]):
        return "row_replica_behind"
    if f["due_differs"]:
        return "due_time_differs"
    for state, name in (
        ("mismatch", "message_mismatch"), ("lost", "message_lost"), ("unsent", "message_unsent"),
        ("duplicate", "message_stored_twice"), ("parked", "message_parked"),
    ):  # fmt: skip
        if f[state]:
            return name
    if live > f["asked"]:
        return "published_twice"
    if live < f["asked"]:
        return "message_discarded" if f["discarded"] else "message_canceled"
    if f["pending"]:
        return "message_pending"
    return "message_unknown" if f["unknown"] else "announced"
