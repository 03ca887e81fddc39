"""The table of errors is complete over the server's numbers and the client's exceptions."""

from __future__ import annotations

import inspect
import ssl
import subprocess
from pathlib import Path

import nats.errors
import pytest

from broker_adapter.nats.errors import (
    OF_CODES,
    OF_STORE_TEXTS,
    STORE_FAILED,
    ApiError,
    exception_for,
    treatment_of,
)
from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotAuthenticated
from tests.broker_adapter.nats.nats_server import program

LIST = Path(__file__).with_name("jetstream_errors.tsv")

OF_PUBLISH = {
    "JSAccountResourcesExceededErr",
    "JSClusterNotLeaderErr",
    "JSInsufficientResourcesErr",
    "JSMessageIncrMissingErr",
    "JSStreamDuplicateMessageConflict",
    "JSStreamHeaderExceedsMaximumErr",
    "JSStreamMessageExceedsMaximumErr",
    "JSStreamSealedErr",
    "JSStreamSequenceNotMatchErr",
    "JSStreamStoreFailedF",
    "JSStreamTooManyRequests",
}
"""What the server's processJetStreamMsg and processClusteredInboundMsg answer, but for what headers of JetStream's own
cause: the adapter sends none of these, and refuses a message that has some.
"""
CONFIGURATION = {"BadTimeoutError", "InvalidCallbackTypeError", "InvalidUserCredentialsError"}


def listed() -> dict[str, ApiError]:
    """All errors of the pinned server, by name."""
    rows = [line.split("\t") for line in LIST.read_text().splitlines()[1:]]
    return {name: ApiError(int(code), int(number), text) for name, code, number, text in rows}


def test_the_list_is_of_the_server_that_the_tests_run_on() -> None:
    version = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]

    assert version in LIST.read_text().splitlines()[0]


def test_every_number_in_the_table_is_one_of_the_servers_and_every_answer_to_a_publish_is_in_it() -> None:
    numbers = {one.err_code for one in listed().values()}

    assert set(OF_CODES) <= numbers
    assert {listed()[name].err_code for name in OF_PUBLISH} <= {*OF_CODES, STORE_FAILED}


def test_every_error_of_the_server_has_a_treatment_and_only_too_large_ones_park_a_message() -> None:
    treatments = {name: treatment_of(error) for name, error in listed().items()}

    assert {name for name, one in treatments.items() if one is Treatment.REJECTED} == {
        "JSStreamMessageExceedsMaximumErr",
        "JSStreamHeaderExceedsMaximumErr",
    }
    for name, error in listed().items():
        if error.err_code not in OF_CODES and error.err_code != STORE_FAILED:
            own_trouble = error.code >= 500 or error.code == 429
            assert treatments[name] is (Treatment.OUTAGE if own_trouble else Treatment.DEFERRED), name


@pytest.mark.parametrize(
    ("text", "treatment"),
    [*OF_STORE_TEXTS.items(), ("write /data/1.blk: no space left on device", Treatment.STORAGE)],
)
def test_a_store_that_refused_is_known_by_its_text(text: str, treatment: Treatment) -> None:
    assert treatment_of(ApiError(503, STORE_FAILED, text)) is treatment


def test_every_exception_of_the_client_has_its_class() -> None:
    classes = {one for _, one in inspect.getmembers(nats.errors, inspect.isclass) if issubclass(one, nats.errors.Error)}
    made = [one() for one in classes - {nats.errors.SlowConsumerError}]
    made.append(nats.errors.SlowConsumerError("subject", "reply", 1, None))

    kinds = {type(one).__name__: type(exception_for(one, what="publish")) for one in made}

    assert len(kinds) > 20
    assert {name for name, kind in kinds.items() if kind is ConfigurationError} == CONFIGURATION
    assert {name for name, kind in kinds.items() if kind is NotAuthenticated} == {"AuthorizationError"}
    assert set(kinds.values()) == {ConfigurationError, NotAuthenticated, BrokerUnavailable}


@pytest.mark.parametrize("error", [OSError("refused"), TimeoutError(), ssl.SSLError("bad certificate")])
def test_troubles_of_the_network_are_outages(error: BaseException) -> None:
    assert type(exception_for(error, what="publish")) is BrokerUnavailable


@pytest.mark.parametrize(
    "text", ["nats: 'Authorization Violation'", "nats: 'user authentication expired'", "'User Authentication Revoked'"]
)
def test_a_refused_login_is_known_by_its_text(text: str) -> None:
    assert type(exception_for(nats.errors.Error(text), what="log in")) is NotAuthenticated
