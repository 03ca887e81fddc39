"""What must hold when a program of consumers has ended.

With an inbox a message's effect is there once, or it is a dead letter whose reason names what its handler did or met;
without one it was handled at least once, or is a dead letter. No dead letter is one that no handler ever saw. A
chained message is there, once, if and only if its handler's transaction committed. What a filter leaves out reached no
handler. Of two rows that are changed together both are changed, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import Engine, text

from outbox_core import Broker, BrokerAdmin
from tests.outbox.consumer_model.handlers import Calls
from tests.outbox.consumer_model.program import (
    CHAINED,
    TOPIC,
    Group,
    Program,
    chained_id,
    kind_of,
    message_ids,
)

Effects = Counter[tuple[str, str]]


def check(plan: Program, *, engine: Engine, broker: Broker, admin: BrokerAdmin, calls: Calls) -> None:
    """Raise an AssertionError that names what does not hold. All senders have ended."""
    with engine.connect() as connection:
        effects = Counter((row.consumer, row.message) for row in connection.execute(text("SELECT * FROM effect")))
        counters = {(row.consumer, row.side): row.value for row in connection.execute(text("SELECT * FROM counter"))}
        unsent = list(connection.execute(text("SELECT id FROM outbox_message")).scalars())
    for group in plan.groups:
        _check_group(plan, group, admin=admin, calls=calls, effects=effects)
        crossed = sum(effects[pair] for pair in plan.crossing if pair[0] == group.name)
        counted = (counters[group.name, "a"], counters[group.name, "b"])
        assert counted == (crossed, crossed), f"{group}: two rows that change together parted"
    sent = [one.id for one in broker.pull(CHAINED, "oracle", max_messages=1000)]
    _check_chained(plan, sent=sent, unsent=unsent, effects=effects)


def _check_chained(plan: Program, *, sent: Sequence[str], unsent: Sequence[str], effects: Effects) -> None:
    wanted = {chained_id(*pair) for pair in effects if pair in plan.chaining}
    found = {*sent, *unsent}
    assert found == wanted, f"seed {plan.seed}: chained messages parted from their effects: {found ^ wanted}"
    assert len(sent) == len(set(sent)), f"seed {plan.seed}: a chained message is in the broker twice"


def _check_group(plan: Program, group: Group, *, admin: BrokerAdmin, calls: Calls, effects: Effects) -> None:
    letters, _ = admin.dead(TOPIC, group.name, limit=1000)
    dead = {letter.id: letter.reason for letter in letters}
    for message_id in message_ids():
        called, count = calls.of("call", group.name, message_id), effects[group.name, message_id]
        context = f"seed {plan.seed}, {group}, {message_id}, {plan.faults[group.name, message_id]}, calls: {called}, "
        context += f"effects: {count}, dead: {dead.get(message_id)}"
        if group.filter and kind_of(message_id) == "odd":
            assert (called, count, message_id in dead) == (0, 0, False), f"filtered out: {context}"
        elif message_id in dead:
            assert called > 0, f"an innocent: {context}"
            assert count <= group.has_inbox, context
            assert any(reason in dead[message_id] for reason in plan.true_reasons(group, message_id)), context
        elif group.has_inbox:
            assert count == 1, context
        else:
            assert calls.of("return", group.name, message_id) >= 1, context
