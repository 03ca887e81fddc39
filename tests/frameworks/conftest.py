"""A real broker over HTTP, and what has reached it: what all tests of frameworks end with."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from broker_adapter.http import HttpBroker
from tests.broker_adapter.servers import served
from tests.frameworks.reached import Reached
from tests.outbox.shop_fixtures import mysql_shop, shop, sqlite_shop
from tests.outbox_testing.guide import write_files

__all__ = ["mysql_shop", "shop", "sqlite_shop"]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker that serves HTTP; one for all tests, so each has a group or topics of its own."""
    with served(tmp_path_factory.mktemp("broker")) as server:
        yield server.url


@pytest.fixture
def topic() -> str:
    """A topic of the test's own."""
    return f"t.{uuid.uuid4().hex}"


@pytest.fixture
def reached(broker_url: str) -> Iterator[Reached]:
    """What reaches the broker from now on."""
    broker = HttpBroker(broker_url)
    yield Reached(broker)
    broker.close()


@pytest.fixture
def guide_files(tmp_path: Path) -> Path:
    """A folder with the files of the guide."""
    folder = tmp_path / "guide"
    folder.mkdir()
    write_files(GUIDE, folder)
    return folder


@pytest.fixture
def guide(guide_files: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of the guide anew, under a name that nobody else has."""
    with ExitStack() as stack:

        def load(name: str) -> ModuleType:
            unique = f"{name}_{uuid.uuid4().hex}"
            spec = importlib.util.spec_from_file_location(unique, guide_files / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[unique] = module
            stack.callback(sys.modules.pop, unique)
            spec.loader.exec_module(module)
            return module

        yield load
