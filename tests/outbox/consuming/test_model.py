"""The first programs of the model of consumers.

Any number by hand: python -m tests.outbox.consumer_model FIRST COUNT.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outbox.consumer_model.in_process import run

PROGRAMS = 24


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_of_consumers_holds(tmp_path: Path, seed: int) -> None:
    run(seed, tmp_path)
