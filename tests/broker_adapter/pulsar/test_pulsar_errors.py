"""The table of Pulsar's results: complete over the client's, and right where it matters most."""

from __future__ import annotations

import pulsar
import pytest

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.pulsar.errors import NOT_A_PRODUCERS, TREATMENTS, exception_for, explained, treatment_of
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, StorageFailed

RESULTS = {
    name
    for name, kind in vars(pulsar.exceptions).items()
    if isinstance(kind, type) and issubclass(kind, pulsar.PulsarException) and kind is not pulsar.PulsarException
}


def test_each_result_of_the_client_is_in_the_table_or_named_as_none_of_a_producers() -> None:
    assert len(RESULTS) > 40
    assert RESULTS - set(TREATMENTS) - NOT_A_PRODUCERS == set()
    assert set(TREATMENTS) & NOT_A_PRODUCERS == set()


def test_the_table_names_no_result_that_the_client_does_not_have() -> None:
    assert (set(TREATMENTS) | NOT_A_PRODUCERS) - RESULTS == {"Ok"}


@pytest.mark.parametrize(
    ("result", "treatment"),
    [
        ("MessageTooBig", Treatment.REJECTED),
        ("TopicNotFound", Treatment.DEFERRED),
        ("TopicTerminated", Treatment.DEFERRED),
        ("AuthorizationError", Treatment.DEFERRED),
        ("ProducerBlockedQuotaExceededException", Treatment.DEFERRED),
        ("BrokerPersistenceError", Treatment.STORAGE),
        ("AuthenticationError", Treatment.NOT_AUTHENTICATED),
        ("Timeout", Treatment.OUTAGE),
        ("ConsumerBusy", Treatment.OUTAGE),
        ("OfTomorrow", Treatment.OUTAGE),
    ],
)
def test_a_result_is_treated_as_the_table_says(result: str, treatment: Treatment) -> None:
    assert treatment_of(result) is treatment


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ("Timeout", BrokerUnavailable),
        ("BrokerPersistenceError", StorageFailed),
        ("AuthenticationError", NotAuthenticated),
    ],
)
def test_what_concerns_a_whole_batch_is_raised_with_the_servers_addresses(result: str, kind: type[BrokerError]) -> None:
    error = exception_for(result, what="Pulsar at h:6650")

    assert type(error) is kind
    assert f"Pulsar at h:6650: {result}" in str(error)


def test_an_error_that_an_operator_can_cure_names_the_cure() -> None:
    assert "pulsar-admin topics create" in explained("TopicNotFound")
