"""A resource that is assigned to one member of a group at a time: a source of rows, a shard, a slot. A value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import ConfigurationError

RESOURCE_NAME_CHARS_MAX: Final = 255
ZONE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Resource:
    """A name that is the same for every member, the zone whose members should have it, if any, and its priority.

    Those of a higher priority are assigned first. Raises ConfigurationError for what a registry cannot hold.
    """

    name: str
    zone: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_word(self.name, "a resource's name", chars_max=RESOURCE_NAME_CHARS_MAX)
        check_zone(self.zone)


def check_zone(zone: str | None) -> None:
    """Raise ConfigurationError for a zone that a registry cannot hold."""
    if zone is not None:
        check_word(zone, "a zone", chars_max=ZONE_CHARS_MAX)


def check_word(word: str, what: str, *, chars_max: int) -> None:
    """Raise ConfigurationError if a word is empty, too long or not printable ASCII."""
    if not 0 < len(word) <= chars_max or not word.isascii() or not word.isprintable():
        raise ConfigurationError(f"{what} is 1 to {chars_max} printable ASCII characters, not {word[:80]!r}")
