"""The checks of `outbox doctor`: whether database, tables, rights, clock, compensator and broker are as they should be.

Each check has a time limit, says one line and, where something is wrong, the cure. None of them writes.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from sqlalchemy import ClauseElement, Connection, Engine, Table, delete, false, insert, select, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from outbox.admin.grants import DatabaseRole, table_privileges
from outbox.admin.source_owners import read_sharing
from outbox.migrate import schema_upgrade
from outbox.store.bounded_counts import OVERDUE_SECONDS
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.databases.database_port import Failure
from outbox.store.databases.supported import database_of, failure_of
from outbox.store.message_table import MessageStore
from outbox.store.schema import message_table_names
from outbox.store.table_placement import table_namespace, tables_missing
from outbox_core.common.errors import OutboxError
from outbox_core.messages.broker_port import Broker, Inspectable, Inspection

CLOCK_SKEW_MS_MAX: Final = 1_000
"""The difference of two clocks that the reconciliation forgives by default."""
COUNTED_ROWS_MAX: Final = 10_000
_PUBLISH: Final = "publish"
"""The role at our broker that an outbox needs."""


class Status(StrEnum):
    """What became of a check. Only `fail` needs somebody to act at once."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check: what was found, and the cure where that is not well."""

    check: str
    status: Status
    says: str
    cure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is checked. `open_broker` is called by its check; None: no broker was named."""

    url: URL
    schema: str | None
    role: DatabaseRole
    open_broker: Callable[[], Broker] | None


def run_checks(target: Target, *, timeout_s: float) -> Iterator[CheckResult]:
    """Yields the result of each check when it is over; `timeout_s`: how long each may take, seconds.

    Without a database the checks on it are left out. A check that takes longer fails, and goes on behind: the process
    need not wait for it.
    """
    yield _versions()
    [reached] = _within("database", lambda: [_database(target)], timeout_s=timeout_s)
    yield reached
    if reached.status is not Status.FAIL:
        on_database: dict[str, Callable[[Connection, Target], CheckResult]] = {
            "tables": _tables, "rights": _rights, "database clock": _clock, "compensator": _compensator,
        }  # fmt: skip
        for name, check in on_database.items():
            yield from _within(name, partial(_on, target, check), timeout_s=timeout_s)
    open_broker = target.open_broker
    if open_broker is not None:
        yield from _within("broker", lambda: _broker(open_broker), timeout_s=timeout_s)


def _within(name: str, check: Callable[[], Iterable[CheckResult]], *, timeout_s: float) -> Sequence[CheckResult]:
    """Runs a check in a thread of its own, since no driver bounds all that it waits for: names, connects, answers."""
    results: list[CheckResult] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.extend(check())
        except OutboxError as error:
            results.append(CheckResult(check=name, status=Status.FAIL, says=str(error)))  # which names the cure
        except Exception as error:  # noqa: BLE001 - the thread boundary: whatever ends a check is its result
            says = f"{type(error).__name__}: {error}"
            results.append(CheckResult(check=name, status=Status.FAIL, says=says, cure="look at its URL and options"))
        finally:
            done.set()

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    if done.wait(timeout_s):
        return results
    cure = "see whether its server hangs, or say a longer --timeout-s"
    return [CheckResult(check=name, status=Status.FAIL, says=f"no answer in {timeout_s:g} s", cure=cure)]


def _on(target: Target, check: Callable[[Connection, Target], CheckResult]) -> Iterator[CheckResult]:
    with _connected(target) as (_engine, connection):
        yield check(connection, target)


@contextmanager
def _connected(target: Target) -> Iterator[tuple[Engine, Connection]]:
    """A connection of its own for one check: the one before may still wait for its answer."""
    engine = open_engine(target.url)
    background = background_engine(engine)
    try:
        with database_errors(engine.url), background.connect() as connection:
            yield engine, connection
    finally:
        background.dispose()
        engine.dispose()


def _versions() -> CheckResult:
    versions = ", ".join(f"{name} {version(name)}" for name in ("outbox-mq", "SQLAlchemy"))
    return CheckResult(check="versions", status=Status.OK, says=f"{versions}, Python {platform.python_version()}")


def _database(target: Target) -> CheckResult:
    file = target.url.database
    is_file = target.url.get_backend_name() == "sqlite" and file and not file.startswith((":memory:", "file:"))
    if file and is_file and not Path(file).exists():  # connecting would make it
        cure = "outbox db upgrade --url URL makes it"
        return CheckResult(check="database", status=Status.FAIL, says=f"there is no file {file}", cure=cure)
    started = time.monotonic()
    with _connected(target) as (engine, connection):
        name = engine.dialect.name
        product = ".".join(map(str, connection.dialect.server_version_info or ()))
    spent_ms = (time.monotonic() - started) * 1_000
    return CheckResult(
        check="database", status=Status.OK, says=f"{name} {product} answers, connected in {spent_ms:.0f} ms"
    )


def _tables(connection: Connection, target: Target) -> CheckResult:
    namespace = table_namespace(connection.dialect, target.schema)
    names = message_table_names(connection, namespace)
    if not names:
        raise tables_missing(connection, target.schema)
    revision, newest = schema_upgrade.current(connection, schema=target.schema), schema_upgrade.head()
    says = f"{len(names):,} message table(s) at revision {revision or 'none'}"
    if revision == newest:
        return CheckResult(check="tables", status=Status.OK, says=says)
    cure = f"the newest is {newest}: outbox db upgrade --url URL, or the newest release"
    return CheckResult(check="tables", status=Status.FAIL, says=says, cure=cure)


def _rights(connection: Connection, target: Target) -> CheckResult:
    database = database_of(connection.dialect)
    if not database.has_schemas:
        return CheckResult(check="rights", status=Status.OK, says="the database has no users")
    lacking = [
        f"{privilege} on {table.fullname}"
        for table, privileges in table_privileges(connection, target.role, schema=target.schema)
        for privilege in privileges
        if not _may(connection, privilege, table)
    ]
    if not lacking:
        return CheckResult(check="rights", status=Status.OK, says=f"this user has what the role {target.role} needs")
    cure = f"outbox db grants --role {target.role} --url URL prints what to grant"
    return CheckResult(check="rights", status=Status.FAIL, says=f"it lacks {', '.join(lacking)}", cure=cure)


def _may(connection: Connection, privilege: str, table: Table) -> bool:
    """Returns whether this user may. EXPLAIN asks for the privileges of a statement, and does not run it."""
    columns = list(table.columns)
    statements: dict[str, ClauseElement] = {
        "SELECT": select(*columns).where(false()),
        "INSERT": insert(table).from_select(columns, select(*columns).where(false())),
        "UPDATE": update(table).where(false()).values({columns[-1]: columns[-1]}),
        "DELETE": delete(table).where(false()),
    }
    compiled = statements[privilege].compile(connection.engine, compile_kwargs={"literal_binds": True})
    try:
        connection.exec_driver_sql(f"EXPLAIN {compiled}").close()
    except DBAPIError as error:
        if failure_of(error.orig) is not Failure.PRIVILEGE_MISSING:
            raise
        return False
    finally:
        connection.rollback()
    return True


def _clock(connection: Connection, _target: Target) -> CheckResult:
    now_us = database_of(connection.dialect).now_us()
    connection.execute(select(now_us)).scalar_one()  # the first statement waits for what a connection does once
    before_us = time.time_ns() // 1_000
    theirs_us = int(connection.execute(select(now_us)).scalar_one())
    after_us = time.time_ns() // 1_000
    told_by = "due times and leases are by the database's clock"
    return _skew("database clock", theirs_us, before_us=before_us, after_us=after_us, told_by=told_by)


def _skew(check: str, theirs_us: int, *, before_us: int, after_us: int, told_by: str) -> CheckResult:
    """`before_us`, `after_us`: our clock before the question and after the answer."""
    # Somewhere between the two looks at our clock: only what is beyond them is a difference.
    beyond_ms = max(before_us - theirs_us, theirs_us - after_us, 0) / 1_000
    says = f"differs from this machine's by {beyond_ms:,.0f} ms or a little more"
    if beyond_ms <= CLOCK_SKEW_MS_MAX:
        return CheckResult(check=check, status=Status.OK, says=says)
    cure = f"synchronise both machines' clocks (NTP): {told_by}"
    return CheckResult(check=check, status=Status.WARN, says=says, cure=cure)


def _compensator(connection: Connection, target: Target) -> CheckResult:
    """By its leases where it uses them, and else by what waits: a compensator alone on a database writes nothing."""
    sharing = read_sharing(connection, dialect=connection.dialect, schema=target.schema)
    names = message_table_names(connection, table_namespace(connection.dialect, target.schema))
    ages = [
        MessageStore(dialect=connection.dialect, schema=target.schema, table=name)
        .backlog(connection, rows_max=COUNTED_ROWS_MAX)
        .oldest_due_age_us
        for name in names
    ]
    overdue_s = max(ages, default=0) / 1_000_000
    living = 0 if sharing is None else len(sharing.instances)
    says = f"{living:,} live by leases; the oldest due message waits for {overdue_s:,.1f} s"
    if overdue_s > OVERDUE_SECONDS:
        cure = "outbox compensator run --url URL --broker URL; why a message waits: outbox messages list"
        return CheckResult(check="compensator", status=Status.FAIL, says=says, cure=cure)
    if sharing is not None and (not living or sharing.unserved):
        cure = f"{len(sharing.unserved):,} source(s) without a live compensator: start one, or wait for a lease"
        return CheckResult(check="compensator", status=Status.FAIL, says=says, cure=cure)
    return CheckResult(check="compensator", status=Status.OK, says=says)


def _broker(open_broker: Callable[[], Broker]) -> Iterator[CheckResult]:
    broker = open_broker()
    try:
        if not isinstance(broker, Inspectable):
            says = "its adapter cannot inspect a server"
            yield CheckResult(check="broker", status=Status.WARN, says=says, cure="publish a message to try it")
            return
        before_us = time.time_ns() // 1_000
        found = broker.inspect()
        after_us = time.time_ns() // 1_000
    finally:
        broker.close()
    yield _inspected(found)
    if found.now_ms is not None:  # a whole millisecond: it may have been almost the next one
        theirs_us = min(max(found.now_ms * 1_000, before_us), found.now_ms * 1_000 + 999)
        told_by = "what is scheduled falls due by the broker's clock"
        yield _skew("broker clock", theirs_us, before_us=before_us, after_us=after_us, told_by=told_by)


def _inspected(found: Inspection) -> CheckResult:
    """The worst first: a promise that it breaks, a publish that it refuses, what only may be so."""
    ours = version("outbox-mq")
    says = f"{found.product} {found.version}".rstrip() + " answers, and can serve"
    if found.weaknesses:
        says, cure = f"{says}; it is set weaker than promised", "; ".join(map(str, found.weaknesses))
        return CheckResult(check="broker", status=Status.FAIL, says=says, cure=cure)
    if found.roles and _PUBLISH not in found.roles:
        says, cure = f"{says}; the token has no role {_PUBLISH}, but {', '.join(found.roles)}", "an outbox needs it"
        return CheckResult(check="broker", status=Status.FAIL, says=says, cure=cure)
    if found.roles == ():
        says = f"{says}; it asks for a token, and none was given: whether the outbox may publish is not known"
        return CheckResult(
            check="broker", status=Status.WARN, says=says, cure="say --token-file, with the outbox's token"
        )
    if found.product == "outbox-mq" and found.version and found.version != ours:
        says, cure = f"{says}; this client is {ours}", "run one release on both sides"
        return CheckResult(check="broker", status=Status.WARN, says=says, cure=cure)
    return CheckResult(check="broker", status=Status.OK, says=says)
