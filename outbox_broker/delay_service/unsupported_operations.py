"""What a delay service does not do, each refused by its name: consuming, reading on, operating on groups. No other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from outbox_core.common.errors import NotSupported


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotSupported(f"a delay service only publishes ({what}): consume and operate on its target broker")

    return refuse


class Refusing:
    """Every such method of what an HTTP server serves (outbox_broker.http.served_ports)."""

    take = _refused("pull")
    take_at_hand = _refused("pull")
    ack = _refused("ack")
    nack = _refused("nack")
    extend = _refused("extend")
    place_to_read = _refused("read")
    read_on = _refused("read")
    deletions = 0
    declare_group = _refused("declare a group")
    delete_group = _refused("delete a group")
    delete_topic = _refused("delete a topic")
    seek = _refused("seek")
    pause = _refused("pause or resume")
    dead = _refused("dead letters")
    redrive = _refused("redrive")
    group_figures = _refused("figures of a group")
    group_config = _refused("settings of a group")
