"""Generates the OpenAPI 3.1 document from the table of routes and the shapes of the protocol."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from outbox_broker.http.admission_limits import WorkClass
from outbox_broker.http.responses import TITLES
from outbox_broker.http.routes import GROUP, Route
from outbox_core.messages import limits
from outbox_core.messages.message import Record
from outbox_core.protocol import problem, wire
from outbox_core.protocol.problem import PROBLEM_TYPE, ProblemKind
from outbox_core.protocol.wire import (
    JSON_TYPE,
    MSGPACK_TYPE,
    Encoding,
)

_REFS: Final = "#/components/schemas/{name}"
_NAME: Final = {"type": "string", "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}$"}
_MESSAGE_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"}
_BASE64: Final = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_PATH_PARTS: Final = {"topic": _NAME, "group": _NAME, "id": _MESSAGE_ID, "name": _NAME}
# Rules beyond the shapes' types, which the server validates with error texts of its own.
_QUERY_PARTS: Final = {
    ("/v1/scheduled", "topic"): _NAME,
    (GROUP + "/dead", "after"): {"type": "string", "pattern": "^[0-9]{1,18}$"},
}


def _given(**properties: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema in which each of these fields is required."""
    return {"required": list(properties), "properties": properties}


_BODY: Final[dict[str, Any]] = {
    "if": _given(encoding={"const": Encoding.BASE64}),
    "then": {"properties": {"body": {"pattern": _BASE64}}},
}
_PUBLISHED: Final[dict[str, Any]] = _BODY | {
    "not": _given(deliver_at_ms={"type": "integer"}, delay_ms={"type": "integer"}),
}


def _array_of(*parts: tuple[str, dict[str, Any]], least: int, description: str = "") -> dict[str, Any]:
    """Returns the schema of a MessagePack array of these parts, (name, schema) each, of which the last may be left out
    down to `least`.
    """
    names = ", ".join(name for name, _ in parts)
    return {
        "type": "array",
        "description": f"{names}{description}",
        "prefixItems": [schema for _, schema in parts],
        "minItems": least,
    }


def _list_of(entry: dict[str, Any], **more: int) -> dict[str, Any]:
    return {"type": "array", "items": entry, **more}


