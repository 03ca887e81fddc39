"""A delay service in front of Redis, on a real server."""

from tests.broker_adapter.publishing.delayed_conformance import *  # noqa: F403
