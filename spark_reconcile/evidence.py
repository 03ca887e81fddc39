"""From legs to verdicts: one tagged union and one group-by for messages, one for messages in groups.

No I/O of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.verdict import Evidence, Policy, reason_sql, verdict_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LEG: Final = (
    "id", "topic", "key", "body_sha256", "in_outbox", "parked", "archived", "deduplicated", "stored", "canceled",
    "sequence", "created_ms", "sent_ms", "stored_ms", "due_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tables:
    """The legs of one run."""

    inboxes: DataFrame
    actions: DataFrame
    stored: DataFrame
    outbox: DataFrame
    archive: DataFrame
    business: DataFrame


def message_evidence(tables: Tables) -> DataFrame:
    """One row a message id: where it is, how often, and when; with the business rows that its topic and key name."""
    legs = [
        _leg(
            tables.outbox, topic="topic", key="message_key", body_sha256="body_sha256", in_outbox="1",
            parked="if(state = 'parked', 1, 0)", created_ms="created_at_us div 1000", due_ms="deliver_at_ms",
        ),
        _leg(
            tables.archive, topic="topic", key="message_key", body_sha256="body_sha256", archived="1",
            deduplicated="if(outcome = 'duplicate', 1, 0)", created_ms="created_at_us div 1000",
            sent_ms="sent_at_us div 1000", due_ms="deliver_at_ms",
        ),
        _leg(
            tables.stored, topic="topic", key="key", body_sha256="body_sha256", stored="1",
            sequence="sequence", created_ms="created_at_ms", stored_ms="stored_at_ms", due_ms="deliver_at_ms",
        ),
        _leg(tables.actions.where("kind = 'canceled'"), canceled="1"),
        _leg(tables.actions.where("kind = 'fired'"), sequence="sequence"),
    ]  # fmt: skip
    united = reduce(lambda one, other: one.unionByName(other), legs)
    united.createOrReplaceTempView("recon_message_legs")
    messages = united.sparkSession.sql("""
        select id, max(topic) as topic, max(key) as key,
               count(distinct body_sha256) as hashes,
               sum(in_outbox) as in_outbox, sum(parked) as parked, sum(archived) as archived,
               sum(deduplicated) as deduplicated, sum(stored) as stored, sum(canceled) as canceled,
               min(sequence) as sequence,
               min(created_ms) as created_ms, max(sent_ms) as sent_ms, max(stored_ms) as stored_ms,
               max(due_ms) as due_ms
        from recon_message_legs group by id
        having max(topic) is not null
    """)
    return _with_business(messages, tables.business)


def judged(messages: DataFrame, tables: Tables, *, inbox_groups: list[str], policy: Policy) -> DataFrame:
    """One row a message and group (group '' where no group takes its topic), with its verdict."""
    session = messages.sparkSession
    messages.createOrReplaceTempView("recon_messages")
    _groups(tables.actions).createOrReplaceTempView("recon_groups")
    tables.actions.createOrReplaceTempView("recon_actions")
    tables.inboxes.createOrReplaceTempView("recon_inboxes")
    names = ", ".join(f"'{name}'" for name in inbox_groups) or "''"
    session.sql(f"""
        select /*+ BROADCAST(g) */ m.*, coalesce(g.group, '') as group,
               if(g.group is null or m.sequence < g.position, 0, 1) as has_group, g.since_ms as group_since_ms,
               if(g.group in ({names}), 1, 0) as has_inbox,
               0 as deliveries, 0 as acks, 0 as deaths, 0 as redrives, 0 as effects,
               cast(null as bigint) as delivered_ms, cast(null as bigint) as acked_at_ms,
               cast(null as bigint) as handled_ms
        from recon_messages m left join recon_groups g on m.topic = g.topic
    """).createOrReplaceTempView("recon_expected")  # noqa: S608 - group names are checked by the protocol's alphabet
    kept = ", ".join(f"max({name}) as {name}" for name in messages.columns if name != "id")
    blank = ", ".join(f"null as {name}" for name in messages.columns if name != "id")
    tagged = f"""
        select * from recon_expected
        union all
        select id, {blank}, group, 0, null, 0,
               if(kind = 'delivered', 1, 0), if(kind = 'acked', 1, 0), if(kind = 'died', 1, 0),
               if(kind = 'redriven', 1, 0), 0,
               if(kind = 'delivered', at_ms, null), if(kind = 'acked', at_ms, null), null
        from recon_actions where group is not null and id is not null
        union all
        select id, {blank}, group, 0, null, 0, 0, 0, 0, 0, 1, null, null, handled_ms from recon_inboxes
    """  # noqa: S608 - our own column names
    grouped = session.sql(f"""
        select id, group, {kept}, max(has_group) as has_group, max(has_inbox) as has_inbox,
               max(group_since_ms) as group_since_ms,
               sum(deliveries) as deliveries, sum(acks) as acks, sum(deaths) as deaths, sum(redrives) as redrives,
               sum(effects) as effects, min(delivered_ms) as first_delivery_ms, max(acked_at_ms) as acked_ms,
               min(handled_ms) as handled_ms, collect_list(delivered_ms) as deliveries_ms
        from ({tagged}) group by id, group
        having max(topic) is not null
    """)  # noqa: S608 - our own column names
    # Handed out again after its effect had committed: what the inbox turned away.
    counted = grouped.selectExpr("*", "size(filter(deliveries_ms, one -> one > handled_ms)) as repeated")
    return _with_verdict(counted.drop("deliveries_ms"), policy)


def business_verdicts(messages: DataFrame, business: DataFrame, *, policy: Policy) -> DataFrame:
    """One row a business row: settled when its message exists, pending when it is young, lost when not, duplicate.

    A topic and key may stand in several rows, which are then owed as many messages; the newest rows go without. What
    was canceled counts as a message that was, but not as one too many.
    """
    messages.createOrReplaceTempView("recon_messages")
    business.createOrReplaceTempView("recon_business")
    return messages.sparkSession.sql(f"""
        select b.rule, b.topic, b.key, b.at_ms, coalesce(m.messages, 0) as messages,
               case when b.key is null then 'mismatch'
                    when m.live > b.rows then 'duplicate'
                    when m.messages >= b.place then 'settled'
                    when b.at_ms > {policy.fresh_after_ms} then 'pending'
                    else 'lost' end as verdict
        from (select *, count(*) over (partition by topic, key) as rows,
                     row_number() over (partition by topic, key order by at_ms, rule) as place
              from recon_business) b
        left join (select topic, key, count(*) as messages, sum(if(canceled > 0, 0, 1)) as live
                   from recon_messages group by topic, key) m
        on b.topic = m.topic and b.key = m.key
    """)  # noqa: S608 - an integer of ours


def _groups(actions: DataFrame) -> DataFrame:
    """topic, group, since_ms and position: a group is made by its first declaration; later ones change its settings."""
    made = "if(kind = 'declared', struct(at_ms, sequence), null) as made"
    groups = actions.where("group is not null").selectExpr("topic", "group", made).groupBy("topic", "group")
    return groups.agg({"made": "min"}).selectExpr(
        "topic", "group", "`min(made)`.at_ms as since_ms", "`min(made)`.sequence as position"
    )


def _with_business(messages: DataFrame, business: DataFrame) -> DataFrame:
    messages.createOrReplaceTempView("recon_messages")
    business.createOrReplaceTempView("recon_business")
    return messages.sparkSession.sql("""
        select m.*, if(r.topic is null, 0, 1) as covered, coalesce(b.rows, 0) as business
        from recon_messages m
        left join (select topic, key, count(*) as rows from recon_business group by topic, key) b
        on m.topic = b.topic and m.key = b.key
        left join (select distinct topic from recon_business) r on m.topic = r.topic
    """)


def _with_verdict(rows: DataFrame, policy: Policy) -> DataFrame:
    filled = rows.fillna(0, subset=[one.name for one in fields(Evidence)])
    moments = {one.name: int(getattr(policy, one.name)) for one in fields(Policy)}
    named = filled.selectExpr("*", *(f"cast({value} as bigint) as {name}" for name, value in moments.items()))
    return named.selectExpr("*", f"{verdict_sql()} as verdict", f"{reason_sql()} as reason").drop(*moments)


def _leg(frame: DataFrame, **columns: str) -> DataFrame:
    """A leg in the common shape; what it does not know is null, what it does not count is 0."""
    texts = {"topic", "key", "body_sha256"}
    moments = {"sequence", "created_ms", "sent_ms", "stored_ms", "due_ms"}
    expressions = ["id"]
    for name in _LEG[1:]:
        if name in texts:
            expressions.append(f"cast({columns.get(name, 'null')} as string) as {name}")
        elif name in moments:
            expressions.append(f"cast({columns.get(name, 'null')} as bigint) as {name}")
        else:
            expressions.append(f"cast({columns.get(name, '0')} as int) as {name}")
    return frame.selectExpr(*expressions)
