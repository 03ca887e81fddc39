"""A seeded model of transactions: random programs, each run with messages and as plain SQLAlchemy, held to one oracle.

This is its command: it runs programs by seed, and shows those that fail, shrunk. Begin to read at steps.py, which says
what a program may do, and at oracle.py, which says what must hold afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.fixtures.local_server import Durability, scratch_folder
from tests.fixtures.servers import local_server
from tests.outbox.transaction_model.generator import Kind, generate
from tests.outbox.transaction_model.laboratory import Failed, Laboratory, kind_of, open_laboratory
from tests.outbox.transaction_model.shrinker import shrink
from tests.outbox.transaction_model.steps import Program

BATCH = 500
"""So many programs are delivered at once: a sender may wait three seconds for what the compensator has to send."""
DATABASES = ("sqlite", "mariadb", "mysql", "async", "async-mariadb", "async-mysql")


def main() -> int:
    """Run what the command line says; returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="tests.outbox.transaction_model", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--programs", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next has the next seed")
    parser.add_argument("--minimise", action="store_true", help="shrink what fails")
    parser.add_argument("--failures", type=int, default=10, help="how many to show at most")
    options = parser.parse_args()
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # connections that were killed cannot be reset
    logging.getLogger("outbox").setLevel(logging.CRITICAL)
    name = options.database.removeprefix("async-")
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=scratch_folder(), prefix="model-")))
        server = closing.enter_context(local_server(name, Durability.NONE)) if name in {"mariadb", "mysql"} else None
        lab = closing.enter_context(open_laboratory(options.database, folder, server=server))
        return _run(lab, kind_of(options.database), options)


def _run(lab: Laboratory, kind: Kind, options: argparse.Namespace) -> int:
    failed: list[int] = []
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.programs)
    for begin in range(0, len(seeds), BATCH):
        programs = [generate(seed, kind) for seed in seeds[begin : begin + BATCH]]
        for index, failure in sorted(lab.check(programs).items()):
            failed.append(programs[index].seed)
            if len(failed) <= options.failures:
                _show(lab, programs[index], failure, minimise=options.minimise)
        gc.unfreeze()  # what programs have frozen, and left
        gc.collect()
        done = begin + len(programs)
        rate = done / (time.monotonic() - began)
        print(f"{done} programs, {len(failed)} failed, {rate:.1f} a second", file=sys.stderr, flush=True)
    print(f"{len(seeds)} programs from seed {options.seed} on {options.database}: {len(failed)} failed {failed[:100]}")
    return 1 if failed else 0


def _show(lab: Laboratory, program: Program, failed: Failed, *, minimise: bool) -> None:
    print(f"seed {program.seed}:", *(f"  {line}" for line in failed.lines(program)), sep="\n", flush=True)
    if not minimise:
        return
    if not lab.check([program]):
        print("  alone it holds", flush=True)
        return
    smaller = shrink(program, lambda candidate: bool(lab.check([candidate])))
    again = lab.check([smaller]).get(0)
    if again is not None:
        print("  shrunk:", *(f"    {line}" for line in again.lines(smaller)), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
