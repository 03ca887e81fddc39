"""End to end: what was committed while the server was down reaches it, and its plain client reads it all."""

from tests.broker_adapter.publishing.outbox_conformance import *  # noqa: F403
