"""The adapter for RabbitMQ does what every publisher does, on a real server."""

from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
