"""Order per key: what an ordered topic promises when sends fail, processes die and transactions interleave."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count
from random import Random

import pytest
from sqlalchemy import func, select, text

from outbox import Outbox
from outbox.store.order_table import OrderStore
from outbox.store.schema import RowState
from outbox_core import Message
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, InvalidMessage
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop

WAIT_SECONDS = 300.0
COMMITS_MAX = 500


def bodies(messages: Sequence[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


def publish(box: Outbox, *texts: str, topic: str = "orders", key: str = "k") -> None:
    @box.transactional
    def work(_session: object) -> None:
        for one in texts:
            box.publish(topic, one, key=key)

    work()


def queued(shop: Shop) -> int:
    with shop.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(shop.tables.order_queue)) or 0


def make_due(shop: Shop, body: str | None = None) -> None:
    """Let leases and delays be over, of one message or of all."""
    only = "" if body is None else f" WHERE CAST(body AS CHAR) = '{body}'"
    shop.execute(f"UPDATE {shop.tables.message.fullname} SET due_at_us = 1{only}")


def test_a_transactions_messages_arrive_in_the_order_in_which_they_were_published(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"})

    publish(box, "1", "2", "3")
    box.close()

    assert bodies(broker.stored) == ["1", "2", "3"]
    assert shop.rows() == []
    assert queued(shop) == 0


class Names(str, Enum):  # noqa: UP042 - as people name their topics
    """Texts that are formatted as others."""

    ORDERS = "orders"
    KEY = "k"


def test_a_topic_that_an_enum_names_has_the_order_of_its_text(shop: Shop) -> None:
    box = shop.box(RecordingBroker(), ordered={Names.ORDERS}, sender=NO_SENDER)

    publish(box, "1")
    publish(box, "2", topic=Names.ORDERS, key=Names.KEY)

    assert len({row["order_key"] for row in shop.rows()}) == 1


def test_one_text_is_no_set_of_ordered_topics(sqlite_shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match=r"ordered=\{'orders'\}"):
        sqlite_shop.box(RecordingBroker(), ordered=("orders"))


def test_messages_of_one_ordered_key_never_share_a_batch_and_others_do(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)

    publish(box, "a1", "a2", key="a")
    publish(box, "b1", "b2", key="b")
    publish(box, "x1", "x2", topic="plain")
    make_due(shop)
    report = shop.scan(broker).run()

    assert report.accepted == 6
    assert [sorted(bodies(batch)) for batch in broker.batches] == [["a1", "b1", "x1", "x2"], ["a2", "b2"]]


def test_an_ordered_topic_wants_a_key(shop: Shop) -> None:
    box = shop.box(RecordingBroker(), ordered={"orders"})

    @box.transactional
    def work(_session: object) -> None:
        box.publish("orders", "no key")

    with pytest.raises(InvalidMessage, match="publish with key="):
        work()


def test_a_younger_message_waits_in_the_sender_for_an_older_one_of_another_process(shop: Shop) -> None:
    broker = RecordingBroker()
    other_process = shop.box(RecordingBroker(), ordered={"orders"}, sender=NO_SENDER)
    box = shop.box(broker, ordered={"orders"})
    publish(other_process, "1")

    publish(box, "2", key="k")
    publish(box, "other key", key="other")
    broker.wait_for(lambda it: len(it.stored) == 1)
    shop.scan(broker).run()
    held = bodies(broker.stored)
    make_due(shop, "1")
    shop.scan(broker).run()
    broker.wait_for(lambda it: len(it.stored) == 3)

    assert held == ["other key"]
    assert bodies(broker.stored) == ["other key", "1", "2"]


def test_a_message_that_waits_in_the_sender_is_tried_again_while_commits_keep_coming(shop: Shop) -> None:
    others, older_is_sent, numbers = RecordingBroker(), threading.Event(), count(3)

    def commit_more(_batch: Sequence[Message]) -> None:
        assert older_is_sent.wait(WAIT_SECONDS)
        if "2" not in bodies(broker.stored) and (number := next(numbers)) < COMMITS_MAX:
            publish(box, f"plain {number}", topic="plain")
            publish(box, str(number))

    broker = RecordingBroker(commit_more)
    other_process, box = shop.box(others, ordered={"orders"}, sender=NO_SENDER), shop.box(broker, ordered={"orders"})
    publish(other_process, "1")
    publish(box, "2")
    publish(box, "plain", topic="plain")
    broker.wait_for(lambda it: len(it.batches) == 1)  # so that "2" is held
    make_due(shop, "1")
    shop.scan(others).run()
    older_is_sent.set()
    broker.wait_for(lambda it: "2" in bodies(it.stored))

    assert next(numbers) < COMMITS_MAX
    assert box.close(timeout_ms=WAIT_SECONDS * 1_000)
    assert bodies(others.stored) == ["1"]
    ordered = [int(body) for body in bodies(broker.stored) if body.isdigit()]
    assert ordered == list(range(2, ordered[-1] + 1))


def test_a_pass_takes_no_message_before_an_older_one_that_waits_for_its_retry(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    publish(box, "1")
    publish(box, "2")
    publish(box, "other", key="other")
    make_due(shop, "2")
    make_due(shop, "other")

    report = shop.scan(broker).run()

    assert bodies(broker.stored) == ["other"]
    assert report.held == 1
    rows = {row["body"].decode(): row for row in shop.rows()}
    assert rows["2"]["token"] is None
    assert rows["2"]["attempts"] == 1, "waiting was counted as an attempt"
    assert rows["2"]["last_error"] is None


def test_a_message_that_is_refused_holds_its_key_and_no_other(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    publish(box, "1", "bad", "3")
    publish(box, "o1", "o2", key="other")
    bad = next(row["id"] for row in shop.rows() if row["body"] == b"bad")
    broker.rejects[bad] = "never"
    make_due(shop)

    report = shop.scan(broker).run()

    assert (report.accepted, report.parked, report.held) == (3, 1, 1)
    assert sorted(bodies(broker.stored)) == ["1", "o1", "o2"]

    broker.rejects.clear()
    shop.execute(f"UPDATE {shop.tables.message.fullname} SET state = '{RowState.PENDING.value}'")
    make_due(shop)
    shop.scan(broker).run()

    assert [one for one in bodies(broker.stored) if not one.startswith("o")] == ["1", "bad", "3"]
    assert queued(shop) == 0


def test_an_outage_in_the_second_wave_puts_off_what_is_left_in_order(shop: Shop) -> None:
    def out_after_first_wave(batch: Sequence[Message]) -> None:
        if any(message.body == b"2" for message in batch):
            raise BrokerUnavailable("gone")

    broker = RecordingBroker(out_after_first_wave)
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    publish(box, "1", "2", "3")
    make_due(shop)

    shop.scan(broker).run()
    broker.rule = None
    make_due(shop)
    shop.scan(broker).run()

    assert bodies(broker.stored) == ["1", "2", "3"]


def test_numbers_follow_the_order_of_commits_not_of_publishes(mysql_shop: Shop) -> None:
    broker = RecordingBroker()
    box = mysql_shop.box(broker, ordered={"orders"})
    first_has_published, second_is_done = threading.Event(), threading.Event()

    @box.transactional
    def slow(_session: object) -> None:
        box.publish("orders", "published first, committed second", key="k")
        first_has_published.set()
        assert second_is_done.wait(WAIT_SECONDS)

    thread = threading.Thread(target=slow)
    thread.start()
    assert first_has_published.wait(WAIT_SECONDS)
    publish(box, "committed first")
    second_is_done.set()
    thread.join(WAIT_SECONDS)
    broker.wait_for(lambda it: len(it.stored) == 2)

    assert bodies(broker.stored) == ["committed first", "published first, committed second"]


@pytest.mark.slow
def test_many_writers_failing_sends_and_dying_leases_keep_every_keys_commit_order(shop: Shop, random_seed: int) -> None:
    broker = RecordingBroker(_out_now_and_then(Random(random_seed)))
    sender, compensated = shop.box(broker, ordered={"orders"}), shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    shop.execute("CREATE TABLE counter (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)")
    shop.execute("INSERT INTO counter VALUES (0, 0), (1, 0), (2, 0)")

    def write(number: int) -> None:
        mine = Random(random_seed + number)
        for _ in range(20):
            _count_up(mine.choice((sender, compensated)), mine.randrange(3))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    _send_what_is_left(shop, broker)
    sender.close()

    seen: defaultdict[str | None, list[int]] = defaultdict(list)
    for message in broker.stored:
        seen[message.key].append(int(message.body))
    assert sum(len(numbers) for numbers in seen.values()) == 80
    assert all(numbers == sorted(numbers) for numbers in seen.values()), seen
    assert queued(shop) == 0


def _out_now_and_then(random: Random) -> Callable[[Sequence[Message]], None]:
    lock = threading.Lock()

    def fail(_batch: Sequence[Message]) -> None:
        with lock:
            if random.random() < 0.3:
                raise BrokerUnavailable("now and then")

    return fail


def _count_up(box: Outbox, key: int) -> None:
    """A key's counter, read in the transaction that publishes it: its numbers are in commit order."""
    with box.begin() as connection:
        connection.execute(text("UPDATE counter SET n = n + 1 WHERE id = :id"), {"id": key})
        n = connection.scalar(text("SELECT n FROM counter WHERE id = :id"), {"id": key})
        box.publish("orders", str(n), key=str(key), session=connection)


