"""Asks two brokers the same at random and compares their answers. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from outbox_core import Broker, Delivery, GroupConfig, Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import OutboxError

TOPICS = ("a", "b")
GROUPS = ("g", "h")


class SideBySide:
    """One broker that is believed, one that is looked at; each step asks both the same and compares."""

    def __init__(self, believed: Broker, looked_at: Broker, *, clock: ManualClock, random: Random) -> None:
        self._brokers = (believed, looked_at)
        self._clock = clock
        self._random = random
        self._receipts: list[tuple[str, str]] = []
        self._ids: list[str] = []
        self.steps = 0
        self.handed_out = 0
        for topic in TOPICS:
            for group in GROUPS:
                config = GroupConfig(max_attempts=2 if group == "g" else 4, backoff_initial_ms=50)
                for broker in self._brokers:
                    broker.admin.declare_group(topic, group, config)
        self._acts: list[tuple[int, Callable[[], None]]] = [
            (6, self._publish), (10, self._pull), (5, self._ack), (4, self._nack), (2, self._extend), (2, self._cancel),
            (6, self._advance), (3, self._look), (1, self._redrive), (1, self._seek), (1, self._pause),
        ]  # fmt: skip

    def step(self) -> None:
        """Do one thing, often a usual one."""
        [act] = self._random.choices([act for _, act in self._acts], [weight for weight, _ in self._acts])
        act()
        self.steps += 1

    def _same(self, ask: Callable[[Broker], object]) -> None:
        believed, looked_at = (_answer(broker, ask) for broker in self._brokers)
        assert looked_at == believed, f"step {self.steps}"

    def _place(self) -> tuple[str, str]:
        return self._random.choice(TOPICS), self._random.choice(GROUPS)

    def _new_id(self) -> str:
        self._ids.append(f"m{len(self._ids)}")
        return self._ids[-1]

    def _publish(self) -> None:
        due = [None, -1, 30, 200, 5_000, 800 * 86_400_000]
        batch = []
        for _ in range(self._random.randint(1, 4)):
            delay_ms = self._random.choice(due)
            known = self._ids and self._random.random() < 0.15
            batch.append(
                Message(
                    id=self._random.choice(self._ids) if known else self._new_id(),
                    topic=self._random.choice(TOPICS),
                    body=b"x",
                    deliver_at_ms=None if delay_ms is None else self._clock.now_ms() + delay_ms,
                )
            )
        self._same(lambda broker: [(one.id, one.status) for one in broker.publish(batch)])

    def _pull(self) -> None:
        topic, group = self._place()
        count, invisible_ms = self._random.randint(1, 5), self._random.choice([10, 100, 1_000])
        pulled = [broker.pull(topic, group, max_messages=count, invisible_ms=invisible_ms) for broker in self._brokers]
        believed, looked_at = ([_seen(one) for one in deliveries] for deliveries in pulled)
        assert looked_at == believed, f"step {self.steps}"
        self._receipts += [(one.receipt, other.receipt) for one, other in zip(*pulled, strict=True)]
        self.handed_out += len(believed)

    def _some_receipts(self) -> list[tuple[str, str]]:
        newest = self._receipts[-12:]
        chosen = self._random.sample(newest, k=min(len(newest), self._random.randint(1, 3)))
        # One of each message: what two receipts of one message in one call come to is nobody's promise.
        return list({mine.rpartition(".")[0]: (theirs, mine) for theirs, mine in chosen}.values())

    def _settle(self, ask: Callable[[Broker, list[str]], object]) -> None:
        chosen = self._some_receipts()
        believed, looked_at = (
            ask(broker, [pair[number] for pair in chosen]) for number, broker in enumerate(self._brokers)
        )
        assert looked_at == believed, f"step {self.steps}"

    def _ack(self) -> None:
        self._settle(lambda broker, receipts: broker.ack(receipts))

    def _nack(self) -> None:
        delay_ms, counts = self._random.choice([None, 0, 40]), self._random.random() < 0.8
        self._settle(lambda broker, receipts: broker.nack(receipts, delay_ms=delay_ms, counts=counts, reason="why"))

    def _extend(self) -> None:
        self._settle(lambda broker, receipts: broker.extend(receipts, invisible_ms=300))

    def _cancel(self) -> None:
        chosen = [self._random.choice(self._ids)] if self._ids and self._random.random() < 0.8 else [self._new_id()]
        self._same(lambda broker: broker.cancel(chosen))

    def _advance(self) -> None:
        self._clock.advance(self._random.choice([1, 10, 60, 250, 3_000]))
        self._same(lambda broker: broker.cancel([]))  # whatever is due now is fired before the next step, by both

    def _look(self) -> None:
        topic, group = self._place()
        self._same(lambda broker: broker.admin.dead(topic, group, limit=3))
        self._same(lambda broker: dict(broker.admin.figures(topic, group)))

    def _redrive(self) -> None:
        topic, group = self._place()
        self._same(lambda broker: broker.admin.redrive(topic, group))

    def _seek(self) -> None:
        topic, group = self._place()
        offset = self._random.randint(0, 20)
        self._same(lambda broker: broker.admin.seek(topic, group, to_offset=offset))

    def _pause(self) -> None:
        topic, group = self._place()
        paused = self._random.random() < 0.3
        self._same(lambda broker: broker.admin.pause(topic, group, paused=paused))


def _answer(broker: Broker, ask: Callable[[Broker], object]) -> object:
    try:
        return ask(broker)
    except OutboxError as error:
        return type(error)


def _seen(delivery: Delivery) -> tuple[object, ...]:
    return (delivery.id, delivery.topic, delivery.body, delivery.attempt, delivery.deliver_at_ms)
