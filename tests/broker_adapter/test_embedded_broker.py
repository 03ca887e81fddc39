"""The embedded broker where its process forks: the child has no part in the folder, and does no harm to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from tests.fixtures.forks import FORK_IDS

FORKS_ARE_MEANT = "ignore:This process:DeprecationWarning"  # of Python 3.12 and later, where there are threads
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 300

FORKING = """
import os, sys
from outbox_core import GroupConfig, Message, connect
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.forks import FORK_IDS, FORKS


def publish(name):
    return broker.publish([Message(id=name, topic="t", body=name.encode())])[0].status


def tell(what, call):
    try:
        print(what, call(), flush=True)
    except ConfigurationError as error:
        print(what, "refused:", str(error).partition(" on ")[0].rpartition("/")[2], flush=True)


broker = connect(f"embedded:{sys.argv[1]}")
admin = broker.admin
publish("before")
child = dict(zip(FORK_IDS, FORKS))[sys.argv[2]].values[0]()
if not child:
    tell("publish", lambda: publish("childs"))
    tell("declare", lambda: admin.declare_group("t", "childs", GroupConfig()))
    tell("connect", lambda: connect(f"embedded:{sys.argv[1]}").pull("t", "g"))
    broker.close()
    os._exit(0)
os.waitpid(child, 0)
publish("behind")
print(os.getpid(), admin.figures("t")["stored"])
"""


@pytest.mark.processes
@pytest.mark.parametrize("fork", FORK_IDS)
def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path, fork: str) -> None:
    lines = run(FORKING, tmp_path / "data", fork=fork).splitlines()
    process, stored = lines[-1].split()
    refused = f"refused: data is in use by process {process}"

    assert lines[:-1] == [f"publish {refused}", f"declare {refused}", f"connect {refused}"]
    assert stored == "2"
    broker = EmbeddedBroker(f"embedded:{tmp_path / 'data'}")
    assert [one.body for one in broker.pull("t", "g")] == [b"before", b"behind"]
    broker.close()


OUTLIVED = """
import os, sys
from outbox_core import Message, connect
from tests.fixtures.forks import FORK_IDS, FORKS

folder, living = sys.argv[1], os.pipe()
broker = connect(f"embedded:{folder}")
broker.publish([Message(id="1", topic="t", body=b"1")])
child = dict(zip(FORK_IDS, FORKS))[sys.argv[2]].values[0]()
if not child:
    os.close(living[1])
    os.read(living[0], 1)  # to the end of the parent
    os._exit(0)
broker.close()
broker = connect(f"embedded:{folder}")
broker.publish([Message(id="2", topic="t", body=b"2")])
print([one.body for one in broker.pull("t", "g")], os.waitpid(child, os.WNOHANG)[0])
"""


@pytest.mark.processes
@pytest.mark.parametrize("fork", FORK_IDS)
def test_a_child_that_lives_on_does_not_keep_the_folder_locked(tmp_path: Path, fork: str) -> None:
    assert run(OUTLIVED, tmp_path / "data", fork=fork) == "[b'1', b'2'] 0\n"


def run(program: str, folder: Path, *, fork: str) -> str:
    """What the program prints, which forks in this way."""
    done = subprocess.run(
        [sys.executable, "-W", FORKS_ARE_MEANT, "-c", program, str(folder), fork],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
