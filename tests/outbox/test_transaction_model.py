"""Random programs of transactions, each beside plain SQLAlchemy: see transaction_model. A minute of them.

Always the same ones, so that a change that breaks one is told from a seed that nobody has tried; `python -m
tests.outbox.transaction_model` tries others.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox import Outbox
from tests.fixtures.databases import Server
from tests.fixtures.servers import MYSQL_LIKE
from tests.outbox.transaction_model.generator import generate
from tests.outbox.transaction_model.laboratory import Failed, Laboratory, kind_of, open_laboratory
from tests.outbox.transaction_model.shrinker import shrink
from tests.outbox.transaction_model.steps import (
    BeginNested,
    Bind,
    Commit,
    OpenSession,
    Pay,
    Program,
    Propagation,
    Read,
    RowWay,
    Step,
    Stranger,
    Transactional,
    WriteRow,
)

FIRST_SEED = 1
PROGRAMS = {"sqlite": 300, "async": 150, "mariadb": 60, "mysql": 60}
BATCH = 50

OpenLaboratory = Callable[[str], Laboratory]


@pytest.fixture
def laboratory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLaboratory]:
    """Opens a laboratory on a kind of database."""
    with contextlib.ExitStack() as closing:

        def open_one(name: str) -> Laboratory:
            server: Server | None = None
            if name in {"mariadb", "mysql"}:
                server = request.getfixturevalue(f"shared_{name}")
            closing.callback(gc.unfreeze)  # what programs freeze
            return closing.enter_context(open_laboratory(name, tmp_path, server=server))

        yield open_one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqlite", *MYSQL_LIKE])  # `async`: by hand
def test_committed_rows_have_exactly_their_messages_whatever_a_program_does(
    laboratory: OpenLaboratory, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="sqlalchemy.pool")  # a connection that was killed cannot be reset
    opened = laboratory(name)
    seeds = range(FIRST_SEED, FIRST_SEED + PROGRAMS[name])
    print(f"seeds: {seeds}")

    failed: list[tuple[Program, Failed]] = []
    for begin in range(0, len(seeds), BATCH):
        programs = [generate(seed, kind_of(name)) for seed in seeds[begin : begin + BATCH]]
        failed += [(programs[index], failure) for index, failure in opened.check(programs).items()]

    assert not failed, "\n".join(
        f"python -m tests.outbox.transaction_model --database {name} --seed {program.seed} --programs 1 --minimise\n"
        + "\n".join(failure.lines(program))
        for program, failure in failed
    )


def test_a_seed_makes_the_same_program_each_time(random_seed: int) -> None:
    kind = kind_of("mariadb")

    programs = [generate(random_seed, kind) for _ in range(2)]

    assert programs[0] == programs[1]
    assert generate(random_seed + 1, kind).steps != programs[0].steps


def test_a_program_that_fails_is_shrunk_to_the_steps_that_make_it_fail() -> None:
    wanted = (BeginNested("s0"), Commit("s0"))
    body: tuple[Step, ...] = (Read("s0"), wanted[1], Read("s0"))
    program = Program(
        seed=1,
        pool_size=1,
        steps=(
            OpenSession("s0", Bind.ENGINE),
            wanted[0],
            Read("s0"),
            Transactional(Propagation.REQUIRED, body),
            Stranger(1),
        ),
    )

    smallest = shrink(program, lambda candidate: set(wanted) <= {*candidate.steps, *_bodies(candidate)})

    assert smallest.steps == wanted


def test_a_row_whose_message_is_lost_is_found(laboratory: OpenLaboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = laboratory("sqlite")
    whole = _program(Pay("s0", 1, RowWay.EXECUTE), Commit("s0"))
    alone = _program(WriteRow("s0", 1, RowWay.EXECUTE), Commit("s0"))

    held = opened.check([whole, alone])
    monkeypatch.setattr(Outbox, "publish", lambda *_, **__: None)
    lost = opened.check([whole, alone])

    assert [failure.wrong for failure in lost.values()] == [
        ["row 1 is committed without its message", "message 1 was committed and is nowhere"]
    ]
    assert held == {}


def _program(*steps: Step) -> Program:
    return Program(seed=1, pool_size=1, steps=(OpenSession("s0", Bind.ENGINE), *steps))


def _bodies(program: Program) -> set[Step]:
    return {step for call in program.steps if isinstance(call, Transactional) for step in call.body}
