"""Order per key through changes: of the number of message tables, and of due times by an outage."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

from compensator.core.batch_totals import BatchTotals, add
from outbox import Outbox, RelayPolicy
from outbox.delivery.relay import HOLD_DELAY_MS_MIN, IN_FLIGHT_DELAY_MS, PARKED_DELAY_MS, hold_delay_ms
from outbox.migrate import upgrade
from outbox.store.database import background_engine
from outbox.store.order_table import Barrier
from outbox.store.schema import RowState, message_table_names, split_message_table_name
from outbox.store.table_placement import MessageTable
from outbox_core import Message
from outbox_core.common.errors import BrokerUnavailable
from tests.fixtures.table_scan import Scan
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop

DEADLINE_SECONDS = 120
ROWS = 300


def publish(box: Outbox, *texts: str, key: str) -> None:
    @box.transactional
    def work(_session: object) -> None:
        for one in texts:
            box.publish("orders", one, key=key)

    work()


def bodies(messages: Sequence[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


def moving_key(before: int, after: int) -> str:
    """A key that has another table with so many tables than before."""
    keys = (f"k-{number}" for number in itertools.count())
    return next(key for key in keys if zlib.crc32(key.encode()) % before != zlib.crc32(key.encode()) % after)


def passing(shop: Shop, broker: RecordingBroker, table: str) -> BatchTotals:
    """What a compensator does with one message table whose leases are over."""
    schema = shop.database.schema
    shop.execute(f"UPDATE {schema}.{table} SET due_at_us = 1 WHERE state = 'pending'")
    engine = background_engine(shop.engine)
    try:
        return Scan(
            engine=engine, store=shop.store.at(MessageTable(schema, table)), broker=broker,
            policy=RelayPolicy(),
        ).run()  # fmt: skip
    finally:
        engine.dispose()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 4), (4, 1)])
def test_a_younger_message_waits_for_an_older_one_in_a_table_of_another_number_of_tables(
    mysql_shop: Shop, before: int, after: int
) -> None:
    upgrade(mysql_shop.engine, schema=mysql_shop.database.schema, tables=max(before, after))
    broker, key = RecordingBroker(), moving_key(max(2, min(before, after)), max(before, after))
    old = mysql_shop.box(broker, ordered={"orders"}, tables=before, sender=NO_SENDER)
    new = mysql_shop.box(broker, ordered={"orders"}, tables=after, sender=NO_SENDER)
    tables = [box.placement.tables[box.placement.number(key)].name for box in (old, new)]
    publish(old, "1", "2", key=key)
    publish(new, "3", key=key)
    publish(new, "other", key="other")

    held = passing(mysql_shop, broker, tables[1])
    ahead = [one for one in bodies(broker.stored) if one != "other"]
    passing(mysql_shop, broker, tables[0])
    passing(mysql_shop, broker, tables[1])

    assert tables[0] != tables[1]
    assert (held.held, ahead) == (1, [])
    assert [one for one in bodies(broker.stored) if one != "other"] == ["1", "2", "3"]


def test_a_sender_holds_a_message_back_for_an_older_one_in_another_table(mysql_shop: Shop) -> None:
    upgrade(mysql_shop.engine, schema=mysql_shop.database.schema, tables=4)
    broker, key = RecordingBroker(), moving_key(2, 4)
    old = mysql_shop.box(broker, ordered={"orders"}, tables=2, sender=NO_SENDER)
    new = mysql_shop.box(broker, ordered={"orders"}, tables=4)
    publish(old, "1", key=key)

    publish(new, "2", key=key)
    publish(new, "other", key="other")
    broker.wait_for(lambda it: bool(it.stored))
    ahead = bodies(broker.stored)
    passing(mysql_shop, broker, old.placement.tables[old.placement.number(key)].name)
    broker.wait_for(lambda it: len(it.stored) == 3)

    assert ahead == ["other"]
    assert bodies(broker.stored) == ["other", "1", "2"]


def test_a_number_whose_row_is_gone_holds_up_nobody_among_many_tables(mysql_shop: Shop) -> None:
    schema = mysql_shop.database.schema
    upgrade(mysql_shop.engine, schema=schema, tables=4)
    broker = RecordingBroker()
    box = mysql_shop.box(broker, ordered={"orders"}, tables=4, sender=NO_SENDER)
    publish(box, "1", key="k")
    table = box.placement.tables[box.placement.number("k")].name
    mysql_shop.execute(f"DELETE FROM {schema}.{table}")
    publish(box, "2", key="k")

    passing(mysql_shop, broker, table)

    namespace = mysql_shop.database.namespace
    with mysql_shop.engine.connect() as connection:
        assert split_message_table_name(namespace, 0) in message_table_names(connection, namespace)
    assert bodies(broker.stored) == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 2, 100])
def test_after_an_outage_each_row_is_claimed_once_and_keys_keep_their_order(shop: Shop, keys: int) -> None:
    broker = RecordingBroker(_out)
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    for start in range(0, ROWS, 20):
        _publish_some(box, range(start, start + 20), keys=keys)
    shop.end_leases(at_us=time.time_ns() // 1_000 - 1_000_000)
    probe, drain = shop.scan(broker, batch_rows=10), shop.scan(broker, batch_rows=50)
    probed = probe.run()
    broker.rule, broker.batches = None, []

    total, ends_at = BatchTotals(), time.monotonic() + DEADLINE_SECONDS
    while shop.rows() and time.monotonic() < ends_at:
        total = add(total, drain.run())

    seen: defaultdict[str | None, list[int]] = defaultdict(list)
    for message in broker.stored:
        seen[message.key].append(int(message.body))
    assert probed.outage is not None
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert total.accepted == ROWS
    assert total.claimed < 2 * ROWS
    assert total.claimed <= ROWS + 50, "rows were claimed although an older message held them up"


@pytest.mark.parametrize("due_in_ms", [*range(0, 300, 7), 999, 4_999, 5_001, 29_000, 3_600_000])
def test_what_waits_for_a_message_that_is_put_off_comes_right_behind_it(due_in_ms: int) -> None:
    delay_ms = hold_delay_ms(_barrier(due_in_ms=due_in_ms))

    assert max(HOLD_DELAY_MS_MIN, due_in_ms) <= delay_ms <= max(HOLD_DELAY_MS_MIN, 1.13 * (due_in_ms + 1)) + 1


def test_delays_of_what_waits_are_few() -> None:
    assert len({hold_delay_ms(_barrier(due_in_ms=ms)) for ms in range(60_000)}) < 110
    assert hold_delay_ms(_barrier(due_in_ms=-5)) == HOLD_DELAY_MS_MIN
    assert hold_delay_ms(_barrier(due_in_ms=9, leased=True)) == IN_FLIGHT_DELAY_MS
    assert hold_delay_ms(_barrier(due_in_ms=9, state=RowState.PARKED)) == PARKED_DELAY_MS


def _barrier(*, due_in_ms: int, leased: bool = False, state: RowState = RowState.PENDING) -> Barrier:
    return Barrier(order_seq=1, state=state, leased=leased, due_in_us=due_in_ms * 1000, due_at_us=0)


def _publish_some(box: Outbox, numbers: range, *, keys: int) -> None:
    @box.transactional
    def work(_session: object) -> None:
        for number in numbers:
            box.publish("orders", str(number), key=f"k-{number % keys}")

    work()


def _out(_batch: Sequence[Message]) -> None:
    raise BrokerUnavailable("the broker is out")
