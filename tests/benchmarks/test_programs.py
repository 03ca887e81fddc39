"""The benchmark programs run, and print what they promise. Not what they find: at these sizes figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import rounds, servers
from tests.fixtures.local_server import LocalServer

REPOSITORY = Path(__file__).parent.parent.parent
RUN_SECONDS_MAX = 1_200


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_publish_cost_compares_ours_with_a_message_written_by_hand(mariadb_of_module: LocalServer) -> None:
    found = _run("publish_cost", mariadb_of_module, "--no-peers")

    for workers in ("1", "8"):
        figures = found["workers"][workers]
        assert {"bare", "hand_written", "ours", "ours_ten", "ours_async"} <= set(figures["transactions_per_second"])
        assert figures["to_hand_written"]["hand_written"] == 1.0
        assert figures["to_hand_written"]["ours"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_commit_to_handler_times_both_brokers_beside_a_straight_publish(mariadb_of_module: LocalServer) -> None:
    found = _run("commit_to_handler", mariadb_of_module)

    for kind in ("http", "embedded"):
        assert 0 < found[kind]["ours"]["p50_ms"] <= found[kind]["ours"]["p99_ms"]
        assert found[kind]["ours_to_floor"]["p50_ms"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_drain_sends_whole_backlogs_beside_its_floor(mariadb_of_module: LocalServer) -> None:
    found = _run("drain", mariadb_of_module, "--no-peers")

    for size in ("400", "800"):
        assert found["sizes"][size]["rows_per_second"]["ours"]["median"] > 0
        assert found["sizes"][size]["to_floor"]["ours"] > 0
    assert found["largest_to_smallest"]["ours"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("mariadb", marks=pytest.mark.mariadb),
                                  pytest.param("mysql", marks=pytest.mark.mysql)])  # fmt: skip
def test_a_claim_locks_one_row_a_row_and_takes_as_many_statements_at_each_size(
    kind: str, request: pytest.FixtureRequest
) -> None:
    found = _run("claim", request.getfixturevalue(f"{kind}_server"), "--no-peers")

    assert [of["rows"] for of in found["ours"].values()] == [100, 100]
    assert [of["locks_a_row"] for of in found["ours"].values()] == [1.0, 1.0]
    assert len({of["statements"] for of in found["ours"].values()}) == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_recovery_sees_a_killed_producers_rows_sent_after_their_lease(mariadb_of_module: LocalServer) -> None:
    found = _run("recovery", mariadb_of_module)

    (figures,) = found["by_lease_ms"].values()
    assert figures["seconds"]["median"] > 0
    assert figures["seconds"]["median"] - figures["after_lease_seconds"]["median"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_a_drain_after_an_outage_claims_no_row_twice(mariadb_of_module: LocalServer) -> None:
    found = _run("drain_after_outage", mariadb_of_module)

    assert set(found["rows_per_second"]) == {"unordered", "1", "2", "1000"}
    assert all(1 <= claims < 2 for claims in found["claims_a_row"].values())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_history_compares_its_phases_with_the_fresh_one(mariadb_of_module: LocalServer) -> None:
    found = _run("history", mariadb_of_module)

    assert list(found["phases"]) == ["fresh", "archive", "open"]
    assert found["to_fresh"]["open"]["claim, locks a row"] == 1.0


@pytest.mark.slow
@pytest.mark.mariadb
def test_where_no_server_is_named_a_program_has_a_durable_one_of_its_own(mariadb_of_module: LocalServer) -> None:
    with servers.database(kind="mariadb", url=None, memory_mb=32) as own:
        [[flush, sync]] = own.server.execute("SELECT @@innodb_flush_log_at_trx_commit, @@sync_binlog")

        assert (flush, sync) == (1, 1)
        assert own.url != mariadb_of_module.url


def test_each_contestant_is_first_once_in_as_many_rounds_as_there_are() -> None:
    orders = [rounds.rotated(["a", "b", "c"], number) for number in range(3)]

    assert sorted(order[0] for order in orders) == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() -> None:
    ours, theirs = [1.0, 40.0, 9.0], [2.0, 80.0, 3.0]

    assert rounds.ratio(ours, theirs) == 0.5


def test_percentiles_are_taken_from_the_sorted_sample() -> None:
    values = [float(number) for number in range(100, 0, -1)]

    assert rounds.percentiles(values) == {"p50_ms": 51.0, "p90_ms": 91.0, "p99_ms": 100.0, "max_ms": 100.0}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_stores_of_timers_are_measured_side_by_side(mariadb_of_module: LocalServer) -> None:
    found = _run(
        "delay.timer_stores", mariadb_of_module, "--only", "redis_timers", "timing_store", "tables"
    )["pending"]["2000"]  # fmt: skip

    for name in ("redis_timers", "timing_store", "tables"):
        store = found["stores"][name]
        assert set(store["per_second"]) == {"add", "fire", "ack", "fire_and_ack"}
        assert all(step["median"] > 0 for step in store["per_second"].values())
    for name in ("redis_timers", "timing_store"):
        store = found["stores"][name]
        assert 0 < store["commands_a_timer"]["add"] < 0.1
        assert store["bytes_a_timer"] > 0
        assert found["ratios"]["add"][name]["tables"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_lateness_is_measured_with_a_timing_store_and_by_polls_alone(mariadb_of_module: LocalServer) -> None:
    found = _run("delay.timing_store", mariadb_of_module)

    for name in ("timing", "polls"):
        figures = found["lateness_ms"][name]
        assert (figures["rows"], figures["early"]) == (100, 0)
        assert 0 < figures["p50"] <= figures["p99"] <= figures["max"]
    assert found["rebuild"]["rows"] == 2_000
    assert all(found["rebuild"][name]["rows_per_second"] > 0 for name in ("unbounded", "default"))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.mariadb
def test_adapters_are_compared_with_plain_clients_and_drained_into_in_one_run() -> None:
    command = [sys.executable, "-m", "benchmarks.broker_adapter", "--engines", "redis", "nats", "--quick", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)

    assert done.returncode == 0, done.stderr[-3000:]
    engines = json.loads(done.stdout)["engines"]
    assert list(engines) == ["redis", "nats"]
    for kind in ("batches_of_500", "one_at_a_time", "drain"):
        assert all(figures[kind]["adapter"]["median"] > 0 for figures in engines.values())
        assert all(figures[kind]["ratio"] > 0 for figures in engines.values())
    assert done.stderr.count("drain") >= 2


@pytest.mark.processes
@pytest.mark.slow
def test_the_cost_of_an_online_backup_is_that_of_a_broker_beside_itself_without_one() -> None:
    command = [sys.executable, "-m", "benchmarks.broker.backup", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["benchmark"] == "broker.backup"
    for kind in ("alone", "backup"):
        assert found["results"][kind]["publish_500"]["median"] > 0
        assert 0 <= found["results"][kind]["late_p50_ms"]["median"] <= found["results"][kind]["late_p99_ms"]["median"]
    assert found["to_alone"]["publish_500"] > 0


def _run(program: str, server: LocalServer, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{program}", "--quick", "--url", server.url, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["benchmark"] == program
    assert found["server"]["innodb_flush_log_at_trx_commit"] == 1
    assert found["server"]["sync_binlog"] == 1
    assert found["machine"]["cores"] >= 1
    return found
