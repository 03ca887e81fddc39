"""Receipts that come from the client's threads: each is taken once, and an error at once."""

from __future__ import annotations

import random
import threading

import pulsar
import pytest

from broker_adapter.pulsar.record_sender import Receipts

WAIT_SECONDS = 300


@pytest.mark.parametrize("errors_share", [0.0, 0.05])
def test_each_receipt_is_taken_once_whenever_it_comes(random_seed: int, errors_share: float) -> None:
    chosen = random.Random(random_seed)
    for count in [chosen.randrange(1, 200) for _ in range(200)]:
        results = [pulsar.Result.Timeout if chosen.random() < errors_share else pulsar.Result.Ok for _ in range(count)]
        receipts = Receipts()
        feeding = threading.Thread(
            target=lambda: [receipts.add(*each, None) for each in enumerate(results)]  # noqa: B023
        )
        feeding.start()
        taken: list[tuple[int, str]] = []
        while len(taken) < count:
            found = receipts.take(count - len(taken), timeout_s=WAIT_SECONDS)
            assert found
            taken += found
        feeding.join()

        assert sorted(taken) == [(number, result.name) for number, result in enumerate(results)]


def test_an_error_is_taken_though_others_are_outstanding() -> None:
    receipts = Receipts()
    receipts.add(3, pulsar.Result.BrokerPersistenceError, None)

    assert receipts.take(10, timeout_s=WAIT_SECONDS) == [(3, "BrokerPersistenceError")]


def test_nothing_is_taken_where_nothing_comes_in_time() -> None:
    assert Receipts().take(1, timeout_s=0.01) == []
