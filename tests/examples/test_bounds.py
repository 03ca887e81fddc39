"""The defaults and bounds of settings that the guides print are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compensator.core.config import WORKERS_MAX as SOURCES_AT_ONCE_MAX
from compensator.core.config import CompensatorTable
from outbox import SenderLimits
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.http.http_settings import MIB, HttpSettings
from outbox_core.messages import limits

DOCS = Path(__file__).parents[2] / "docs"
SENDER, HTTP, ENGINE, SOURCES = SenderLimits(), HttpSettings(), EngineOptions(), CompensatorTable()
HOUR_MS = 3_600_000

OPERATING = [
    f"| `interval`, `idle_interval` | `{SOURCES.interval // 1000}s`, `{SOURCES.idle_interval // 1000}s` |",
    f"| `batch_rows` | {SOURCES.batch_rows} |",
    f"| `lease` | `{SOURCES.lease // 1000}s` |",
    f"| `workers` | {SOURCES.workers} ({SOURCES_AT_ONCE_MAX} at most) |",
    f"| `drain_rate`, `probe_rows` | {SOURCES.drain_rate:,}, {SOURCES.probe_rows} |",
    f"| `stop_timeout` | `{SOURCES.stop_timeout // 1000}s` |",
    f"| `archive_days`, `inbox_days`, `order_head_days` | for ever, for ever, {SOURCES.order_head_days} |",
    f"| delay | {limits.DELAY_MAX.days} days |",
    f"| sender's queue | {SENDER.queue_rows_max:,} rows;",
    f"| removal of accepted rows | {SENDER.settle_delay_ms} ms or {SENDER.settle_rows_max} rows after",
    f"| lease of a fresh row | {SENDER.lease_ms // 1000} s, no send begins in",
    f"the last {SENDER.lease_margin_ms // 1000} s |",
    f"| recent ids at the broker | the newest {ENGINE.dedup_messages_max:,}, about",
    f"({(ENGINE.retention_ms or 0) // (24 * HOUR_MS)} days), or above `retention_bytes`",
    "in all (no bound), once every group has settled",
]
PROTOCOL = [
    f"| `request_bytes_max`, a request's body | {HTTP.request_bytes_max // MIB} MiB |",
    f"| `body_bytes_max`, a message's body | {HTTP.body_bytes_max // MIB} MiB |",
    f"| `batch_messages_max`, messages, receipts or ids of a request | {HTTP.batch_messages_max:,} |",
    f"| `request_head_bytes_max`, request line and headers | {HTTP.request_head_bytes_max // 1024} KiB |",
    f"| `request_read_ms_max`, until the body is there | {HTTP.request_read_ms_max // 1000} s |",
    (
        f"| key; headers of a message | {limits.KEY_BYTES_MAX:,} bytes; {limits.HEADERS_MAX}, "
        f"{limits.HEADERS_BYTES_MAX // 1024} KiB in all |"
    ),
    (
        f"| `max_messages`; `wait_ms` of a pull or read; `invisible_ms` of a pull | {limits.PULL_MESSAGES_MAX:,}; "
        f"{limits.PULL_WAIT_MS_MAX // 1000} s; {limits.INVISIBLE_MS_MIN} ms to {limits.INVISIBLE_MS_MAX // HOUR_MS} h |"
    ),
    f"| `work_bytes_max`, bytes of all requests and answers in work | {HTTP.work_bytes_max // MIB} MiB |",
    f"| `request_head_ms_max`, until the head is there | {HTTP.request_head_ms_max // 1000} s |",
    f"| `response_write_ms_max`, until the client has read the answer | {HTTP.response_write_ms_max // 1000} s |",
    f"| `keep_alive_ms`, between two requests | {HTTP.keep_alive_ms // 1000} s |",
    f"| {HTTP.connections_max:,}, or as many as there are descriptors for; {HTTP.connections_per_address_max:,} |",
    f"probes, metrics and admin routes | {HTTP.connections_reserved} |",
    f"| `publishes_max`, publishes in work at once | {HTTP.publishes_max} |",
    f"| `requests_max`, others in work at once | {HTTP.requests_max} |",
    f"| `waiting_pulls_max`, pulls and reads at once | {HTTP.waiting_pulls_max:,} |",
    f"| delay of a message | {limits.DELAY_MAX.days} days |",
    f"(the last {ENGINE.dedup_messages_max:,} ids)",
    f"(up to {limits.REASON_CHARS_MAX:,} characters)",
    f'"max_attempts"?: {limits.ATTEMPTS_MAX_DEFAULT},',
]
PRINTED = {"guides/operating.md": OPERATING, "protocol.md": PROTOCOL}


@pytest.mark.parametrize("page", PRINTED)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text = re.sub(r"\s+", " ", (DOCS / page).read_text())

    assert [line for line in PRINTED[page] if line not in text] == []