def _send_what_is_left(shop: Shop, broker: RecordingBroker) -> None:
    scan = shop.scan(broker, batch_rows=7)
    for _ in range(500):
        if not shop.rows():
            return
        make_due(shop)
        scan.run()


def test_a_plain_topic_costs_no_statement_more(mysql_shop: Shop) -> None:
    from sqlalchemy import event

    statements: list[str] = []
    box = mysql_shop.box(RecordingBroker(), ordered={"orders"}, sender=NO_SENDER)
    publish(box, "0", topic="plain")  # it asks once to whom the schema belongs
    event.listen(mysql_shop.engine, "before_cursor_execute", lambda *it: statements.append(it[2]))

    publish(box, "1", topic="plain")

    assert len(statements) == 1


def test_an_idle_head_is_purged_and_its_key_goes_on_from_above(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    order = OrderStore(dialect=shop.engine.dialect, schema=shop.tables.metadata.schema)
    publish(box, "1", key="idle")
    publish(box, "2", key="waiting")
    first = max(row["order_seq"] for row in shop.rows())
    make_due(shop, "1")
    shop.scan(broker).run()

    with shop.engine.begin() as connection:
        gone, further = order.purge_heads(connection, idle_us=-1_000_000, after="", limit=100)
    publish(box, "3", key="idle")

    assert (gone, further) == (1, None), "only the head whose messages are all sent may go"
    assert max(row["order_seq"] for row in shop.rows()) > first


def test_a_number_whose_row_an_operator_deleted_holds_up_nobody(shop: Shop) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, ordered={"orders"}, sender=NO_SENDER)
    publish(box, "1")
    publish(box, "2")
    shop.execute(f"DELETE FROM {shop.tables.message.fullname} WHERE CAST(body AS CHAR) = '1'")
    make_due(shop)

    shop.scan(broker).run()

    assert bodies(broker.stored) == ["2"]
