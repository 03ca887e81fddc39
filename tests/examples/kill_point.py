"""Runs a program that is killed, with its whole process group, when it first comes to a moment. Not imported.

Arguments: `MOMENT PROGRAM ARGUMENT...`: the program is a file or a module. MOMENT is an event of SQLAlchemy's
sessions, `after_task_publish` of Celery, or `none`. At `failed_commit` it is not killed, but its first commit fails.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.orm import Session


def die(*_: object, **__: object) -> None:
    """As kill -9 would, on every process of the group."""
    os.killpg(0, signal.SIGKILL)


def fail(_: Session) -> None:
    """As a deadlock would."""
    raise RuntimeError("the first commit fails")


def main() -> None:
    """Arm the moment, and become the program."""
    _, moment, program, *arguments = sys.argv
    if moment == "after_task_publish":
        from celery.signals import after_task_publish

        after_task_publish.connect(die, weak=False)
    elif moment == "failed_commit":
        event.listen(Session, "before_commit", fail, once=True)
    elif moment != "none":
        event.listen(Session, moment, die)
    sys.argv = [program, *arguments]
    if Path(program).is_file():
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


main()
