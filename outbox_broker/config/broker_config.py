"""The settings of the broker and of the delay service, declared; runtime/settings.py loads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Meta
from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from outbox_broker.common.engine_options import EngineOptions, bound_of, hints_of
from outbox_broker.http.access_control import Access, load_tokens
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import Tls
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback
from outbox_core.runtime.durations_and_sizes import parse_setting
from outbox_core.runtime.logs import LogFormat
from outbox_core.runtime.settings import ServiceSettings, Table, load_settings

_OTHERS_KEYS: Final = frozenset({"url", "token", "token_file", "groups"})
"""Keys of the same table that are for clients of the broker, and for reconciliation (`groups`), and ignored here."""


_ENGINE_OPTIONS: Final = (
    "durability", "retention_ms", "retention_bytes", "retention_drops_unread", "judged_file", "filter_index_header",
    "filter_index_headers", "in_hand_max", "group_in_hand_max", "group_in_hand_min", "dead_letters_bytes_max",
    "reasons_bytes_max", "redrive_per_second", "dedup_messages_max", "cancel_tombstones_max", "topics_max",
    "groups_per_topic_max", "recurring_messages_max", "segment_bytes", "pull_bytes_max",
)  # fmt: skip
_HTTP_SETTINGS: Final = (
    "shutdown_timeout_ms", "request_bytes_max", "body_bytes_max", "batch_messages_max", "publishes_max",
    "work_bytes_max", "connections_max", "connections_per_address_max", "connections_reserved", "request_head_ms_max",
    "request_read_ms_max", "response_write_ms_max", "keep_alive_ms", "dead_page_bytes_max", "waiting_pulls_max",
)  # fmt: skip
"""What a server's operator may choose; types, defaults and bounds are those of the options."""


def _fields_of(options: type, names: Collection[str]) -> dict[str, Any]:
    defaults, hints = options(), hints_of(options)
    bounds = {name: bound_of(hints[name]) or Meta() for name in names}
    return {
        name: (
            hints[name],
            Field(
                default=getattr(defaults, name),
                ge=bounds[name].ge,
                le=bounds[name].le,
                min_length=bounds[name].min_length,
            ),
        )
        for name in names
    }


if TYPE_CHECKING:
    _Options = Table
else:
    _Options = create_model(
        "_Options",
        __base__=Table,
        **_fields_of(EngineOptions, _ENGINE_OPTIONS),
        **_fields_of(HttpSettings, _HTTP_SETTINGS),
    )


class BrokerConfig(_Options):
    """One server's choices; a name here is a flag, an environment variable and a key of `[broker]` in the TOML file.

    In the environment and in the file, a `..._ms` may be written as "7d", a `..._bytes` as "64MiB".
    """

    data: Path
    host: str = "127.0.0.1"
    port: int = Field(default=7788, ge=0, le=65535)
    tokens: Path | None = None
    insecure_no_auth: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    credentials_interval_ms: int | None = Field(default=None, ge=100)
    """How often the files of certificate, key and tokens are looked at; None: they are read when SIGHUP asks for it."""
    ready_file: Path | None = None
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    log_format: LogFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_others_keys(cls, table: dict[str, Any]) -> dict[str, Any]:
        return {name: setting for name, setting in table.items() if name not in _OTHERS_KEYS}

    @field_validator("*", mode="before")
    @classmethod
    def _written(cls, value: object, info: ValidationInfo) -> object:
        return parse_setting(info.field_name or "", value)

    @property
    def engine_options(self) -> EngineOptions:
        """The engine's part."""
        return EngineOptions(**self._values_of(EngineOptions))

    @property
    def http_settings(self) -> HttpSettings:
        """The HTTP server's part."""
        return HttpSettings(**self._values_of(HttpSettings))

    @property
    def tls(self) -> Tls | None:
        """The certificate's files. Raises ConfigurationError if they are unusable."""
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise ConfigurationError("TLS needs both --tls-cert and --tls-key")
        tls = Tls(self.tls_cert, self.tls_key)
        tls.load()
        return tls

    def _values_of(self, part: type[EngineOptions | HttpSettings]) -> dict[str, Any]:
        """Returns the options of one part, by its own names."""
        names = BrokerConfig.model_fields.keys() & {option.name for option in fields(part)}
        return {name: getattr(self, name) for name in names}

    def access(self) -> Access:
        """Returns the access control. Raises ConfigurationError if it is open on an address that others can reach."""
        if self.tokens is not None:
            return Access(tokens=load_tokens(self.tokens))
        if self.insecure_no_auth:
            return Access()
        if not is_loopback(self.host):
            raise ConfigurationError(
                f"{self.host} can be reached by others: give --tokens FILE, or listen on 127.0.0.1, "
                "or, where the network itself is guarded, say --insecure-no-auth"
            )
        return Access(loopback_hosts_only=True)


class BrokerTables(ServiceSettings):
    """The tables of the file that a broker, or a delay service of one node, reads."""

    broker: BrokerConfig

    def check(self) -> None:
        """Raise ConfigurationError where the certificate, or who may come, cannot be served as it is."""
        _ = self.broker.tls
        self.broker.access()


def load(flags: Mapping[str, Any], *, file: Path | None) -> BrokerConfig:
    """The configuration; flags that are None were not given. Raises ConfigurationError, see load_settings."""
    return load_settings(BrokerTables, {"broker": flags}, file=file).broker
