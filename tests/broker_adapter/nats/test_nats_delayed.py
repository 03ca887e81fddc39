"""A delay service in front of NATS, on a real server."""

from tests.broker_adapter.publishing.delayed_conformance import *  # noqa: F403
