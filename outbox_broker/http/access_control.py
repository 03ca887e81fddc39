"""Access control: bearer tokens with roles and topic patterns, and protection against web pages. No TLS, no users.

A token file is TOML. It holds no secret: only the SHA-256 of each token.

    [[tokens]]
    name = "payments"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    roles = ["publish", "consume"]
    topics = ["payment.*"]
    topics_max = 100
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from outbox_broker.http.responses import Problem
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback
from outbox_core.protocol.problem import ProblemKind

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
TOKENS_MAX: Final = 1_000
TOKEN_CHARS_MAX: Final = 1_024


class Role(StrEnum):
    """A permission of a token on its topics; `admin` includes `read`."""

    PUBLISH = "publish"
    CONSUME = "consume"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The sender of a request; the name is for the log."""

    name: str
    roles: frozenset[Role]
    topics: tuple[str, ...]
    topics_max: int | None = None

    @property
    def quota(self) -> ClientTopicQuota | None:
        """The limit of topics that match its patterns; None: the server's limit.

        A token restricted to some topics gets a default share of them.
        """
        if self.topics_max is None and self.covers_all:
            return None
        return ClientTopicQuota(self.topics, self.topics_max)

    def allows(self, role: Role, topic: str | None) -> bool:
        """Returns whether the principal has this role for this topic, or, without a topic, for any."""
        has_role = role in self.roles or (role is Role.READ and Role.ADMIN in self.roles)
        return has_role and (topic is None or self.covers(topic))

    def covers(self, topic: str) -> bool:
        """Returns whether a pattern of this token matches the topic."""
        return any(fnmatchcase(topic, pattern) for pattern in self.topics)

    @property
    def covers_all(self) -> bool:
        """Whether every topic name is covered."""
        return "*" in self.topics


ANYONE: Final = Principal(name="anyone", roles=frozenset(Role), topics=("*",))


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[tokens]]` table."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    roles: Annotated[list[Role], msgspec.Meta(min_length=1)]
    topics: Annotated[list[str], msgspec.Meta(min_length=1)]
    topics_max: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _TokenFile(msgspec.Struct, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenEntry], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The access check of one server. Without tokens everything is allowed to everybody, which is for loopback only."""

    tokens: Mapping[bytes, Principal] | None = None
    """Keyed by the SHA-256 of each token: lookup times leak nothing, since nobody can choose a hash."""
    loopback_hosts_only: bool = False

    def principal(self, headers: Mapping[str, str]) -> Principal:
        """Returns the sender. Raises Problem, unauthenticated, for a missing or unknown token."""
        if self.tokens is None:
            return ANYONE
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= TOKEN_CHARS_MAX:
            raise _unauthenticated("send `Authorization: Bearer <token>`")
        principal = self.tokens.get(hashlib.sha256(token.strip().encode("latin-1", "replace")).digest())
        if principal is None:
            raise _unauthenticated("the token is not known")
        return principal

    def check_origin(self, method: str, headers: Mapping[str, str]) -> None:
        """Refuse requests that foreign web pages make browsers send, and on an open server all but loopback hosts."""
        host = headers.get("host", "")
        if self.loopback_hosts_only and not is_loopback(_host_name(host)):
            raise Problem(ProblemKind.FOREIGN_ORIGIN, "a server without tokens answers to localhost only")
        if method in _SAFE_METHODS:
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            foreign = site not in {"same-origin", "none"}
        else:
            foreign = origin is not None and not _is_of(origin, host)
        if foreign:
            raise Problem(ProblemKind.FOREIGN_ORIGIN, "requests of web pages of other origins are refused")


def authorize(principal: Principal, role: Role, topic: str | None) -> None:
    """Raise Problem, forbidden, if the principal lacks the role (for the topic)."""
    if not principal.allows(role, topic):
        on = f" for the topic {topic}" if topic is not None else ""
        raise Problem(ProblemKind.FORBIDDEN, f"the token {principal.name!r} lacks the role {role.value!r}{on}")


def load_tokens(path: Path) -> dict[bytes, Principal]:
    """Load the tokens of a file, by SHA-256. Raises ConfigurationError that names the mistake, but no values."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = msgspec.convert(data, _TokenFile).tokens
    except OSError as error:
        raise ConfigurationError(f"cannot read the token file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path} is not TOML") from error
    except msgspec.ValidationError as error:
        location = re.search(r"`(\$[^`]*)`", str(error))
        raise ConfigurationError(
            f"the token file {path} has something wrong at {location[1] if location else '$'}: each [[tokens]] needs "
            f"name, sha256 (64 hex digits), roles (of {', '.join(Role)}) and topics (patterns, at least one), "
            "and may have topics_max (at least 1)"
        ) from error
    return {
        bytes.fromhex(entry.sha256): Principal(
            name=entry.name, roles=frozenset(entry.roles), topics=tuple(entry.topics), topics_max=entry.topics_max
        )
        for entry in entries
    }


def _is_of(origin: str, host: str) -> bool:
    """Returns whether an Origin header names this host and port; False if it does not parse."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Returns the Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _unauthenticated(detail: str) -> Problem:
    return Problem(ProblemKind.UNAUTHENTICATED, detail, headers={"www-authenticate": "Bearer"})
