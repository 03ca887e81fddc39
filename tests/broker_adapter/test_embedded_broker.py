"""The embedded broker where its process forks: the child has no part in the folder, and does no harm to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker

FORKS_ARE_MEANT = "ignore:This process:DeprecationWarning"  # of Python 3.12 and later, where there are threads
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 300

FORKING = """
import os, sys
from outbox_core import GroupConfig, Message, connect
from outbox_core.common.errors import ConfigurationError


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
child = os.fork()
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
def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    lines = run(FORKING, tmp_path / "data").splitlines()
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

folder, living = sys.argv[1], os.pipe()
broker = connect(f"embedded:{folder}")
broker.publish([Message(id="1", topic="t", body=b"1")])
child = os.fork()
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
def test_a_child_that_lives_on_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    assert run(OUTLIVED, tmp_path / "data") == "[b'1', b'2'] 0\n"


def run(program: str, folder: Path) -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, "-W", FORKS_ARE_MEANT, "-c", program, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
