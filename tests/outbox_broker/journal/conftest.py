"""The media of segments, on which logs are tested as segments are."""

from tests.outbox_broker.segments.conftest import ledgers, local, medium, memory

__all__ = ["ledgers", "local", "medium", "memory"]
