"""URLs of RabbitMQ: what they may say, and what is refused with its cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_adapter.rabbitmq import open_broker
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import capabilities_of
from outbox_core.messages.connect import connect


@pytest.mark.parametrize(
    ("scheme", "management"),
    [
        ("rabbitmq", "http://h1:15672"), ("rabbitmq", "https://h1:15671"), ("rabbitmqs", "https://h1:15671"),
        ("rabbitmqs", "http://127.0.0.1:25679"),
    ],
)  # fmt: skip
def test_each_scheme_opens_a_broker_without_any_connection(scheme: str, management: str) -> None:
    broker = connect(f"{scheme}://app:secret@h1,h2:5673/shop?exchange=orders&management={management}", timeout_ms=500)

    assert capabilities_of(broker) == frozenset()
    broker.close()


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("rabbitmq://h?exchang=x", "did you mean exchange?"),
        ("rabbitmq://h?management=h:15672", "http://HOST:15672"),
        ("rabbitmq://h?management=http://user:geheim@h:15672", "without a login"),
        ("rabbitmqs://app:geheim@h?management=http://h:15672", "give the https:// address"),
        ("rabbitmqs://app:geheim@h?management=http://10.0.0.1:15672", "give the https:// address"),
        ("rabbitmq://h?ca_file={wrong}", "rabbitmqs://"),
        ("rabbitmqs://h?ca_file={wrong}", "cannot be read"),
        ("rabbitmqs://h?key_file={wrong}", "cert_file"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, cure: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("nothing of use")

    with pytest.raises(ConfigurationError, match=re.escape(cure)) as raised:
        open_broker(url.format(wrong=wrong))

    assert "geheim" not in str(raised.value)


def test_a_token_is_a_password_here() -> None:
    with pytest.raises(ConfigurationError, match="as the password"):
        open_broker("rabbitmq://h", token="token")
