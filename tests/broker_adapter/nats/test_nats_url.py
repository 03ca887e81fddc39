"""URLs of NATS: what they may say, what is refused with its cure, and what becomes of topics and headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_adapter.nats import open_broker
from broker_adapter.nats.nats_publisher import frame_of, refusal_of, wire_bytes
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Capability, capabilities_of
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message


@pytest.mark.parametrize("scheme", ["nats", "natss", "tls"])
def test_each_scheme_opens_a_broker_that_drops_repeats_without_any_connection(scheme: str) -> None:
    broker = connect(f"{scheme}://app:secret@h1,h2:5222?prefix=shop.eu&strict=true", timeout_ms=500)

    assert capabilities_of(broker) == {Capability.DEDUPLICATION}
    broker.close()


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("nats://h/some-path", "?prefix="),
        ("nats://h?prefix=a..b", "subject like"),
        ("nats://h?prefix=a.*", "subject like"),
        ("nats://h?inbox_prefix=a%20b", "subject like"),
        ("nats://h?exchange=x", "unknown option"),
        ("nats://:password@h", "user:password"),
        ("nats://token@h?creds_file={creds}", "one login"),
        ("nats://h?creds_file={wrong}", "nsc generate creds"),
        ("nats://h?nkey_file={wrong}", "nk -gen user"),
        ("nats://h?creds_file=/nowhere", "names no file"),
        ("nats://h?ca_file={wrong}", "natss://"),
        ("natss://h?ca_file={wrong}", "cannot be read"),
        ("natss://h?key_file={wrong}", "cert_file"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, cure: str, tmp_path: Path) -> None:
    wrong, creds = tmp_path / "wrong", tmp_path / "creds"
    wrong.write_text("nothing of use")
    creds.write_text("BEGIN NATS USER JWT, BEGIN USER NKEY SEED")

    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        open_broker(url.format(wrong=wrong, creds=creds))


def test_a_token_is_given_once() -> None:
    with pytest.raises(ConfigurationError, match="one login"):
        open_broker("nats://user:password@h", token="other")


def test_no_error_shows_the_password() -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_broker("nats://user:geheim@h/path?prefix=x")

    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("topic", [".paid", "paid.", "paid..eu"])
def test_a_topic_that_is_no_subject_is_refused_with_the_reason(topic: str) -> None:
    assert "dot" in str(refusal_of(Message(id="1", topic=topic, body=b"")))


@pytest.mark.parametrize("headers", [{"Nats-Rollup": "all"}, {"nats-expected-stream": "x"}, {"note": "a\r\nb"}])
def test_a_header_that_the_server_would_obey_or_that_cannot_be_carried_is_refused(headers: dict[str, str]) -> None:
    assert next(iter(headers)) in str(refusal_of(Message(id="1", topic="t", body=b"", headers=headers)))


def test_an_event_has_its_content_type_as_an_attribute_and_values_percent_encoded() -> None:
    headers = {"ce-specversion": "1.0", "ce-subject": "gr%C3%BCn", "Content-Type": 'text/plain; a="b"'}
    frame = frame_of(Message(id="1", topic="t", body=b"", headers=headers), prefix="shop")

    assert frame.subject == "shop.t"
    assert frame.headers == {
        "ce-specversion": "1.0",
        "ce-subject": "gr%C3%BCn",
        "ce-datacontenttype": "text/plain;%20a=%22b%22",
        "content-type": 'text/plain; a="b"',
        "outbox-id": "1",
        "Nats-Msg-Id": "t:1",
    }


def test_the_size_that_a_server_bounds_is_counted_as_it_goes_over_the_wire() -> None:
    frame = frame_of(Message(id="1", topic="t", body=b"body", headers={"a": "ü"}), prefix="")

    assert wire_bytes(frame) == len("NATS/1.0\r\na: ü\r\noutbox-id: 1\r\nNats-Msg-Id: t:1\r\n\r\nbody".encode())
