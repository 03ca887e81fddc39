"""Bounds of options, declared once with their types; the options refuse what is below, and the configuration, too."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from msgspec import Meta

from outbox_core.common.errors import ConfigurationError

Positive: TypeAlias = Annotated[int, Meta(ge=1)]


def bound_of(hint: object) -> Meta | None:
    """Returns the bound that a type is annotated with, by itself or beside None."""
    hints = [hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    return next((part for part in hints if isinstance(part, Meta)), None)


@cache
def hints_of(options: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, with their bounds."""
    return get_type_hints(options, include_extras=True)


def refuse_below_least(options: object) -> None:
    """Raise ConfigurationError for a number below its bound; None has none."""
    declared: type = type(options)
    for name, hint in hints_of(declared).items():
        bound, value = bound_of(hint), getattr(options, name)
        if bound is not None and bound.ge is not None and value is not None and value < bound.ge:
            or_none = ", or none" if type(None) in get_args(hint) else ""
            raise ConfigurationError(f"{name} must be at least {bound.ge}{or_none}")
