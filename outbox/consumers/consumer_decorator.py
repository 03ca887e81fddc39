"""@consumer makes a Consumer of a function, run_consumers() runs Consumers on a broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.consumers.consumer_runner import ConsumerFigures, ConsumerHealth, ConsumerRunner
from outbox.consumers.group_declaration import GroupOptions
from outbox.consumers.handler import (
    CommittedByHandler,
    Consumer,
    NotTried,
    Outcome,
    RetryLater,
    check_handler,
    is_async,
)
from outbox.consumers.in_flight import still_held
from outbox.consumers.inbox_table import InboxStore
from outbox.producer.engine_hooks import listen_to_engines, watch_dialect
from outbox.store.database import open_engine
from outbox.telemetry import Telemetry
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import ConfigurationError, NotSupported
from outbox_core.messages.broadcast_port import Start
from outbox_core.messages.broker_port import Broker, Capability, capabilities_of
from outbox_core.messages.connect import connect
from outbox_core.messages.limits import INVISIBLE_MS_DEFAULT, INVISIBLE_MS_MAX, PULL_MESSAGES_MAX
from outbox_core.messages.message import Delivery, check_group, check_topic

__all__ = [
    "CommittedByHandler",
    "Consumer",
    "ConsumerFigures",
    "ConsumerHealth",
    "ConsumerRunner",
    "Delivery",
    "NotTried",
    "Outcome",
    "RetryLater",
    "consumer",
    "run_consumers",
    "still_held",
]

WORKERS_MAX: Final = 64
TOPICS_MAX: Final = 64
HANDLE_MS_MAX_DEFAULT: Final = 60 * 60 * 1000


def consumer(
    topic: str | Sequence[str],
    *,
    group: str,
    inbox: Engine | AsyncEngine | URL | str | None = None,
    schema: str | None = None,
    workers: int = 1,
    prefetch: int = 50,
    invisible_ms: int = INVISIBLE_MS_DEFAULT,
    handle_ms_max: int = HANDLE_MS_MAX_DEFAULT,
    broadcast: bool | Start = False,
    ordered: bool | None = None,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    filter: str | None = None,  # noqa: A002 - the group's setting has this name everywhere
    start: str | datetime | None = None,
) -> Callable[[Callable[..., object]], Consumer]:
    """Make a consumer of a function, plain or `async def`, for one topic or several.

    `inbox`: the database (engine or URL) whose tables the handler changes; its effects then happen once. Without one
    the handler gets a message at least once and should be idempotent. `workers` threads for each topic pull up to
    `prefetch` messages each. A handler that takes longer than `invisible_ms` keeps its message, for up to
    `handle_ms_max`.

    `broadcast`: every process that runs the consumer gets every message, in the topic's order, from the process's start
    (True or "latest") or the topic's ("earliest"); `group` is only its name in logs and metrics. A failed message is
    retried in place, up to 16 times, and then skipped. There is no inbox: its marks belong to a group.

    `ordered` (one message of a key at a time), `max_attempts`, `backoff` (without its jitter), `filter` and `start`
    make a group that is not there. Of one that is, another order or filter is refused; the rest stays as it is stored.
    """
    topics = tuple(check_topic(name) for name in ((topic,) if isinstance(topic, str) else topic))
    group = check_group(group)
    _check_bounds(
        len(topics), workers=workers, prefetch=prefetch, invisible_ms=invisible_ms, handle_ms_max=handle_ms_max
    )
    options = GroupOptions(ordered=ordered, max_attempts=max_attempts, backoff=backoff, filter=filter, start=start)
    begins = None if broadcast is False else _broadcast_start(str(broadcast), inbox, workers, options)
    engine, async_engine = (None, None) if inbox is None else _open_inbox(inbox)
    store = None if engine is None else InboxStore(dialect=engine.dialect, schema=schema)

    def decorate(function: Callable[..., object]) -> Consumer:
        check_handler(function, engine)
        return Consumer(
            topics=topics, group=group, handler=function, engine=engine, async_engine=async_engine, store=store,
            workers=workers, prefetch=prefetch, invisible_ms=invisible_ms, handle_ms_max=handle_ms_max,
            is_async=is_async(function), broadcast=begins, options=options, closes_engine=isinstance(inbox, str | URL),
        )  # fmt: skip

    return decorate


def _check_bounds(topics: int, *, workers: int, prefetch: int, invisible_ms: int, handle_ms_max: int) -> None:
    _check("topics", topics, at_most=TOPICS_MAX)
    _check("workers", workers, at_most=WORKERS_MAX)
    _check("prefetch", prefetch, at_most=PULL_MESSAGES_MAX)
    _check("invisible_ms", invisible_ms, at_most=INVISIBLE_MS_MAX)
    _check("handle_ms_max", handle_ms_max, at_most=None)


def _open_inbox(inbox: Engine | AsyncEngine | URL | str) -> tuple[Engine, AsyncEngine | None]:
    engine = open_engine(inbox)
    listen_to_engines()
    watch_dialect(engine.dialect)
    if isinstance(inbox, AsyncEngine):
        return engine, inbox
    return engine, AsyncEngine(engine) if engine.dialect.is_async else None


def run_consumers(
    consumers: Sequence[Consumer], *, broker: Broker | str, telemetry: Telemetry | None = None
) -> ConsumerRunner:
    """Start consumers on a broker (URL or object) and return their runner.

    End it with stop() or run_until_signal(). A broker that was given as a URL is closed with it. Raises NotSupported
    for a broker that only publishes: its consumers keep its own client, and use Inbox.
    """
    _check_consumers(consumers)
    opened = connect(broker) if isinstance(broker, str) else broker
    closes, url = (opened, broker) if isinstance(broker, str) else (None, None)
    missing = {_needed_capability(consumer) for consumer in consumers} - capabilities_of(opened)
    if missing:
        if closes is not None:
            closes.close()
        raise NotSupported(
            f"this broker has no {' and no '.join(sorted(missing))} for these consumers: read it by its own client, "
            "and take outbox.Inbox into the transaction"
        )
    runner = ConsumerRunner(consumers, broker=opened, telemetry=telemetry, closes_broker=closes, broker_url=url)
    runner.start()
    return runner


def _check_consumers(consumers: Sequence[object]) -> None:
    if not consumers:
        raise ConfigurationError("run_consumers got no consumer, and would wait for nothing")
    for candidate in consumers:
        if not isinstance(candidate, Consumer):
            name = getattr(candidate, "__name__", type(candidate).__name__)
            raise ConfigurationError(f'{name} is no consumer; decorate it: @consumer("TOPIC", group="GROUP")')


def _needed_capability(consumer: Consumer) -> Capability:
    return Capability.PULL if consumer.broadcast is None else Capability.BROADCAST


def _broadcast_start(broadcast: str, inbox: object, workers: int, options: GroupOptions) -> Start:
    starts: dict[str, Start] = {"True": "latest", "latest": "latest", "earliest": "earliest"}
    if broadcast not in starts:
        raise ConfigurationError(f'broadcast is True, "latest" or "earliest", not {broadcast!r}')
    if inbox is not None:
        raise ConfigurationError(
            "a broadcast consumer has no inbox: what one process has handled, all others would take for a duplicate"
        )
    if not options.is_empty:
        raise ConfigurationError("a broadcast consumer has no group that ordered, filter and the like could be said of")
    if workers != 1:
        raise ConfigurationError("a broadcast consumer has one worker a topic: it handles messages in their order")
    return starts[broadcast]


def _check(name: str, value: int, *, at_most: int | None) -> None:
    if value < 1 or (at_most is not None and value > at_most):
        bound = "at least 1" if at_most is None else f"from 1 to {at_most:,}"
        raise ConfigurationError(f"{name} must be {bound}, not {value:,}")
