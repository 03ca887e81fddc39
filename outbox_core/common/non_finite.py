"""Finds numbers that JSON cannot represent (NaN and infinities) in a body, before it is encoded. Encodes nothing."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def non_finite_path(body: object) -> str | None:
    """Returns the path of the first such number, as `$.items[3].price`; None if all numbers are finite.

    msgspec writes these as `null`: a body whose JSON has no `null` need not be searched.
    """
    waiting: list[tuple[str, Any]] = [("$", msgspec.to_builtins(body))]
    while waiting:
        path, value = waiting.pop()
        match value:
            case float() if not math.isfinite(value):
                return f"{path} ({value})"
            case dict():
                waiting.extend((f"{path}.{name}", item) for name, item in reversed(value.items()))
            case list() | tuple():
                waiting.extend((f"{path}[{index}]", value[index]) for index in range(len(value) - 1, -1, -1))
    return None
