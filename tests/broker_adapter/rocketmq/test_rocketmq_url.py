"""URLs of RocketMQ: what is refused with its cure, and that no refusal shows the secret."""

from __future__ import annotations

import re

import pytest

from broker_adapter.rocketmq import open_broker
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.connect import connect


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("rocketmq://h/topic", "has no path"),
        ("rocketmq://key@h", "rocketmq://access-key:secret@proxy"),
        ("rocketmq://h?ca_file=/nowhere", "names no file"),
        ("rocketmq://h?cert_file=/nowhere", "names no file"),
        ("rocketmq://h?nameserver=h:port", "needs host:port"),
        ("rocketmq://h?namserver=h", "did you mean nameserver?"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        open_broker(url)


def test_certificates_need_the_scheme_with_tls() -> None:
    with pytest.raises(ConfigurationError, match="rocketmqs://"):
        open_broker("rocketmq://h", ca_file=__file__)


def test_a_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="knows no tokens"):
        open_broker("rocketmq://h", token="t")


def test_no_refusal_shows_the_secret() -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_broker("rocketmq://key:geheim@h/path")

    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("url", ["rocketmq://key:secret@h1,h2:8082?nameserver=n1,n2:9877&strict=true", "rocketmqs://h"])
def test_a_broker_is_opened_and_closed_without_io(url: str) -> None:
    broker = connect(url)

    broker.close()
    broker.close()
