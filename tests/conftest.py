"""Fixtures that every room's tests share, and how Hypothesis runs. Servers are in tests/fixtures."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from outbox_core.common.clock import ManualClock
from tests.fixtures.late_threads import LateThreads
from tests.fixtures.local_server import servers_folder
from tests.fixtures.scheduling import FileScheduling, order_for_workers
from tests.fixtures.spark_classes import archive_options

pytest_plugins = ["tests.fixtures.servers", "tests.fixtures.own_process"]

THREADS_END_SECONDS_MAX = 120
MARKS_OF_FIXTURES = {"spark": "spark", "shared_mysql": "mysql", "mysql_server": "mysql"}

# No deadline: two busy cores make any time limit on one example a coin toss.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=2_000)
settings.load_profile(os.environ.get("OUTBOX_TEST_HYPOTHESIS") or ("ci" if os.environ.get("CI") else "local"))


def pytest_configure() -> None:
    """Set what programs and libraries read of the environment, for this process and those that tests start."""
    # PyMySQL reads the whole file of certificate authorities at every connection, for up to 40 ms, and checks nothing
    # by them; who does check still finds them in the machine's folder of certificates.
    os.environ["SSL_CERT_FILE"] = os.devnull
    # Let Spark find the Java that scripts/test fetched, where the machine has none.
    fetched = servers_folder() / "java"
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None and fetched.exists():
        os.environ["JAVA_HOME"] = str(fetched)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", archive_options())
    if (seed := os.environ.get("OUTBOX_TEST_LATE_THREADS")) is not None:
        LateThreads(int(seed)).install()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Show where the threads are that a failed test has left, and end: Python itself would wait for them for ever."""
    faulthandler.dump_traceback_later(THREADS_END_SECONDS_MAX, exit=True, file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect ten thousand tests without looking for garbage among them; as they all stay, none is looked for later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what takes the fixture of a session or a server, so that no test is part of --fast by oversight."""
    for fixture, mark in MARKS_OF_FIXTURES.items():
        if isinstance(item, pytest.Function) and fixture in item.fixturenames:
            item.add_marker(mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    """With `--dist loadfile`, spread the tests in our way."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin what takes longest first; pytest-randomly has shuffled before."""
    order_for_workers(items)


@pytest.fixture(autouse=True)
def logging_left_as_found() -> Iterator[None]:
    """An entry point that runs in this process sets up the root logger, which the tests after it would find so."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    if root.level != level:  # setting it looks through all loggers
        root.setLevel(level)


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
