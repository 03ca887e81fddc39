"""Publishing to Pulsar does what publishing to every broker does, on a real server."""

from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
