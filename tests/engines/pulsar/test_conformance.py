"""Publishing to Pulsar does what publishing to every broker does, on a real server, with a delay service, too."""

from tests.broker_adapter.publishing.delayed_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.outbox_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
from tests.outbox.shop_fixtures import sqlite_shop  # noqa: F401
