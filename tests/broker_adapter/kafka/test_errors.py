"""The table of Kafka's errors: complete over the client's codes, and right where it matters most."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from broker_adapter.kafka.errors import NOT_A_PRODUCERS, TREATMENTS, exception_for, treatment_of
from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed

CODES = {name for name in vars(KafkaError) if name.isupper() and isinstance(getattr(KafkaError, name), int)}


def test_each_code_of_the_client_is_in_the_table_or_named_as_none_of_a_producers() -> None:
    assert len(CODES) > 150
    assert CODES - set(TREATMENTS) - NOT_A_PRODUCERS == set()
    assert set(TREATMENTS) & NOT_A_PRODUCERS == set()


def test_the_table_names_no_code_that_the_client_does_not_have() -> None:
    assert (set(TREATMENTS) | NOT_A_PRODUCERS) - CODES == set()


@pytest.mark.parametrize(
    ("code", "treatment"),
    [
        ("MSG_SIZE_TOO_LARGE", Treatment.REJECTED),
        ("UNKNOWN_TOPIC_OR_PART", Treatment.DEFERRED),
        ("_UNKNOWN_TOPIC", Treatment.DEFERRED),
        ("TOPIC_AUTHORIZATION_FAILED", Treatment.DEFERRED),
        ("NOT_ENOUGH_REPLICAS", Treatment.STORAGE),
        ("_AUTHENTICATION", Treatment.NOT_AUTHENTICATED),
        ("_MSG_TIMED_OUT", Treatment.OUTAGE),
        ("OFFSET_OUT_OF_RANGE", Treatment.OUTAGE),
    ],
)
def test_a_code_is_treated_as_the_table_says(code: str, treatment: Treatment) -> None:
    assert treatment_of(KafkaError(getattr(KafkaError, code))) is treatment


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("_MSG_TIMED_OUT", BrokerUnavailable),
        ("NOT_ENOUGH_REPLICAS", StorageFailed),
        ("_AUTHENTICATION", NotAuthenticated),
        ("CLUSTER_AUTHORIZATION_FAILED", NotAuthorized),
    ],
)
def test_what_concerns_a_whole_batch_is_raised_with_the_last_report(code: str, kind: type[BrokerError]) -> None:
    error = exception_for(KafkaError(getattr(KafkaError, code)), what="Kafka at h:9092", reason="connection refused")

    assert type(error) is kind
    assert "Kafka at h:9092" in str(error)
    assert "connection refused" in str(error)