_TEXT: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_TEXT_OR_NONE: Final = {"type": ["string", "null"]}
_RECORD: Final = _array_of(
    ("id", _TEXT), ("topic", _TEXT), ("key", _TEXT_OR_NONE),
    ("headers", {"type": "object", "additionalProperties": _TEXT}), ("body", {"description": "bin"}),
    ("created_at_ms", _INTEGER), ("deliver_at_ms", {"type": ["integer", "null"]}),
    least=5, description="; created_at_ms 0: not known",
)  # fmt: skip
_DELIVERY: Final = _array_of(
    ("receipt", _TEXT), ("attempt", _INTEGER), ("message", _RECORD), ("expired", {"type": "boolean"}), least=4
)
_DEAD_LETTER: Final = _array_of(
    ("message", _RECORD), ("group", _TEXT), ("attempts", _INTEGER), ("reason", _TEXT), ("dead_at_ms", _INTEGER),
    ("history", _list_of(_array_of(("reason", _TEXT), ("attempts", _INTEGER), least=2))),
    ("has_contents", {"type": "boolean"}), least=7,
)  # fmt: skip
_PACKED: Final[dict[type[msgspec.Struct], dict[str, Any]]] = {
    wire.PublishRequest: _list_of(_RECORD | {"maxItems": len(Record.__struct_fields__)},
                                  maxItems=limits.BATCH_MESSAGES_MAX),
    wire.PullAnswer: _list_of(_DELIVERY),
    wire.ReadAnswer: _array_of(
        ("offset", _INTEGER), ("next_offset", _INTEGER), ("messages", _list_of(_RECORD)), least=3
    ),
    wire.DeadAnswer: _array_of(("next", _TEXT_OR_NONE), ("dead", _list_of(_DEAD_LETTER)), least=2),
}  # fmt: skip
"""What MessagePack has of these in place of an object: an array, as its Struct. A later part goes last."""
_WHERE: Final = _given(where={"type": "object"})
_ALL: Final = _given(all={"const": True})
_CHOICES: Final = [_given(ids={"type": "array"}), _WHERE, _ALL]
_EDIT: Final[dict[str, Any]] = {
    "anyOf": [
        _given(body={"type": "string"}),
        _given(headers={"type": "object", "minProperties": 1}),
        _given(remove_headers={"type": "array", "minItems": 1}),
    ],
    "if": _given(body={"type": "string"}, encoding={"const": Encoding.BASE64}),
    "then": {"properties": {"body": {"pattern": _BASE64}}},
}
_EDITS: Final = _given(edits={"type": "array"})
_ONE_EDIT: Final = _given(edit={"type": "object", "not": _given(body={"type": "string"})})
_EDIT_CHOICES: Final = [
    {"allOf": [_EDITS], "not": {"anyOf": [_given(edit={"type": "object"}), _WHERE, _ALL]}},
    {"allOf": [_ONE_EDIT, _WHERE], "not": {"anyOf": [_EDITS, _ALL]}},
    {"allOf": [_ONE_EDIT, _ALL], "not": {"anyOf": [_EDITS, _WHERE]}},
]
_RULES: Final[dict[str, dict[str, Any]]] = {
    "SeekRequest": {"oneOf": [_given(to_ms={"type": "integer"}), _given(to_offset={"type": "integer"})]},
    "DeadCountRequest": {"oneOf": _CHOICES},
    "DiscardRequest": {"oneOf": _CHOICES},
    "EditRequest": {"oneOf": _EDIT_CHOICES},
    "JsonEdit": _EDIT,
    "JsonLetterEdit": _EDIT,
    "DeadFilter": {
        "anyOf": [_given(reason={"type": "string"}), _given(key={"type": "string"}), _given(headers={"type": "object"})]
    },
    "RedriveRequest": {"oneOf": [_given(ids={"type": "array"}), _ALL]},
    "JsonMessage": _PUBLISHED,
    "RecurringSettings": _BODY,
}
_ALWAYS: Final = (
    ProblemKind.WRONG_SHAPE,
    ProblemKind.INVALID_NAME,
    ProblemKind.INVALID_MESSAGE,
    ProblemKind.UNAUTHENTICATED,
    ProblemKind.FORBIDDEN,
    ProblemKind.FOREIGN_ORIGIN,
    ProblemKind.NOT_ACCEPTABLE,
    ProblemKind.HEADERS_TOO_LARGE,
    ProblemKind.THROTTLED,
    ProblemKind.STORAGE_FAILED,
    ProblemKind.INTERNAL,
)
_WITH_BODY: Final = (
    ProblemKind.MALFORMED_BODY,
    ProblemKind.BODY_TOO_SLOW,
    ProblemKind.BODY_TOO_LARGE,
    ProblemKind.BATCH_TOO_LARGE,
    ProblemKind.UNSUPPORTED_MEDIA_TYPE,
)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Returns the whole document, as JSON-able data."""
    shapes = {shape for route in routes for shape in (route.body, route.answer) if shape is not None}
    shapes |= {problem.ProblemAnswer, wire.HealthAnswer}
    _, components = msgspec.json.schema_components(sorted(shapes, key=lambda shape: shape.__name__), ref_template=_REFS)
    for name, rule in _RULES.items():
        components[name] |= rule
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes:
        paths[route.path][route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outbox MQ broker", "version": "1", "description": wire.__doc__},
        "security": [{"token": []}, {}],
        "paths": {**paths, **_operations()},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "description": f"Needs the role `{route.role.value}`.",
        "operationId": _operation_id(route),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {"200": {"description": "Done", "content": _content(route.answer)}, **_problems(route)},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": not route.body_optional, "content": _content(route.body)}
    return operation


def _operation_id(route: Route) -> str:
    if route.handler is not None:
        return route.handler.__name__
    return route.path.rpartition("/")[2]


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARTS[name]}
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = msgspec.json.schema(route.query)
    properties = schema["$defs"][route.query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": _QUERY_PARTS.get((route.path, name), part)}
        for name, part in properties.items()
    ]


def _problems(route: Route) -> dict[str, Any]:
    kinds = [*_ALWAYS, *route.problems]
    if route.body is not None:
        kinds += _WITH_BODY
    if route.work is WorkClass.PUBLISH:
        kinds.append(ProblemKind.MESSAGE_TOO_LARGE)
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        by_status[TITLES[kind][0]].append(f"`{kind.uri}`: {TITLES[kind][1]}.")
    return {
        str(status): {
            "description": " ".join(texts),
            "content": {PROBLEM_TYPE: {"schema": _ref(problem.ProblemAnswer)}},
        }
        for status, texts in sorted(by_status.items())
    }


def _operations() -> dict[str, Any]:
    health = {JSON_TYPE: {"schema": _ref(wire.HealthAnswer)}}
    ready = {
        "200": {"description": "The broker can serve", "content": health},
        "503": {"description": "It cannot, or is about to stop", "content": health},
    }
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/livez": _probe("live", "Whether the process is alive", {"200": {"description": "Alive", "content": health}}),
        "/readyz": _probe("ready", "Whether the broker can serve", ready),
        "/healthz": _probe("healthy", "Another name of /readyz", ready),
        "/metrics": {
            "get": {
                "summary": "Figures for Prometheus",
                "description": "Needs the role `read` on all topics.",
                "operationId": "metrics",
                "responses": {"200": {"description": "Prometheus text or OpenMetrics", "content": text}},
            }
        },
        "/openapi.json": _probe(
            "openapi",
            "This document",
            {"200": {"description": "OpenAPI 3.1", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}},
        ),
    }


def _probe(operation_id: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "operationId": operation_id, "security": [], "responses": responses}}


def _content(shape: type[msgspec.Struct]) -> dict[str, Any]:
    ref = _ref(shape)
    return {JSON_TYPE: {"schema": ref}, MSGPACK_TYPE: {"schema": _PACKED.get(shape, ref)}}


def _ref(shape: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFS.format(name=shape.__name__)}
