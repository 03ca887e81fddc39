"""The settings of the broker and of the delay service, declared; runtime/settings.py loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationInfo, field_validator, model_validator

from outbox_broker.common.engine_options import SEGMENT_BYTES_MIN, Durability, EngineOptions
from outbox_broker.http.access_control import Access, load_tokens
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import Tls
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback
from outbox_core.runtime.durations_and_sizes import parse_duration_ms, parse_size_bytes
from outbox_core.runtime.logs import LogFormat
from outbox_core.runtime.settings import ServiceSettings, Table, load_settings

_CLIENT_KEYS: Final = frozenset({"url", "token", "token_file"})
"""Keys of the same table that are for clients of the broker, and ignored here."""


class BrokerConfig(Table):
    """One server's choices; a name here is a flag, an environment variable and a key of `[broker]` in the TOML file.

    In the environment and in the file, a `..._ms` may be written as "7d", a `..._bytes` as "64MiB".
    """

    data: Path
    host: str = "127.0.0.1"
    port: int = Field(default=7788, ge=0, le=65535)
    durability: Durability = Durability.FSYNC
    retention_ms: int | None = Field(default=EngineOptions().retention_ms, ge=1)
    retention_bytes: int | None = Field(default=None, ge=1)
    retention_drops_unread: bool = False
    judged_file: Path | None = None
    filter_index_header: str = Field(default=EngineOptions().filter_index_header, min_length=1)
    filter_index_headers: dict[str, str] = Field(default_factory=dict)
    in_hand_max: int = Field(default=EngineOptions().in_hand_max, ge=1)
    group_in_hand_max: int = Field(default=EngineOptions().group_in_hand_max, ge=1)
    group_in_hand_min: int = Field(default=EngineOptions().group_in_hand_min, ge=0)
    dead_letters_bytes_max: int = Field(default=EngineOptions().dead_letters_bytes_max, ge=1)
    reasons_bytes_max: int = Field(default=EngineOptions().reasons_bytes_max, ge=1)
    redrive_per_second: int = Field(default=EngineOptions().redrive_per_second, ge=1)
    dedup_messages_max: int = Field(default=EngineOptions().dedup_messages_max, ge=1)
    cancel_tombstones_max: int = Field(default=EngineOptions().cancel_tombstones_max, ge=1)
    topics_max: int = Field(default=EngineOptions().topics_max, ge=1)
    groups_per_topic_max: int = Field(default=EngineOptions().groups_per_topic_max, ge=1)
    segment_bytes: int = Field(default=EngineOptions().segment_bytes, ge=SEGMENT_BYTES_MIN)
    pull_bytes_max: int = Field(default=EngineOptions().pull_bytes_max, ge=1)
    tokens: Path | None = None
    insecure_no_auth: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ready_file: Path | None = None
    shutdown_timeout_ms: int = Field(default=25_000, ge=1)
    request_bytes_max: int = Field(default=HttpSettings().request_bytes_max, ge=1)
    body_bytes_max: int = Field(default=HttpSettings().body_bytes_max, ge=1)
    batch_messages_max: int = Field(default=HttpSettings().batch_messages_max, ge=1)
    publishes_max: int = Field(default=HttpSettings().publishes_max, ge=1)
    work_bytes_max: int = Field(default=HttpSettings().work_bytes_max, ge=1)
    connections_max: int = Field(default=HttpSettings().connections_max, ge=1)
    connections_per_address_max: int = Field(default=HttpSettings().connections_per_address_max, ge=1)
    connections_reserved: int = Field(default=HttpSettings().connections_reserved, ge=1)
    request_head_ms_max: int = Field(default=HttpSettings().request_head_ms_max, ge=1)
    request_read_ms_max: int = Field(default=HttpSettings().request_read_ms_max, ge=1)
    response_write_ms_max: int = Field(default=HttpSettings().response_write_ms_max, ge=1)
    keep_alive_ms: int = Field(default=HttpSettings().keep_alive_ms, ge=1)
    dead_page_bytes_max: int = Field(default=HttpSettings().dead_page_bytes_max, ge=1)
    waiting_pulls_max: int = Field(default=HttpSettings().waiting_pulls_max, ge=1)
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    log_format: LogFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_client_keys(cls, table: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name not in _CLIENT_KEYS}

    @field_validator("*", mode="before")
    @classmethod
    def _written(cls, value: object, info: ValidationInfo) -> object:
        """Durations and sizes as people write them; plain numbers as they are."""
        name = info.field_name or ""
        if not isinstance(value, str) or (value.isascii() and value.isdigit()):
            return value
        if name.endswith("_ms"):
            return parse_duration_ms(value)
        return parse_size_bytes(value) if name.endswith(("_bytes", "_bytes_max")) else value

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
        names = BrokerConfig.model_fields.keys() & {one.name for one in fields(part)}
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


class _BrokerTables(ServiceSettings):
    broker: BrokerConfig


def load(flags: Mapping[str, Any], *, file: Path | None) -> BrokerConfig:
    """The configuration; flags that are None were not given. Raises ConfigurationError, see load_settings."""
    return load_settings(_BrokerTables, {"broker": flags}, file=file).broker
