"""What the fork server promises the tests that start programs by it: each is a process of its own, to its end."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path

from tests.fixtures.fork_server import fork_server

MODULE = "tests.house.forked_program"
SECONDS_MAX = 120


def test_a_program_has_its_own_arguments_environment_folder_streams_and_exit_code(tmp_path: Path) -> None:
    ended = fork_server().run(MODULE, "exit", cwd=tmp_path, env={"COLOUR": "blue"})

    assert ended.stdout == f"{tmp_path} {{'COLOUR': 'blue'}} ['exit']\n"
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_program_that_gives_up_says_so_as_an_interpreter_does() -> None:
    ended = fork_server().run(MODULE, "complain")

    assert (ended.returncode, ended.stderr) == (1, "no such luck\n")


def test_a_program_is_killed_by_its_id_and_waited_for() -> None:
    program = fork_server().start(MODULE, "wait", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with closing(program):
        assert program.stdout is not None
        program.stdout.readline()
        assert program.poll() is None

        os.kill(program.pid, signal.SIGKILL)

        assert program.wait(SECONDS_MAX) == -signal.SIGKILL
        assert program.stdout.read() == b""
        program.send_signal(signal.SIGTERM)


def test_a_program_whose_starter_closes_it_ends() -> None:
    program = fork_server().start(MODULE, "wait", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    program.close()

    assert program.returncode == -signal.SIGKILL
