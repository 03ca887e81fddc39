"""Maps a method and a path to a route, and extracts the names in the path. Parts are split before decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from outbox_broker.http.problems import Problem
from outbox_core.protocol.problem import ProblemKind


class RoutePattern(Protocol):
    """A route by method and path; `{name}` stands for one part of a path."""

    @property
    def method(self) -> str:
        """GET, POST, PUT or DELETE."""

    @property
    def path(self) -> str:
        """The path, from its first slash on."""


Found = TypeVar("Found", bound=RoutePattern)
_PATH_CHARS_MAX: Final = 2_048
_ALL_METHODS: Final = "DELETE, GET, HEAD, POST, PUT"


@dataclass(frozen=True, slots=True)
class _Pattern(Generic[Found]):
    """A path: its fixed parts and its names by index, and its routes by method."""

    fixed: tuple[tuple[int, str], ...]
    names: tuple[tuple[int, str], ...]
    by_method: Mapping[str, Found]

    def names_in(self, parts: list[str]) -> dict[str, str] | None:
        """Returns the names in a path with as many parts; None if it does not match."""
        for index, part in self.fixed:
            if parts[index] != part:
                return None
        names = {name: parts[index] for index, name in self.names}
        return names if all(names.values()) else None


class Router(Generic[Found]):
    """The routes of one server."""

    def __init__(self, routes: Iterable[Found]) -> None:
        by_path: defaultdict[str, dict[str, Found]] = defaultdict(dict)
        for route in routes:
            by_path[route.path][route.method] = route
        self._patterns: defaultdict[int, list[_Pattern[Found]]] = defaultdict(list)
        for path, by_method in by_path.items():
            parts = path.split("/")
            fixed = tuple((index, part) for index, part in enumerate(parts) if not part.startswith("{"))
            names = tuple((index, part[1:-1]) for index, part in enumerate(parts) if part.startswith("{"))
            self._patterns[len(parts)].append(_Pattern(fixed, names, by_method))

    def find(self, method: str, path: str) -> tuple[Found, dict[str, str]]:
        """Returns the route, and the names in the path as sent; HEAD uses GET's route. Raises Problem: 404, 405."""
        if path == "*":
            raise Problem(
                ProblemKind.METHOD_NOT_ALLOWED, f"{method[:20]} is not allowed here", headers={"allow": _ALL_METHODS}
            )
        parts = path.split("/") if len(path) <= _PATH_CHARS_MAX else []
        allowed: set[str] = set()
        for pattern in self._patterns.get(len(parts), ()):
            names = pattern.names_in(parts)
            if names is None:
                continue
            route = pattern.by_method.get("GET" if method == "HEAD" else method)
            if route is not None:
                return route, names
            allowed |= pattern.by_method.keys()
        if not allowed:
            raise Problem(ProblemKind.UNKNOWN_ROUTE, "no route of the protocol has this path; /openapi.json lists them")
        if "GET" in allowed:
            allowed.add("HEAD")
        raise Problem(
            ProblemKind.METHOD_NOT_ALLOWED, f"{method[:20]} is not allowed here",
            headers={"allow": ", ".join(sorted(allowed))},
        )  # fmt: skip
