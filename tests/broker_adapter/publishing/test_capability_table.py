"""The table of docs/guides/brokers.md is made from what the adapters declare."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from outbox_core.messages.broker_port import Capability, capabilities_of
from outbox_core.messages.connect import connect

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "brokers.md"
BEGIN, END = "test_capability_table.py -->\n", "<!-- end of capabilities -->"
BROKERS: Final = {
    "Outbox MQ": "http://127.0.0.1:1",
    "Redis": "redis://127.0.0.1:1",
    "Redis, `?store=timers`": "redis://127.0.0.1:1/?store=timers",
    "NATS JetStream": "nats://127.0.0.1:1",
    "Apache Kafka": "kafka://127.0.0.1:1",
    "Apache Pulsar": "pulsar://127.0.0.1:1",
    "Apache RocketMQ": "rocketmq://127.0.0.1:1",
    "RabbitMQ": "rabbitmq://127.0.0.1:1",
}
"""A URL of each broker; making one asks no server."""


def table() -> str:
    """One line a broker, one column a capability."""
    names = [str(one) for one in Capability]
    lines = ["| broker | scheme | publish | " + " | ".join(names) + " |", "| --- | --- | --- |" + " --- |" * len(names)]
    for product, url in BROKERS.items():
        broker = connect(url)
        declared = capabilities_of(broker)
        cells = ["yes" if Capability(name) in declared else "-" for name in names]
        lines.append(f"| {product} | `{url.partition(':')[0]}` | yes | " + " | ".join(cells) + " |")
        broker.close()
    return "\n" + "\n".join(lines) + "\n\n"


def test_the_guide_shows_what_the_adapters_declare() -> None:
    text = GUIDE.read_text(encoding="utf-8")

    shown = text.partition(BEGIN)[2].partition(END)[0]

    assert shown == table(), f"put this between the two marks of {GUIDE.name}:\n{table()}"
