"""Publishing to Kafka does what publishing to every broker does, on three real nodes."""

from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
