"""Fixtures that every room's tests share, and how Hypothesis runs. Servers are in tests/fixtures."""

from __future__ import annotations

import os
import secrets
import shutil

import pytest
from hypothesis import HealthCheck, settings

from messaging.clock import ManualClock
from tests.fixtures.local_server import servers_folder

pytest_plugins = ["tests.fixtures.servers"]

# No deadline: two busy cores make any time limit on one example a coin toss.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=2_000)
settings.load_profile(os.environ.get("OUTBOX_TEST_HYPOTHESIS") or ("ci" if os.environ.get("CI") else "local"))


def pytest_configure() -> None:
    """Let Spark find the Java that scripts/test fetched, where the machine has none."""
    fetched = servers_folder() / "java"
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None and fetched.exists():
        os.environ["JAVA_HOME"] = str(fetched)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves only when told to."""
    return ManualClock()


@pytest.fixture
def random_seed() -> int:
    """A seed for this test's randomness. It is printed, so shown with a failure; OUTBOX_TEST_SEED repeats it."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED") or secrets.randbits(32))
    print(f"seed: OUTBOX_TEST_SEED={seed}")
    return seed
