"""Finds settings of brokers that would let RocketMQ lose a confirmed message."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from broker_adapter.rocketmq.remoting import RemotingError, ask, decoded
from broker_adapter.rocketmq.signature import Credentials
from outbox_core.messages.durability_inspection import Weakness

CLUSTER_INFO: Final = 106
BROKER_CONFIG: Final = 26
BROKER_RUNTIME_INFO: Final = 28
"""Request codes of the remoting protocol."""

MASTER: Final = "0"
UNSEEN: Final = "of a release that the proxy does not tell"
_CURE: Final = "name the name servers in the broker's URL: ?nameserver=HOST:9876"
_UNKNOWN: Final = "whether they sync a message to disk before they confirm it is unknown"


class BrokerSettings:
    """Asks a name server for the brokers, and each master for its settings: a proxy shows neither."""

    def __init__(self, name_servers: Sequence[tuple[str, int]], *, login: Credentials | None) -> None:
        """Reads brokers' settings. Without name servers they are reported as unknown."""
        self._name_servers = list(name_servers)
        self._login = login

    def inspect(self, *, timeout_s: float) -> tuple[str, list[Weakness]]:
        """The brokers' release, and the weaknesses of each."""
        if not self._name_servers:
            return UNSEEN, [
                Weakness(subject="brokers", problem=f"{_UNKNOWN}, since the proxy does not show it", cure=_CURE)
            ]
        deadline = time.monotonic() + timeout_s
        releases: set[str] = set()
        weaknesses: list[Weakness] = []
        try:
            for name, address in self.masters(deadline):
                weaknesses += _weaknesses(name, self._settings(address, deadline))
                releases.add(self._release(address, deadline))
        except (OSError, ValueError, RemotingError) as error:
            cure = (
                "check nameserver= in the broker's URL; the access key needs the right to read the cluster's settings"
            )
            weaknesses.append(Weakness(subject="brokers", problem=f"{_UNKNOWN}: {error}", cure=cure))
        return ", ".join(sorted(releases)) or UNSEEN, weaknesses

    def masters(self, deadline: float) -> Iterator[tuple[str, tuple[str, int]]]:
        """Names and addresses, as the first name server has them that answers, which is asked first from then on.
        Raises what ask() does.
        """
        for index, server in enumerate(self._name_servers):
            servers_left = len(self._name_servers) - index
            share_s = _left_s(deadline) / servers_left  # one that hangs leaves time for the others
            try:
                table = self._asked(server, CLUSTER_INFO, time.monotonic() + share_s)["brokerAddrTable"]
            except OSError:
                if servers_left == 1:
                    raise
            else:
                self._name_servers = [server, *(other for other in self._name_servers if other != server)]
                break
        for broker in table.values():
            address = broker["brokerAddrs"].get(MASTER)
            if address is not None:
                host, _, port = address.rpartition(":")
                yield broker["brokerName"], (host, int(port))

    def _settings(self, address: tuple[str, int], deadline: float) -> dict[str, str]:
        body = ask(address, BROKER_CONFIG, login=self._login, timeout_s=_left_s(deadline)).decode()
        return {name: value for line in body.splitlines() for name, equals, value in [line.partition("=")] if equals}

    def _release(self, address: tuple[str, int], deadline: float) -> str:
        table = self._asked(address, BROKER_RUNTIME_INFO, deadline)["table"]
        return str(table["brokerVersionDesc"]).removeprefix("V").replace("_", ".")

    def _asked(self, address: tuple[str, int], code: int, deadline: float) -> Any:
        return decoded(ask(address, code, login=self._login, timeout_s=_left_s(deadline)))


def _weaknesses(broker: str, settings: dict[str, str]) -> Iterator[Weakness]:
    weakness = partial(Weakness, subject=f"broker {broker}")
    if settings.get("flushDiskType") != "SYNC_FLUSH":
        problem = "it confirms a message before it is on disk, and loses it with its power"
        yield weakness(problem=problem, cure="set flushDiskType=SYNC_FLUSH")
    if settings.get("cleanFileForciblyEnable") == "true":
        problem = "when 85 % of its disk are used it deletes its oldest messages, read or not"
        yield weakness(problem=problem, cure="set cleanFileForciblyEnable=false: it then refuses messages instead")


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
