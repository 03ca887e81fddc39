"""End to end: what was committed while the server was down reaches it, and its plain client reads it all."""

import pytest

from tests.broker_adapter.publishing.outbox_conformance import *  # noqa: F403

pytestmark = pytest.mark.slow  # a RabbitMQ takes seconds to start again
