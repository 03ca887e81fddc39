"""A program that publishes, forks, publishes in parent and child at the same time, and in the parent once more.

Tests run it beside themselves: what goes wrong in a fork ends this program, and not them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.fixtures.forks import FORKS

ROOT: Final = Path(__file__).parents[3]
CHILD_SECONDS_MAX: Final = 120
PROGRAM_SECONDS_MAX: Final = 300
BEFORE: Final = ["before"]
IN_PARENT: Final = [f"parent-{number}" for number in range(20)]
IN_CHILD: Final = [f"child-{number}" for number in range(20)]
BEHIND: Final = ["behind"]
PUBLISHED: Final = sorted(BEFORE + IN_PARENT + IN_CHILD + BEHIND)
"""The bodies of all messages that the program publishes."""


def publish_across_fork(url: str, topic: str, *, fork: str) -> None:
    """Run the program; `fork` is the id of one of FORKS. Raises AssertionError unless it did all that it is to do."""
    arguments = [sys.executable, "-m", "tests.broker_adapter.publishing.forking_program", url, topic, fork]
    done = subprocess.run(arguments, cwd=ROOT, timeout=PROGRAM_SECONDS_MAX, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _main(url: str, topic: str, fork: str) -> int:
    broker = connect(url)

    def publish(names: list[str]) -> None:
        for name in names:
            [result] = broker.publish([Message(id=f"{topic[-8:]}-{name}", topic=topic, body=name.encode())])
            assert result.status is PublishStatus.STORED, result

    publish(BEFORE)
    [fork_now] = [one.values[0] for one in FORKS if one.id == fork]
    child = fork_now()
    if child == 0:
        signal.alarm(CHILD_SECONDS_MAX)  # which ends a child that waits for a lock or thread of its parent's for ever
        try:
            publish(IN_CHILD)
            broker.close()
        except BaseException as error:
            os.write(2, f"the child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    publish(IN_PARENT)
    _, status = os.waitpid(child, 0)
    publish(BEHIND)
    broker.close()
    if status:
        sys.stderr.write(f"the child ended by {os.waitstatus_to_exitcode(status)}\n")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
