"""Declares the groups of consumers that name their settings, and compares the settings of those that are there.

A group that is there keeps what is stored: old and new processes run side by side in a rolling deploy, and an operator
may have changed it. What would break the handler's promise, its order or its filter, is refused with the command.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import ConfigurationError, NotSupported
from outbox_core.messages.broker_port import Broker, Capability, GroupSettingsReader, capabilities_of
from outbox_core.messages.message import ORDERED_HEADER, Delivery, GroupConfig
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """What @consumer says of its group; None: nothing, so that whatever is stored, or the default, is right."""

    ordered: bool | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None
    filter: str | None = None
    start: str | datetime | None = None

    def __post_init__(self) -> None:
        self.new_config()  # raises InvalidMessage for what no group can have

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is said, so that nothing has to be declared."""
        settings = (self.ordered, self.max_attempts, self.backoff, self.filter, self.start)
        return all(option is None for option in settings)

    def new_config(self) -> GroupConfig:
        """Returns the settings of a group that is not there yet."""
        config = GroupConfig(ordered=bool(self.ordered), filter=self.filter or None)
        match self.start:
            case None:
                pass
            case datetime():
                if self.start.utcoffset() is None:
                    raise ConfigurationError("start is a naive datetime, which names no moment; give it a time zone")
                config = replace(config, start="at", start_at_ms=(self.start - _EPOCH) // timedelta(milliseconds=1))
            case _:
                config = replace(config, start=self.start)
        if self.max_attempts is not None:
            config = replace(config, max_attempts=self.max_attempts)
        if self.backoff is not None:
            config = replace(
                config, backoff_initial_ms=self.backoff.initial_ms, backoff_multiplier=self.backoff.multiplier,
                backoff_max_ms=self.backoff.max_ms,
            )  # fmt: skip
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDifferences:
    """How a stored group differs from what a consumer says: texts for people, and the options of the command."""

    refused: tuple[str, ...] = ()
    cure: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def differences(options: GroupOptions, stored: GroupConfig) -> GroupDifferences:
    """Returns what must be refused and what is left as it is stored. Pure."""
    declared = options.new_config()
    refused: list[str] = []
    cure: list[str] = []
    left: list[str] = []
    if options.ordered is not None and declared.ordered != stored.ordered:
        refused.append(f"ordered={stored.ordered}, not {declared.ordered}")
        cure.append("--ordered" if declared.ordered else "--no-ordered")
    if options.filter is not None and declared.filter != stored.filter:
        refused.append(f"filter={stored.filter!r}, not {declared.filter!r}")
        cure.append(f"--filter {shlex.quote(options.filter)}")
    if options.max_attempts is not None and declared.max_attempts != stored.max_attempts:
        left.append(f"max_attempts={stored.max_attempts}, not {declared.max_attempts}")
    if options.backoff is not None and _backoff_of(declared) != _backoff_of(stored):
        left.append(f"backoff={_backoff_of(stored)}, not {_backoff_of(declared)}")
    return GroupDifferences(refused=tuple(refused), cure=tuple(cure), left=tuple(left))


class GroupDeclarer:
    """The groups that one runner has declared. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._declared: set[tuple[str, str]] = set()
        self._warned: set[tuple[str, str]] = set()
        self._refused: dict[tuple[str, str], str] = {}

    def declare(self, topic: str, group: str, options: GroupOptions) -> None:
        """Declare the group if it is not there, once. Raises ConfigurationError if it is there with another order or
        filter, NotSupported for a broker that cannot, and the broker's errors.
        """
        if options.is_empty:
            return
        with self._lock:  # one worker of the group asks, and the others wait for the answer
            if (topic, group) in self._declared:
                return
            try:
                self._declare(topic, group, options)
            except (ConfigurationError, NotSupported) as error:
                self._refused[topic, group] = str(error)
                raise
            self._refused.pop((topic, group), None)
            self._declared.add((topic, group))

    def refusals(self) -> list[str]:
        """Returns why groups are not consumed from: their settings were refused, perhaps long after the start."""
        return list(self._refused.values())

    def forget(self, topic: str, group: str) -> None:
        """Declare the group again before the next pull: it was deleted, and a pull would make one without settings."""
        with self._lock:
            self._declared.discard((topic, group))

    def warn_of_lost_order(self, deliveries: Sequence[Delivery], group: str, options: GroupOptions) -> None:
        """Log once a topic that its producer keeps an order which this group's handlers do not see."""
        first = deliveries[0]
        if options.ordered is not None or ORDERED_HEADER not in first.headers:
            return
        with self._lock:
            if (first.topic, group) in self._warned:
                return
            self._warned.add((first.topic, group))
        logger.warning("order_not_kept_by_group", extra={"topic": first.topic, "group": group, "cure": _ORDER_CURE})

    def _declare(self, topic: str, group: str, options: GroupOptions) -> None:
        stored = _admin_of(self._broker).group_config(topic, group)
        if stored is None:
            self._broker.admin.declare_group(topic, group, options.new_config())
        else:
            self._compare(topic, group, differences(options, stored))

    def _compare(self, topic: str, group: str, difference: GroupDifferences) -> None:
        command = f"outbox broker group declare {topic} {group}"
        if difference.refused:
            raise ConfigurationError(
                f"the group {group} of {topic} is there with {' and '.join(difference.refused)}: change the consumer, "
                f"or the group with `{command} {' '.join(difference.cure)}`"
            )
        if difference.left:
            logger.warning(
                "group_settings_differ", extra={"topic": topic, "group": group, "kept": list(difference.left)}
            )


def _admin_of(broker: Broker) -> GroupSettingsReader:
    admin: object = broker.admin if Capability.ADMIN in capabilities_of(broker) else None
    if not isinstance(admin, GroupSettingsReader):
        raise NotSupported(
            "this broker's groups have no settings that a consumer could declare: leave out ordered, max_attempts, "
            "backoff, filter and start, or consume from an Outbox MQ broker"
        )
    return admin


def _backoff_of(config: GroupConfig) -> str:
    return f"{config.backoff_initial_ms} ms x {config.backoff_multiplier:g} up to {config.backoff_max_ms} ms"


_ORDER_CURE: Final = (
    "its producer keeps an order by key, which the group's handlers do not see after a failure or with several workers:"
    " say ordered=True in @consumer, or ordered=False if the order does not matter"
)
