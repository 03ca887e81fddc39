"""The signatures of RocketMQ's two protocols, against a value that openssl computes."""

from __future__ import annotations

from broker_adapter.rocketmq.durability_inspection import decoded
from broker_adapter.rocketmq.signature import Credentials, request_metadata


def test_a_request_is_signed_by_its_time() -> None:
    metadata = dict(request_metadata(Credentials("key", "secret"), client_id="c", now_ms=1_700_000_000_000))

    assert metadata["x-mq-date-time"] == "20231114T221320Z"
    assert metadata["authorization"] == (
        "MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, "
        "Signature=09787560892EB89233B4895D10313CDF924FB560"
    )


def test_without_a_login_nothing_is_signed() -> None:
    assert "authorization" not in dict(request_metadata(None, client_id="c", now_ms=0))


def test_a_login_does_not_show_its_secret() -> None:
    assert "geheim" not in repr(Credentials("key", "geheim"))


def test_names_that_are_numbers_need_no_quotes() -> None:
    assert decoded(b'{"b":{"brokerAddrs":{0:"h:1",12:"h:2"}}}') == {"b": {"brokerAddrs": {"0": "h:1", "12": "h:2"}}}
