"""Finds settings of brokers that would let RocketMQ lose a confirmed message."""

from __future__ import annotations

import base64
import itertools
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from broker_adapter.rocketmq.signature import Credentials
from outbox_core.common.deadline_socket import DeadlineSocket
from outbox_core.messages.broker_port import Weakness
from outbox_core.protocol.decoder_cache import json_decoder

CLUSTER_INFO: Final = 106
BROKER_CONFIG: Final = 26
BROKER_RUNTIME_INFO: Final = 28
"""Request codes of the remoting protocol."""

MASTER: Final = "0"
UNSEEN: Final = "of a release that the proxy does not tell"
_CURE: Final = "name the name servers in the broker's URL: ?nameserver=HOST:9876"
_UNKNOWN: Final = "whether they sync a message to disk before they confirm it is unknown"
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_JSON_HEADER_BYTES: Final = 0xFF_FFFF
"""The low bits of a header's length; the high ones are its encoding, which for JSON is 0."""
_UNQUOTED_NUMBER: Final = re.compile(rb"([{,])(\d+):")
_opaque = itertools.count(1)


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
        return {
            name: setting for line in body.splitlines() for name, equals, setting in [line.partition("=")] if equals
        }

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


class RemotingError(Exception):
    """A server's answer other than success."""


class _Header(msgspec.Struct):
    """The fields of an answer's header that are used."""

    code: int
    remark: str | None = None


def ask(
    address: tuple[str, int], code: int, *, login: Credentials | None, timeout_s: float,
    fields: Mapping[str, str] | None = None, body: bytes = b"",
) -> bytes:  # fmt: skip
    """One request to a name server or broker in RocketMQ's remoting protocol (lengths, a JSON header, a body), by a
    request code; the answer's body. `timeout_s` is for all of it. Raises OSError, ValueError and RemotingError.
    """
    deadline_s = time.monotonic() + timeout_s
    ext_fields = dict(fields or {})
    if login is not None:
        ext_fields |= _signed(login, ext_fields, body)
    header = {
        "code": code,
        "language": "PYTHON",
        "version": 0,
        "opaque": next(_opaque),
        "flag": 0,
        "extFields": ext_fields,
    }
    head = msgspec.json.encode(header)
    with socket.create_connection(address, timeout_s) as connection:
        timed = DeadlineSocket(connection, deadline_s=deadline_s)
        timed.sendall(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
        with timed.makefile("rb") as answer:
            length, head_length = struct.unpack(">ii", _exactly(answer, 8))
            if not 4 <= length <= ANSWER_BYTES_MAX:
                raise RemotingError(f"an answer of {length} bytes: this is no port of a name server or broker")
            content = _exactly(answer, length - 4)
    head_length &= _JSON_HEADER_BYTES
    answer_header = json_decoder(_Header).decode(content[:head_length])
    if answer_header.code != 0:
        raise RemotingError(f"{(answer_header.remark or '').partition(chr(10))[0]} (code {answer_header.code})")
    return content[head_length:]


def decoded(body: bytes) -> Any:
    """JSON as RocketMQ writes it, with numbers for names that are not quoted."""
    return msgspec.json.decode(_UNQUOTED_NUMBER.sub(rb'\1"\2":', body))


def _signed(login: Credentials, fields: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """The signature is of the values of all fields in the order of their names, and of the body."""
    values = {**fields, "AccessKey": login.access_key}
    signed = "".join(values[name] for name in sorted(values)).encode() + body
    signature = base64.b64encode(login.signature(signed)).decode()
    return {"AccessKey": login.access_key, "Signature": signature}


def _exactly(answer: Any, count: int) -> bytes:
    content: bytes = answer.read(count)
    if len(content) != count:
        raise RemotingError("the connection ended before the answer did")
    return content
