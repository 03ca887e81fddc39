"""Random programs of consumers, by seed: see tests/outbox/consumer_model. A minute of them.

Always the same ones; others by hand: python -m tests.outbox.consumer_model in-process|processes FIRST COUNT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.local_server import Durability, LocalServer
from tests.fixtures.servers import local_server
from tests.outbox.consumer_model import in_process, processes
from tests.outbox.consumer_model.handlers import SERVER_OPTIONS
from tests.outbox.consumer_model.program import IN_PROCESS, PROCESSES, Fault, Shape, program

SEEDS_IN_PROCESS = range(12)
SEEDS_OF_PROCESSES = (14, 21, 24, 35, 36)


@pytest.fixture(scope="module")
def killed_mariadb() -> Iterator[LocalServer]:
    """A durable MariaDB that the programs of this module kill."""
    with local_server("mariadb", Durability.FULL, *SERVER_OPTIONS) as server:
        yield server


@pytest.mark.parametrize("seed", SEEDS_IN_PROCESS)
def test_a_random_program_of_consumers_holds(tmp_path: Path, seed: int) -> None:
    in_process.run(seed, tmp_path)


@pytest.mark.mariadb
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS_OF_PROCESSES)
def test_a_random_program_holds_while_consumers_broker_and_database_are_killed(
    tmp_path: Path, seed: int, killed_mariadb: LocalServer
) -> None:
    processes.run(seed, tmp_path, killed_mariadb)


def test_the_programs_have_every_event_fault_and_shape() -> None:
    in_process_programs = [program(seed, IN_PROCESS) for seed in SEEDS_IN_PROCESS]
    of_processes = [program(seed, PROCESSES) for seed in SEEDS_OF_PROCESSES]

    assert {step.event for one in in_process_programs for step in one.steps} == set(IN_PROCESS)
    assert {step.event for one in of_processes for step in one.steps} == set(PROCESSES)
    assert {fault for one in in_process_programs for fault, _ in one.faults.values()} == set(Fault)
    assert {group.shape for one in in_process_programs for group in one.groups} == set(Shape)
    assert any(one.swallowing for one in of_processes)


def test_a_seed_makes_the_same_program_each_time(random_seed: int) -> None:
    first, second = (program(random_seed, PROCESSES) for _ in range(2))

    assert first == second
    assert program(random_seed + 1, PROCESSES) != first
