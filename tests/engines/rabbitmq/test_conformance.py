"""Publishing to the newest RabbitMQ does what publishing to every broker does, and to Debian 12's, on one node."""

from tests.broker_adapter.publishing.outbox_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
