"""URLs of Kafka: which settings of librdkafka they give, and what is refused with its cure."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from broker_adapter.kafka import open_broker
from broker_adapter.kafka.client_settings import URL_OPTIONS, client_settings, producer_settings
from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_core.messages.message import Message


def settings(url: str, *, timeout_ms: int = 10_000, token: str | None = None) -> dict[str, object]:
    return client_settings(BrokerUrl.parse(url, port=9092, options=URL_OPTIONS), timeout_ms=timeout_ms, token=token)


def test_several_hosts_without_a_login_are_spoken_to_plainly() -> None:
    found = settings("kafka://h1,h2:9093")

    assert (found["bootstrap.servers"], found["security.protocol"]) == ("h1:9092,h2:9093", "plaintext")


def test_a_user_logs_in_by_the_mechanism_that_is_named() -> None:
    found = settings("kafka://app:p%40ss@h?security=sasl_ssl&sasl=SCRAM-SHA-512")

    assert found["security.protocol"] == "sasl_ssl"
    assert (found["sasl.mechanism"], found["sasl.username"]) == ("SCRAM-SHA-512", "app")
    assert found["sasl.password"] == "p@ss"


def test_tls_is_chosen_by_a_certificate_and_a_login_by_a_user(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("certificate")

    found = settings(f"kafka://app:pw@h?ca_file={tmp_path / 'ca.pem'}")

    assert (found["security.protocol"], found["sasl.mechanism"]) == ("sasl_ssl", "PLAIN")
    assert found["ssl.ca.location"] == str(tmp_path / "ca.pem")


def test_a_producer_waits_for_all_replicas_is_idempotent_and_bounded() -> None:
    found = producer_settings(settings("kafka://h"), timeout_ms=3_000)

    assert (found["acks"], found["enable.idempotence"], found["message.timeout.ms"]) == ("all", True, 3_000)


@pytest.mark.parametrize(
    ("url", "token", "cure"),
    [
        ("kafka://h/topic", None, "has no path"),
        ("kafka://app:pw@h?security=plaintext", None, "say security=sasl_ssl"),
        ("kafka://h?security=sasl_ssl", None, "kafka://user:password@host"),
        ("kafka://app@h", None, "needs a user and a password"),
        ("kafka://h?sasl=OAUTHBEARER", None, "needs the option token="),
        ("kafka://app:pw@h?sasl=PLAIN", "t", "say sasl=OAUTHBEARER"),
        ("kafka://h?security=tls", None, "is one of"),
        ("kafka://h?ca_file=/nowhere", None, "names no file"),
        ("kafka://h?acks=1", None, "unknown option"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, token: str | None, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        open_broker(url, token=token)


def test_certificates_that_cannot_be_read_are_an_outage_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")

    with (
        closing(open_broker(f"kafka://127.0.0.1:1?ca_file={tmp_path / 'ca.pem'}")) as broker,
        pytest.raises(BrokerUnavailable, match=r"ssl\.ca\.location failed"),
    ):
        broker.publish([Message(id="1", topic="t", body=b"")])


def test_no_refusal_shows_the_password() -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_broker("kafka://app:geheim@h?security=plaintext")

    assert "geheim" not in str(raised.value)
