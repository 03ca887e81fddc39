"""The adapter for NATS does what every publisher does, on a real server."""

from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
