"""The peers' side of benchmarks.delay.lateness, in their own interpreter. Arguments: peer, address, rate, seconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from random import Random
from typing import Any

from benchmarks.delay.pace import figures, paced

BODY = b"x" * 512
POLL_SECONDS = 0.01
KEY = "schedule"


def redis(address: str, *, per_second: int, seconds: int) -> list[float]:
    """A sorted set by due time, polled every 10 ms; what is due is read and removed in one transaction."""
    from redis import Redis  # type: ignore[import-not-found,unused-ignore]

    total, late_ms, random = per_second * seconds, [], Random(1)
    publisher, consumer = Redis.from_url(address), Redis.from_url(address)

    def consume() -> None:
        while len(late_ms) < total:
            due = consumer.zrangebyscore(KEY, 0, time.time_ns() // 1_000_000, start=0, num=100, withscores=True)
            now_ms = time.time_ns() / 1e6
            late_ms.extend(now_ms - score for _, score in due)
            if due:
                consumer.zrem(KEY, *(member for member, _ in due))
            else:
                time.sleep(POLL_SECONDS)

    def publish(first: int, count: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        members = {b"%d:%s" % (first + at, BODY): now_ms + random.randrange(200, 1_200) for at in range(count)}
        publisher.zadd(KEY, members)

    thread = threading.Thread(target=consume)
    thread.start()
    paced(publish, total=total, per_second=per_second)
    thread.join()
    return late_ms


def rabbitmq(address: str, *, per_second: int, seconds: int) -> list[float]:
    """Messages with a time to live each, dead-lettered to the consumer's queue when they reach its front expired."""
    import pika  # type: ignore[import-not-found,import-untyped,unused-ignore]

    total, late_ms, random = per_second * seconds, [], Random(1)
    opened = [pika.BlockingConnection(pika.URLParameters(address)) for _ in range(2)]
    publisher, consumer = (one.channel() for one in opened)
    publisher.queue_declare("ready", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "ready"}
    publisher.queue_declare("waiting", durable=True, arguments=arguments)
    publisher.confirm_delivery()

    def consume() -> None:
        consumer.basic_qos(prefetch_count=200)
        for method, properties, _ in consumer.consume("ready"):
            late_ms.append(time.time_ns() / 1e6 - properties.headers["due_ms"])
            consumer.basic_ack(method.delivery_tag)
            if len(late_ms) >= total:
                consumer.cancel()
                return

    def publish(_first: int, count: int) -> None:
        for _ in range(count):
            delay_ms = random.randrange(200, 1_200)
            due_ms = time.time_ns() // 1_000_000 + delay_ms
            properties: Any = pika.BasicProperties(
                delivery_mode=2, expiration=str(delay_ms), headers={"due_ms": due_ms}
            )  # fmt: skip
            publisher.basic_publish("", "waiting", BODY, properties)

    thread = threading.Thread(target=consume)
    thread.start()
    paced(publish, total=total, per_second=per_second)
    thread.join()
    for one in opened:
        one.close()
    return late_ms


def main() -> None:
    """Measure, and print the figures."""
    name, address, per_second, seconds = sys.argv[1:]
    measure = {"redis": redis, "rabbitmq": rabbitmq}[name]
    print(json.dumps(figures(measure(address, per_second=int(per_second), seconds=int(seconds)))))


if __name__ == "__main__":
    main()
