"""Calls Lua scripts, each on the node of its key until one answers, and waits for the replicas by WAIT.

A script is known by its hash, and sent whole where the server does not know it. Answers that say that nothing was done
(MOVED, ASK, LOADING ...) are followed by a repetition elsewhere; a lost connection too, where repeating does no harm.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import redis
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as ClientTimeout

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.redis.connections import Command, ProcessServers, Servers, exchange
from broker_adapter.redis.errors import CLIENT_ERRORS, exception_for, treatment_of
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, StorageFailed

PAUSE_S: Final = 0.05
"""Between the first two questions to a cluster that is moving slots or electing a master; later ones are rarer."""
PAUSE_S_MAX: Final = 0.4
WAIT_SHARE: Final = 0.8
"""Of the time that is left, for WAIT: its answer must come before the time is over."""

Argument = str | bytes | int
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the hash that a server knows it by."""

    text: str
    sha1: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha1", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True, kw_only=True)
class ScriptCall:
    """One call, and what became of it: the script's answer, or an error. All keys are of one slot of a cluster."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]
    is_repeatable: bool = True
    """Whether a repetition does no harm after a connection broke, when it may have been done."""
    outcome: Any = None
    refusal: Exception | None = None
    """Why a server could not do it, as it answered last."""
    with_script: bool = False
    redirected_to: redis.Redis | None = None

    def commands(self) -> Sequence[Command]:
        """Returns the commands whose last one is the call."""
        name, script = ("EVAL", self.script.text) if self.with_script else ("EVALSHA", self.script.sha1)
        call = [name, script, len(self.keys), *self.keys, *self.arguments]
        return [call] if self.redirected_to is None else [["ASKING"], call]

    def settle(self, outcome: Any) -> None:
        """Keep what became of it."""
        self.outcome = outcome
        if self.is_outage and isinstance(outcome, ResponseError):
            self.refusal = outcome

    def end(self) -> None:
        """Report why servers refused it rather than that the time ran out while one was asked once more; and that the
        time ran out where it did before a server was sent the script that it does not know.
        """
        if self.needs_script:
            self.outcome = ClientTimeout("Timeout before the server was sent the script")
        if isinstance(self.outcome, ClientTimeout) and self.refusal is not None:
            self.outcome = self.refusal

    @property
    def needs_script(self) -> bool:
        """Whether nothing was done because the server does not know the script's hash."""
        return isinstance(self.outcome, NoScriptError)

    @property
    def is_outage(self) -> bool:
        """Whether it was not done, or is in doubt, for a reason that may pass."""
        error = self.outcome
        if not isinstance(error, Exception) or isinstance(error, BrokerError) or self.needs_script:
            return False
        return treatment_of(error) is Treatment.OUTAGE

    @property
    def may_be_sent_again(self) -> bool:
        """Whether another node may take it, or the same one later."""
        return self.is_outage and (self.is_repeatable or isinstance(self.outcome, ResponseError))


class Deadline:
    """The end of one call."""

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self._clock = clock
        self._end_ms = clock.monotonic_ms() + timeout_ms

    def remaining_s(self) -> float:
        """Seconds that are left; none or less where it is over."""
        return (self._end_ms - self._clock.monotonic_ms()) / 1000


class ScriptSender:
    """Sends calls to a server or a cluster. Thread-safe; a forked child connects anew."""

    def __init__(self, open_servers: Callable[[], Servers], *, addresses: str) -> None:
        """`addresses`: what errors show of the URL."""
        self._servers = ProcessServers(open_servers)
        self.addresses = addresses
        self._closing = threading.Event()

    def send(
        self,
        calls: Sequence[ScriptCall],
        deadline: Deadline,
        *,
        replicas: int = 0,
        repeated_until: Deadline | None = None,
    ) -> None:
        """Send each; send those again that another node may take, until the time is over, or that of repetitions. Those
        of one node are done in their order, and with `replicas` count only once so many replicas have them.
        """
        pending, pause_s = calls, PAUSE_S
        while pending:
            self._attempt(pending, deadline, replicas=replicas)
            unknown = [call for call in pending if call.needs_script]
            for call in unknown:
                call.with_script = True
            elsewhere = [call for call in pending if call.may_be_sent_again]
            if elsewhere and not self._may_be_elsewhere(elsewhere, repeated_until or deadline, pause_s=pause_s):
                elsewhere = []
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            pending = unknown + elsewhere if deadline.remaining_s() > 0 else []
        for call in calls:
            call.end()

    def until_answered(self, ask: Callable[[Servers], Result], deadline: Deadline) -> Result:
        """Ask a cluster until it answers or the time is over; a single server once. Raises BrokerError."""
        while True:
            servers = self._servers.own()
            try:
                return ask(servers)
            except CLIENT_ERRORS as error:
                if treatment_of(error) is not Treatment.OUTAGE or not self._pause(PAUSE_S, deadline):
                    raise exception_for(error, addresses=self.addresses) from error
                if not servers.refresh():
                    raise exception_for(error, addresses=self.addresses) from error

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        self._closing.set()
        self._servers.close()

    def _may_be_elsewhere(self, calls: Sequence[ScriptCall], deadline: Deadline, *, pause_s: float) -> bool:
        servers = self._servers.own()
        for call in calls:
            error = call.outcome
            call.redirected_to = servers.redirected(error) if isinstance(error, ResponseError) else None
        return self._pause(pause_s, deadline) and servers.refresh()

    def _attempt(self, calls: Sequence[ScriptCall], deadline: Deadline, *, replicas: int) -> None:
        servers = self._servers.own()
        by_node: defaultdict[redis.Redis, list[ScriptCall]] = defaultdict(list)
        for call in calls:
            try:
                node = call.redirected_to or servers.node_of(call.keys[0])
            except CLIENT_ERRORS as error:
                call.settle(error)
            else:
                by_node[node].append(call)
        for node, group in by_node.items():
            _attempt_on(node, group, deadline, replicas=replicas)

    def _pause(self, pause_s: float, deadline: Deadline) -> bool:
        """Wait a moment; whether there is time left."""
        self._closing.wait(min(pause_s, max(0.0, deadline.remaining_s())))
        return deadline.remaining_s() > 0


def _attempt_on(node: redis.Redis, calls: Sequence[ScriptCall], deadline: Deadline, *, replicas: int) -> None:
    wait: Command | None = None
    if replicas:
        wait = ["WAIT", replicas, max(1, int(WAIT_SHARE * 1000 * deadline.remaining_s()))]
    commands = [call.commands() for call in calls]
    try:
        answers, reached = exchange(node, commands, wait=wait, remaining_s=deadline.remaining_s)
    except CLIENT_ERRORS as error:
        answers, reached = [error] * len(calls), error
    for call, answer in zip(calls, answers, strict=True):
        call.settle(answer if isinstance(answer, Exception) else _in_step(answer, reached, replicas_wanted=replicas))


def _in_step(answer: Any, reached: object, *, replicas_wanted: int) -> Any:
    """The script's answer, or the error where too few replicas have it: a failover could lose it."""
    if replicas_wanted and isinstance(reached, Exception):
        return reached
    if isinstance(reached, int) and reached < replicas_wanted:
        return StorageFailed(
            f"{reached} of {replicas_wanted} replicas confirmed in time (WAIT): start the others, "
            "or say ?wait= in the URL"
        )
    return answer
