"""A producer or a consumer as a process, for histories under kills. Not a test: what tests start.

    python -m tests.outbox_broker.history_client produce|consume URL NAME SEED TOPIC [GROUP]

It works until its standard input ends, and tells what it asks before it asks, and what it was answered after, on its
standard output, a JSON line each, with the machine's monotonic time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from random import Random

from outbox_core import Broker, connect
from outbox_core.common.errors import BrokerError
from outbox_core.messages.message import Message

KEYS = [f"key-{number}" for number in range(6)]
RETRY_S = 0.02


def tell(**what: object) -> None:
    sys.stdout.write(json.dumps({**what, "at_ns": time.monotonic_ns()}) + "\n")
    sys.stdout.flush()


def produce(broker: Broker, stop: threading.Event, *, name: str, random: Random, topic: str) -> None:
    """Publish; what was not answered is published again, under the same ids, before anything else.

    A producer's keys are its own, so that the order in which it was answered is the order of each key.
    """
    number = 0
    while not stop.is_set():
        batch = []
        for part in range(random.randint(1, 6)):
            key = random.choice([None, *(f"{name}.{one}" for one in KEYS)])
            later_ms = random.choice([0, 0, 0, 0, 300, 1_500])
            due_ms = time.time_ns() // 1_000_000 + later_ms if later_ms else None
            message_id = f"{name}-{number}-{part}"
            batch.append(
                Message(id=message_id, topic=topic, body=message_id.encode() * 20, key=key, deliver_at_ms=due_ms)
            )
        tell(asked="publish", messages=[[one.id, one.key, one.deliver_at_ms] for one in batch])
        while not stop.is_set():
            try:
                results = broker.publish(batch)
            except BrokerError:
                stop.wait(RETRY_S)
                continue
            tell(answered="publish", ids=[one.id for one in results if one.status != "rejected"])
            break
        number += 1


def consume(broker: Broker, stop: threading.Event, *, random: Random, topic: str, group: str) -> None:
    """Pull; acknowledge most, give some back, let some lie until their invisible time is over."""
    while not stop.is_set():
        try:
            asked_ns = time.monotonic_ns()
            found = broker.pull(topic, group, max_messages=random.randint(1, 20), wait_ms=200, invisible_ms=400)
            early = [one.id for one in found if (one.deliver_at_ms or 0) > time.time_ns() // 1_000_000]
            wrong = [one.id for one in found if one.body != one.id.encode() * 20]
            tell(
                answered="pull", group=group, messages=[[one.id, one.key] for one in found], early=early, wrong=wrong,
                asked_ns=asked_ns,
            )  # fmt: skip
            fates = [(one, random.random()) for one in found]
            back = [one for one, fate in fates if fate < 0.06]
            done = [one for one, fate in fates if fate > 0.1]
            if back:
                broker.nack([one.receipt for one in back], delay_ms=random.choice([0, 50]))
            tell(asked="ack", group=group, ids=[one.id for one in done])
            statuses = broker.ack([one.receipt for one in done])
            acked = [one.id for one, status in zip(done, statuses, strict=True) if status in {"acked", "already_acked"}]
            tell(answered="ack", group=group, ids=acked)
        except BrokerError:
            stop.wait(RETRY_S)


def main() -> None:
    what, url, name, seed, topic, *group = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    broker = connect(url)
    random = Random(int(seed))
    if what == "produce":
        produce(broker, stop, name=name, random=random, topic=topic)
    else:
        consume(broker, stop, random=random, topic=topic, group=group[0])
    broker.close()


if __name__ == "__main__":
    main()
