"""Settings of the HTTP server, with safe defaults. Values only; the engine has its own options."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_broker.common.engine_options import Positive, refuse_out_of_bounds
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages import limits

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits of one server. A request over a limit is refused, with the limit's name, and nothing of it is stored.

    A queue of waiting pulls is kept for `idle_queue_ms` after its last waiter, or ended at once where there are
    `idle_queues_max` queues.
    """

    request_bytes_max: Positive = limits.BATCH_BYTES_MAX
    request_head_bytes_max: Positive = 32 * 1024
    request_head_ms_max: Positive = 10_000
    request_read_ms_max: Positive = 30_000
    response_write_ms_max: Positive = 30_000
    connections_max: Positive = 10_000
    connections_per_address_max: Positive = 5_000
    connections_reserved: Positive = 32
    work_bytes_max: Positive = 256 * MIB
    batch_messages_max: Positive = limits.BATCH_MESSAGES_MAX
    body_bytes_max: Positive = limits.BODY_BYTES_MAX
    pull_bytes_max: Positive = 32 * MIB
    dead_page_bytes_max: Positive = 8 * MIB
    publishes_max: Positive = 256
    requests_max: Positive = 512
    waiting_pulls_max: Positive = 10_000
    idle_queue_ms: Positive = 10_000
    idle_queues_max: Positive = 1_000
    scheduled_buckets_max: Positive = 10_000
    metric_series_max: Positive = 1_000
    publish_threads: Positive = 8
    settle_threads: Positive = 8
    pull_threads: Positive = 4
    throttled_retry_after_ms: Positive = 250
    storage_retry_after_ms: Positive = 5_000
    keep_alive_ms: Positive = 75_000
    shutdown_timeout_ms: Positive = 25_000

    def __post_init__(self) -> None:
        refuse_out_of_bounds(self)
        if self.body_bytes_max > limits.BODY_BYTES_MAX or self.batch_messages_max > limits.BATCH_MESSAGES_MAX:
            raise ConfigurationError(
                f"body_bytes_max goes up to {limits.BODY_BYTES_MAX}, batch_messages_max to {limits.BATCH_MESSAGES_MAX}"
            )
