"""A corpus of raw requests, good, bad and dangerous, by family; each module names its sources."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from tests.outbox_broker.http.raw_requests import (
    chunked_bodies,
    connection_options,
    content_length,
    desync,
    header_fields,
    hosts,
    methods,
    other_protocols,
    pipelines,
    request_lines,
    targets,
    transfer_encoding,
)

CORPUS: Final = MappingProxyType(
    {
        "request-lines": request_lines.CASES,
        "targets": targets.CASES,
        "header-fields": header_fields.CASES,
        "content-length": content_length.CASES,
        "transfer-encoding": transfer_encoding.CASES,
        "chunked-bodies": chunked_bodies.CASES,
        "desync": desync.CASES,
        "hosts": hosts.CASES,
        "connection-options": connection_options.CASES,
        "methods": methods.CASES,
        "pipelines": pipelines.CASES,
        "other-protocols": other_protocols.CASES,
    }
)
"""The cases of each family."""
