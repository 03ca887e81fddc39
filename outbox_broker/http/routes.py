"""The table of the protocol's routes, from which the OpenAPI document is made, and the router that finds one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from outbox_broker.http import (
    delivery_handlers,
    group_handlers,
    message_handlers,
    operation_handlers,
    recurring_handlers,
)
from outbox_broker.http.access_control import Role
from outbox_broker.http.admission_limits import WorkClass
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_core.messages.message import DeadCount, EditPage
from outbox_core.protocol import problem, wire
from outbox_core.protocol.problem import ProblemKind

TOPIC: Final = "/v1/topics/{topic}"
GROUP: Final = TOPIC + "/groups/{group}"
RECURRING: Final = "/v1/recurring"
_PATH_CHARS_MAX: Final = 2_048
_ALL_METHODS: Final = "DELETE, GET, HEAD, POST, PUT"
_SMALL_BYTES: Final = 64 * 1024
"""Requests without lists are smaller."""
_RECEIPTS_BYTES: Final = 1024 * 1024
"""1,000 receipts have up to 560 KB: two names, and three numbers."""
_IDS_BYTES: Final = 256 * 1024
"""1,000 ids have up to 67 KB."""
_RECURRING_BYTES: Final = 1024 * 1024
"""A body of 64 KiB, of which JSON may write each byte with six, and headers of 32 KiB."""
_SETTINGS_BYTES: Final = 256 * 1024
"""A filter has up to 16 Ki characters, of which JSON may write each with twelve bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method on one path. `body_bytes_max` is well above its largest valid body; None: the general request limit.
    `handler` is None for requests that wait, which application.py has delivery_handlers.py serve.
    """

    method: str
    path: str
    role: Role
    summary: str
    answer: type[msgspec.Struct]
    handler: Callable[[Call], msgspec.Struct | msgspec.Raw] | None
    body: type[msgspec.Struct] | None = None
    body_bytes_max: int | None = _SMALL_BYTES
    body_optional: bool = False
    query: type[msgspec.Struct] | None = None
    work: WorkClass = WorkClass.SETTLE
    problems: tuple[problem.ProblemKind, ...] = field(default=())


_NOT_FOUND: Final = (problem.ProblemKind.NOT_FOUND,)
_IN_USE: Final = (problem.ProblemKind.NOT_FOUND, problem.ProblemKind.IN_USE)

ROUTES: Final = (
    Route(
        method="POST", path="/v1/publish", role=Role.PUBLISH, work=WorkClass.PUBLISH, handler=message_handlers.publish,
        body=wire.PublishRequest, body_bytes_max=None, answer=wire.PublishAnswer,
        summary="Store a batch of messages; answered when they are durable",
    ),
    Route(
        method="POST", path=TOPIC + "/read", role=Role.CONSUME, work=WorkClass.READ, handler=None,
        body=wire.ReadRequest, answer=wire.ReadAnswer,
        summary="Read a topic on from an offset, without a group, waiting up to wait_ms for the first message",
    ),
    Route(
        method="POST", path=GROUP + "/pull", role=Role.CONSUME, work=WorkClass.PULL, handler=None,
        body=wire.PullRequest, answer=wire.PullAnswer, summary="Take messages, waiting up to wait_ms for the first one",
        problems=(problem.ProblemKind.GROUP_DELETED,),
    ),
    Route(
        method="POST", path=GROUP + "/ack", role=Role.CONSUME, handler=delivery_handlers.ack,
        body=wire.AckRequest, body_bytes_max=_RECEIPTS_BYTES, answer=wire.AckAnswer, summary="Settle deliveries",
    ),
    Route(
        method="POST", path=GROUP + "/nack", role=Role.CONSUME, handler=delivery_handlers.nack,
        body=wire.NackRequest, body_bytes_max=_RECEIPTS_BYTES, answer=wire.NackAnswer, summary="Give deliveries back",
    ),
    Route(
        method="POST", path=GROUP + "/extend", role=Role.CONSUME, handler=delivery_handlers.extend,
        body=wire.ExtendRequest, body_bytes_max=_RECEIPTS_BYTES, answer=wire.ExtendAnswer,
        summary="Keep deliveries invisible for longer",
    ),
    Route(
        method="POST", path="/v1/scheduled/cancel", role=Role.PUBLISH, handler=message_handlers.cancel,
        body=wire.CancelRequest, body_bytes_max=_IDS_BYTES, answer=wire.CancelAnswer,
        summary="Cancel scheduled messages",
    ),
    Route(
        method="GET", path="/v1/scheduled", role=Role.READ, work=WorkClass.PAGE, handler=message_handlers.scheduled,
        query=wire.ScheduledQuery, answer=wire.ScheduledAnswer, summary="What fires when",
    ),
    Route(
        method="GET", path="/v1/scheduled/{id}", role=Role.READ, handler=message_handlers.scheduled_message,
        answer=wire.ScheduledMessage, summary="One scheduled message", problems=_NOT_FOUND,
    ),
    Route(
        method="GET", path="/v1/refused", role=Role.READ, work=WorkClass.PAGE, handler=message_handlers.refused,
        answer=wire.RefusedAnswer, summary="What a delay service's target refused for good",
    ),
    Route(
        method="POST", path="/v1/refused/retry", role=Role.ADMIN, handler=message_handlers.retry_refused,
        body=wire.RetryRequest, body_bytes_max=_IDS_BYTES, answer=wire.RetryAnswer,
        summary="Send what a delay service's target refused for good once more",
    ),
    Route(
        method="GET", path=RECURRING, role=Role.READ, work=WorkClass.PAGE, handler=recurring_handlers.list_recurring,
        query=wire.PageQuery, answer=wire.RecurringListAnswer, summary="The recurring messages, without their bodies",
    ),
    Route(
        method="PUT", path=RECURRING + "/{name}", role=Role.ADMIN, handler=recurring_handlers.add_recurring,
        body=wire.RecurringSettings, body_bytes_max=_RECURRING_BYTES, answer=wire.NoAnswer,
        problems=(problem.ProblemKind.IN_USE,), summary="Add a message that is published again and again",
    ),
    Route(
        method="GET", path=RECURRING + "/{name}", role=Role.READ, handler=recurring_handlers.show_recurring,
        query=wire.RecurringQuery, answer=wire.RecurringAnswer, problems=_NOT_FOUND,
        summary="A recurring message, and when it comes next",
    ),
    Route(
        method="DELETE", path=RECURRING + "/{name}", role=Role.ADMIN, handler=recurring_handlers.delete_recurring,
        answer=wire.NoAnswer, problems=_NOT_FOUND, summary="Delete a recurring message; what it published stays",
    ),
    Route(
        method="POST", path=RECURRING + "/{name}/pause", role=Role.ADMIN, handler=recurring_handlers.pause_recurring,
        body=wire.NoRequest, body_optional=True, answer=wire.NoAnswer, problems=_NOT_FOUND,
        summary="Pause a recurring message",
    ),
    Route(
        method="POST", path=RECURRING + "/{name}/resume", role=Role.ADMIN, handler=recurring_handlers.resume_recurring,
        body=wire.NoRequest, body_optional=True, answer=wire.NoAnswer, problems=_NOT_FOUND,
        summary="Resume a recurring message: of what it missed the newest is published",
    ),
    Route(
        method="POST", path="/v1/cordon", role=Role.ADMIN, handler=operation_handlers.cordon, body=wire.CordonRequest,
        body_optional=True, answer=wire.NoAnswer, summary="Take no new messages; deliveries go on",
    ),
    Route(
        method="POST", path="/v1/uncordon", role=Role.ADMIN, handler=operation_handlers.uncordon, body=wire.NoRequest,
        body_optional=True, answer=wire.NoAnswer, summary="Take new messages again",
    ),
    Route(
        method="POST", path="/v1/snapshot", role=Role.ADMIN, work=WorkClass.PAGE, handler=operation_handlers.snapshot,
        body=wire.SnapshotRequest, answer=wire.SnapshotAnswer, problems=_NOT_FOUND,
        summary="Have the data folder's files stand still for a backup beside the server",
    ),
    Route(
        method="GET", path="/v1/status", role=Role.READ, work=WorkClass.PAGE, handler=operation_handlers.status,
        query=wire.PageQuery, answer=wire.StatusAnswer,
        summary="Whether new messages are taken, and what is left to deliver",
    ),
    Route(
        method="GET", path="/v1/topics", role=Role.READ, work=WorkClass.PAGE, handler=group_handlers.topics,
        query=wire.PageQuery,
        answer=wire.TopicsAnswer, summary="The names of the topics",
    ),
    Route(
        method="GET", path=TOPIC, role=Role.READ, handler=group_handlers.topic, answer=wire.TopicAnswer,
        summary="A topic's figures and groups", problems=_NOT_FOUND,
    ),
    Route(
        method="DELETE", path=TOPIC, role=Role.ADMIN, handler=group_handlers.delete_topic, query=wire.DeleteQuery,
        answer=wire.NoAnswer, summary="Delete a topic that is not in use, or by force one that is", problems=_IN_USE,
    ),
    Route(
        method="POST", path=TOPIC + "/purge", role=Role.ADMIN, work=WorkClass.PAGE, handler=group_handlers.purge,
        body=wire.PurgeRequest, body_optional=True, answer=wire.PurgeAnswer, problems=_NOT_FOUND,
        summary="Move every group of a topic behind what is stored in it; dead letters are kept unless asked for",
    ),
    Route(
        method="PUT", path=GROUP, role=Role.ADMIN, handler=group_handlers.declare, body=wire.GroupSettings,
        body_bytes_max=_SETTINGS_BYTES, answer=wire.NoAnswer, summary="Make a consumer group, or change its settings",
    ),
    Route(
        method="GET", path=GROUP, role=Role.READ, handler=group_handlers.group, answer=wire.GroupAnswer,
        summary="A group's figures and settings", problems=_NOT_FOUND,
    ),
    Route(
        method="DELETE", path=GROUP, role=Role.ADMIN, handler=group_handlers.delete_group, query=wire.DeleteQuery,
        answer=wire.NoAnswer, summary="Delete a group that is not in use, or by force one that is", problems=_IN_USE,
    ),
    Route(
        method="POST", path=GROUP + "/seek", role=Role.ADMIN, handler=group_handlers.seek, body=wire.SeekRequest,
        answer=wire.NoAnswer, summary="Move a group to a time or an offset", problems=_NOT_FOUND,
    ),
    Route(
        method="POST", path=GROUP + "/pause", role=Role.ADMIN, handler=group_handlers.pause, body=wire.NoRequest,
        body_optional=True, answer=wire.NoAnswer, summary="Pause deliveries to a group", problems=_NOT_FOUND,
    ),
    Route(
        method="POST", path=GROUP + "/resume", role=Role.ADMIN, handler=group_handlers.resume, body=wire.NoRequest,
        body_optional=True, answer=wire.NoAnswer, summary="Resume deliveries to a group", problems=_NOT_FOUND,
    ),
    Route(
        method="GET", path=GROUP + "/dead", role=Role.READ, work=WorkClass.PAGE, handler=group_handlers.dead,
        query=wire.PageQuery,
        answer=wire.DeadAnswer, summary="A page of dead letters", problems=_NOT_FOUND,
    ),
    Route(
        method="POST", path=GROUP + "/dead/redrive", role=Role.ADMIN, handler=group_handlers.redrive,
        body=wire.RedriveRequest, body_bytes_max=_IDS_BYTES, answer=wire.RedriveAnswer, problems=_NOT_FOUND,
        summary="Send dead letters again",
    ),
    Route(
        method="POST", path=GROUP + "/dead/redrive/stop", role=Role.ADMIN, handler=group_handlers.stop_redrive,
        body=wire.NoRequest, body_optional=True, answer=wire.StopRedriveAnswer, problems=_NOT_FOUND,
        summary="Make what still waits for a redrive's rate dead again",
    ),
    Route(
        method="POST", path=GROUP + "/dead/count", role=Role.ADMIN, handler=group_handlers.count_dead,
        body=wire.DeadCountRequest, body_bytes_max=_IDS_BYTES, answer=DeadCount, problems=_NOT_FOUND,
        summary="Count the dead letters that a discard or an edit would take",
    ),
    Route(
        method="POST", path=GROUP + "/dead/discard", role=Role.ADMIN, handler=group_handlers.discard,
        body=wire.DiscardRequest, body_bytes_max=_IDS_BYTES, answer=wire.DiscardAnswer, problems=_NOT_FOUND,
        summary="Discard dead letters for good",
    ),
    Route(
        method="POST", path=GROUP + "/dead/edit", role=Role.ADMIN, work=WorkClass.PAGE, handler=group_handlers.edit,
        body=wire.EditRequest, body_bytes_max=None, answer=EditPage, problems=_NOT_FOUND,
        summary="Edit dead letters, under ids of their own, and have the group get them at once",
    ),
)  # fmt: skip
"""Every route under /v1. Probes, metrics and the OpenAPI document are in probe_routes.py."""


class RoutePattern(Protocol):
    """A route by method and path; `{name}` stands for one part of a path."""

    @property
    def method(self) -> str:
        """GET, POST, PUT or DELETE."""

    @property
    def path(self) -> str:
        """The path, from its first slash on."""


Found = TypeVar("Found", bound=RoutePattern)


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
    """Maps a method and a path to a route of one server, and extracts the names in the path. Parts are split before
    decoding.
    """

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
