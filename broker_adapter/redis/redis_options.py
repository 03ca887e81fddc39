"""The options and the login of Redis in a broker's URL."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Final, Self

from redis.credentials import CredentialProvider

from broker_adapter.publishing.broker_url import URL_NAME_DEFAULT, BrokerUrl
from outbox_core.common.errors import ConfigurationError

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SENTINEL_OPTIONS: Final = frozenset({"master", "sentinel_user", "sentinel_password_file"})
"""What only the URL of Sentinels may say."""
URL_OPTIONS: Final = SENTINEL_OPTIONS | {"prefix", "maxlen", "window_ms", "wait", "create", "store", "slots"}
PREFIX_DEFAULT: Final = "outbox:"
WINDOW_MS_DEFAULT: Final = 3_600_000
WINDOW_MS_MIN: Final = 1_000
SLOTS_MAX: Final = 1_024
_OF_ONE_STORE: Final = {"maxlen": "streams", "create": "streams", "slots": "timers"}
_DATABASE_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Options of the store. `maxlen` None: streams are not trimmed. `replicas` None: as the server has them. `slots`
    of a topic of timers; None: as many as the topic has, 1 for a new one.
    """

    prefix: str = PREFIX_DEFAULT
    maxlen: int | None = None
    window_ms: int = WINDOW_MS_DEFAULT
    replicas: int | None = None
    creates_streams: bool = True
    has_timers: bool = False
    slots: int | None = None
    part_messages_max: int = 1_000
    """In one call of the script, which nothing else on the server may run beside."""
    part_bytes_max: int = 8 * 1024 * 1024

    @classmethod
    def of_url(cls, url: BrokerUrl) -> Self:
        """The options of a URL. Raises ConfigurationError."""
        store = url.choice("store", default="streams", among={"streams", "timers"})
        for name, of_store in _OF_ONE_STORE.items():
            if name in url.options and store != of_store:
                raise ConfigurationError(f"{name} in the broker's URL is about {of_store}, and it has store={store}")
        return cls(
            prefix=url.options.get("prefix", PREFIX_DEFAULT),
            maxlen=url.number("maxlen", default=0, least=1) or None,
            window_ms=url.number("window_ms", default=WINDOW_MS_DEFAULT, least=WINDOW_MS_MIN),
            replicas=url.number("wait", default=0) if "wait" in url.options else None,
            creates_streams=url.flag("create", default=True),
            has_timers=store == "timers",
            slots=checked_slots(url.number("slots", default=1)) if "slots" in url.options else None,
        )

    def stream_key(self, topic: str) -> str:
        """The key of the topic's stream. The braces keep it and its ids in one slot of a cluster."""
        return f"{self.prefix}{{{topic}}}"

    def ids_key(self, topic: str) -> str:
        """The key of the ids that were appended lately."""
        return f"{self.stream_key(topic)}:ids"


def port_of(url: str) -> int:
    """The port of the servers that a URL names, where it says none."""
    return SENTINEL_PORT if "+sentinel" in url.partition("://")[0] else PORT


def database_of(url: BrokerUrl, *, is_cluster: bool) -> int:
    """The number of the database, from the URL's path. Raises ConfigurationError; a cluster has number 0 only."""
    if not url.path:
        return 0
    if not (url.path.isascii() and url.path.isdigit()) or int(url.path) > (0 if is_cluster else _DATABASE_MAX):
        raise ConfigurationError(
            f"the path of a redis:// URL is the number of a database, as in redis://host/1, not {url.path!r}; "
            "a cluster has number 0 only"
        )
    return int(url.path)


def checked_slots(slots: int, *, url_name: str = URL_NAME_DEFAULT) -> int:
    """A number of slots that can be. Raises ConfigurationError."""
    if not 1 <= slots <= SLOTS_MAX or slots & (slots - 1):
        raise ConfigurationError(f"slots in {url_name} is a power of two from 1 to {SLOTS_MAX}, not {slots}")
    return slots


class PasswordFile(CredentialProvider):
    """A user, and the password in the file that an option of a URL names. It is read for each new connection, so a new
    password needs no restart. Thread-safe.
    """

    def __init__(self, url: BrokerUrl, *, user: str | None, option: str, password: str) -> None:
        """`password`: what the file said at first."""
        self._url = url
        self._user = user
        self._option = option
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User and password as the file says it now; where it cannot be read, as it said it last."""
        with contextlib.suppress(ConfigurationError):
            self._password = self._url.secret(self._option) or self._password
        return (self._password,) if self._user is None else (self._user, self._password)


def login_settings(url: BrokerUrl, *, user: str | None, password: str | None, option: str) -> dict[str, Any]:
    """The client's settings for a user and a password: that in the file which `option` names, if the URL has it.

    Raises ConfigurationError where the file cannot be read.
    """
    in_file = url.secret(option)
    if not in_file:
        return {"username": user, "password": password, "credential_provider": None}
    provider = PasswordFile(url, user=user, option=option, password=in_file)
    return {"username": None, "password": None, "credential_provider": provider}
