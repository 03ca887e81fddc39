"""The wheel, installed into an environment of its own beside a project whose modules have common names."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "outbox", "outbox_core", "outbox_broker", "outbox_demo", "compensator", "broker_adapter", "spark_reconcile",
    "outbox_operator"
}  # fmt: skip
FILES = {
    "messaging/__init__.py": 'CHANNEL = "the shop\'s own"\n',
    "broker.py": 'NAME = "the shop\'s own"\n',
    "migrations/__init__.py": "",
    "migrations/env.py": """
        from alembic import context
        from sqlalchemy import create_engine

        from shop import Base

        with create_engine(context.config.get_main_option("sqlalchemy.url")).connect() as connection:
            context.configure(connection=connection, target_metadata=Base.metadata)
            with context.begin_transaction():
                context.run_migrations()
    """,
    "migrations/script.py.mako": """
        revision = ${repr(up_revision)}
        down_revision = ${repr(down_revision)}
        def upgrade():
            ${upgrades if upgrades else "pass"}
    """,
    "migrations/versions/0001_payment.py": """
        import sqlalchemy as sa
        from alembic import op

        revision = "0001"
        down_revision = None

        def upgrade():
            op.create_table("payment", sa.Column("order_id", sa.Integer, primary_key=True))
    """,
    "alembic.ini": """
        [alembic]
        script_location = migrations
        prepend_sys_path = .
        sqlalchemy.url = sqlite:///shop.db
    """,
    "shop.py": """
        import broker
        import messaging
        from sqlalchemy import create_engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

        from outbox import Outbox

        class Base(DeclarativeBase):
            pass

        class Payment(Base):
            __tablename__ = "payment"
            order_id: Mapped[int] = mapped_column(primary_key=True)

        engine = create_engine("sqlite:///shop.db")
        box = Outbox(engine, broker="http://127.0.0.1:9")

        @box.transactional
        def pay(session: Session, order_id: int) -> None:
            session.add(Payment(order_id=order_id))
            box.publish("payment.completed", {"by": broker.NAME, "on": messaging.CHANNEL}, key=str(order_id))
    """,
    "tests/__init__.py": "",
    "tests/test_pay.py": """
        import shop

        def test_a_payment_is_published(published):
            shop.pay(1)

            assert published.one("payment.completed").body == {"by": "the shop's own", "on": "the shop's own"}
    """,
    "typed.py": """
        from datetime import UTC, datetime, timedelta

        from sqlalchemy.orm import Session

        from outbox import Delivery, Message, Outbox, Propagation, connect, consumer, run_consumers

        box = Outbox("sqlite:///shop.db", broker="http://127.0.0.1:9")

        @box.transactional
        def pay(session: Session, order_id: int, /, *, note: str = "") -> int:
            box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))
            box.publish("reminder", note, deliver_at=datetime.now(UTC) + timedelta(days=1))
            return order_id

        @box.transactional(propagation=Propagation.NESTED)
        def refund(session: Session, order_id: int) -> None:
            box.publish("payment.refunded", {"order_id": order_id})

        @consumer("payment.completed", group="ticketing", inbox="sqlite:///shop.db")
        def issue(session: Session, delivery: Delivery) -> None:
            print(delivery.id, delivery.json())

        paid: int = pay(1, note="soon")
        refund(paid)
        broker = connect("memory://typed")
        broker.publish([Message(id="1", topic="payment.completed", body=b"{}")])
        broker.close()
        run_consumers([issue], broker="memory://typed")
    """,
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is."""
    folder = tmp_path_factory.mktemp("wheel")
    _run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], cwd=ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with what it depends on out of the tests' own."""
    folder = tmp_path_factory.mktemp("environment")
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    # Links of editable installs in that folder are not followed: only those of a site's own folder are.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A shop with modules of its own called messaging, broker, migrations and tests."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip())
    return tmp_path


@pytest.mark.processes
def test_the_wheel_has_our_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}

    assert {one for one in tops if not one.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert "outbox/migrations/versions/0001_tables.py" in names


@pytest.mark.processes
def test_it_works_beside_a_project_with_modules_of_common_names(python: Path, project: Path) -> None:
    alembic = [str(python), "-m", "alembic"]
    where = "import outbox, outbox_core, outbox_broker; print(outbox.__file__)"
    upgrade = "from outbox.migrate import upgrade; upgrade('sqlite:///shop.db')"

    imported = _run([str(python), "-c", where], cwd=project)
    _run([*alembic, "upgrade", "head"], cwd=project)
    _run([str(python), "-c", upgrade], cwd=project)
    compared = _run([*alembic, "check"], cwd=project)
    tested = _run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], cwd=project)

    assert str(python.parents[1]) in imported
    assert "No new upgrade operations detected" in compared
    assert "1 passed" in tested


@pytest.mark.processes
@pytest.mark.slow
def test_a_users_program_is_checked_strictly_against_it(python: Path, project: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", "cache"]

    assert "Success" in _run([*mypy, "typed.py"], cwd=project)


@pytest.mark.processes
@pytest.mark.slow
def test_the_types_of_all_that_packages_export_are_complete(python: Path, project: Path) -> None:
    known: dict[str, bool] = {}
    for package in [one for one in sorted(PACKAGES) if any(exported(one))]:
        report = types_of(package, python, project)
        known |= {one["name"]: one["isTypeKnown"] for one in report["symbols"] if one["isExported"]}
        if package == "outbox":
            assert report["completenessScore"] == 1

    assert [name for package in sorted(PACKAGES) for name in exported(package) if not known.get(name)] == []


def types_of(package: str, python: Path, project: Path) -> dict[str, Any]:
    """What pyright knows of the types of a package of the wheel."""
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    # In this mode it asks the interpreter that is first on the PATH.
    environment = {**_environment(), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    report: dict[str, Any] = json.loads(done.stdout)["typeCompleteness"]
    assert str(python.parents[1]) in report["packageRootDirectory"]
    return report


def exported(package: str) -> Iterator[str]:
    """The full names of what `__all__` names in this package and those inside it, where it is defined."""
    for init in sorted((ROOT / package).rglob("__init__.py")):
        front = importlib.import_module(".".join(init.parent.relative_to(ROOT).parts))
        for name in getattr(front, "__all__", ()):
            found = getattr(front, name)
            home = found.__module__ if isinstance(found, FunctionType | type) else front.__name__
            yield f"{home}.{name}"


def _environment() -> dict[str, str]:
    # Without the PYTHONPATH by which Spark's tests, in the same process before, let its workers find this checkout.
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _run(command: list[str], *, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
