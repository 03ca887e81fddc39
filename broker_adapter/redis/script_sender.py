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
from redis.exceptions import ResponseError

from broker_adapter.redis.connections import Command, ProcessServers, Servers, exchange
from broker_adapter.redis.errors import CLIENT_ERRORS, Meaning, meaning_of, raised_for
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, StorageFailed

PAUSE_S: Final = 0.05
"""Between two questions to a cluster that is moving slots or electing a master."""
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
    with_script: bool = False
    redirected_to: redis.Redis | None = None

    def command(self) -> Command:
        """Returns the command's arguments."""
        name, script = ("EVAL", self.script.text) if self.with_script else ("EVALSHA", self.script.sha1)
        return [name, script, len(self.keys), *self.keys, *self.arguments]

    def means(self, meaning: Meaning) -> bool:
        """Whether it ended with an error of the client's that means this."""
        error = self.outcome
        return isinstance(error, Exception) and not isinstance(error, BrokerError) and meaning_of(error) is meaning

    @property
    def was_refused(self) -> bool:
        """Whether a server answered that it cannot do it now."""
        return isinstance(self.outcome, ResponseError) and self.means(Meaning.OUTAGE)

    @property
    def may_be_sent_again(self) -> bool:
        """Whether another node may take it, or the same one later."""
        return self.means(Meaning.OUTAGE) and (self.is_repeatable or isinstance(self.outcome, ResponseError))


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

    def send(self, calls: Sequence[ScriptCall], deadline: Deadline, *, replicas: int = 0) -> None:
        """Send each; send those again that another node may take, until the time is over. Those of one node are done
        in their order, and with `replicas` count only once so many replicas have them.
        """
        pending = calls
        while pending:
            self._attempt(pending, deadline, replicas=replicas)
            unknown = [call for call in pending if call.means(Meaning.SCRIPT_UNKNOWN)]
            for call in unknown:
                call.with_script = True
            elsewhere = [call for call in pending if call.may_be_sent_again]
            if elsewhere and not self._may_be_elsewhere(elsewhere, deadline):
                return
            pending = unknown + elsewhere if deadline.remaining_s() > 0 else []

    def until_answered(self, ask: Callable[[Servers], Result], deadline: Deadline) -> Result:
        """Ask a cluster until it answers or the time is over; a single server once. Raises BrokerError."""
        while True:
            servers = self._servers.own()
            try:
                return ask(servers)
            except CLIENT_ERRORS as error:
                if meaning_of(error) is not Meaning.OUTAGE or not self._pause(deadline):
                    raise raised_for(error, place=self.addresses) from error
                if not servers.refresh():
                    raise raised_for(error, place=self.addresses) from error

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        self._closing.set()
        self._servers.close()

    def _may_be_elsewhere(self, calls: Sequence[ScriptCall], deadline: Deadline) -> bool:
        servers = self._servers.own()
        for call in calls:
            error = call.outcome
            call.redirected_to = servers.redirected(error) if isinstance(error, ResponseError) else None
        return self._pause(deadline) and servers.refresh()

    def _attempt(self, calls: Sequence[ScriptCall], deadline: Deadline, *, replicas: int) -> None:
        servers = self._servers.own()
        by_node: defaultdict[redis.Redis, list[ScriptCall]] = defaultdict(list)
        for call in calls:
            try:
                node = call.redirected_to or servers.node_of(call.keys[0])
            except CLIENT_ERRORS as error:
                call.outcome = error
            else:
                by_node[node].append(call)
        for node, group in by_node.items():
            _attempt_on(node, group, deadline, replicas=replicas)

    def _pause(self, deadline: Deadline) -> bool:
        """Wait a moment; whether there is time left."""
        self._closing.wait(min(PAUSE_S, max(0.0, deadline.remaining_s())))
        return deadline.remaining_s() > 0


def _attempt_on(node: redis.Redis, group: Sequence[ScriptCall], deadline: Deadline, *, replicas: int) -> None:
    commands: list[Command] = []
    for call in group:
        if call.redirected_to is not None:
            commands.append(["ASKING"])
        commands.append(call.command())
    if replicas:
        commands.append(["WAIT", replicas, max(1, int(WAIT_SHARE * 1000 * deadline.remaining_s()))])
    try:
        answers = exchange(node, commands, remaining_s=deadline.remaining_s)
    except CLIENT_ERRORS as error:
        for call in group:
            # Time that ran out while a server is asked once more must not hide why it refused before.
            if not (deadline.remaining_s() <= 0 and call.was_refused):
                call.outcome = error
        return
    reached = answers.pop() if replicas else 0
    of_scripts = [answer for command, answer in zip(commands, answers, strict=False) if command != ["ASKING"]]
    for call, answer in zip(group, of_scripts, strict=True):
        call.outcome = answer if isinstance(answer, Exception) else _in_step(answer, reached, wanted=replicas)


def _in_step(answer: Any, reached: object, *, wanted: int) -> Any:
    """The script's answer, or the error where too few replicas have it: a failover could lose it."""
    if isinstance(reached, Exception):
        return reached
    if isinstance(reached, int) and reached < wanted:
        return StorageFailed(
            f"{reached} of {wanted} replicas confirmed in time (WAIT): start the others, or say ?wait= in the URL"
        )
    return answer
