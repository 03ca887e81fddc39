"""What the adapter's tests show on Debian 12's RabbitMQ holds on the newest: failures, logins, TLS, inspection."""

from tests.broker_adapter.rabbitmq.test_rabbitmq_failures import *  # noqa: F403
from tests.broker_adapter.rabbitmq.test_rabbitmq_inspection import *  # noqa: F403
from tests.broker_adapter.rabbitmq.test_rabbitmq_logins import *  # noqa: F403
