"""open_timing_store: from a URL to the timing store of one source on Redis."""

from __future__ import annotations

import re
from typing import Final

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.connections import opener
from broker_adapter.redis.redis_options import PREFIX_DEFAULT, SENTINEL_OPTIONS, checked_slots, port_of
from broker_adapter.redis.script_sender import ScriptSender
from broker_adapter.redis.timing_store.redis_timing_store import RedisTimingStore
from broker_adapter.redis.timing_store.timing_scripts import TimingKeys
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.timing_port import TimingStore

NAME_DEFAULT: Final = "outbox"
SLOTS_DEFAULT: Final = 4
_OPTIONS: Final = SENTINEL_OPTIONS | {"prefix", "name", "slots"}
_URL_NAME: Final = "the timing store's URL"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)


def open_timing_store(url: str, *, timeout_ms: int | None = None) -> TimingStore:
    """The timing store for redis://, redis+cluster://, redis+sentinel:// or over TLS rediss://, rediss+cluster://,
    rediss+sentinel://; does no I/O until it is used.

    `?name=`: of the source, one for each message schema that uses this Redis; `?slots=`: a power of two; `?prefix=`: of
    all keys. All processes of a source give the same. Raises ConfigurationError.
    """
    parsed = BrokerUrl.parse(url, port=port_of(url), options=_OPTIONS, url_name=_URL_NAME)
    bound_ms = parsed.timeout_ms if timeout_ms is None else timeout_ms
    name = parsed.options.get("name", NAME_DEFAULT)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"name in {_URL_NAME} is 1 to 255 of A-Z a-z 0-9 . _ -, not {name!r}")
    sender = ScriptSender(opener(parsed, timeout_ms=bound_ms, ca_file=None), addresses=parsed.addresses)
    return RedisTimingStore(
        sender,
        TimingKeys(parsed.options.get("prefix", PREFIX_DEFAULT), name),
        slots=checked_slots(parsed.number("slots", default=SLOTS_DEFAULT), url_name=_URL_NAME),
        timeout_ms=bound_ms,
        clock=SystemClock(),
    )
