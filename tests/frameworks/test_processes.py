"""Several processes: gunicorn's prefork, Celery's, multiprocessing's fork and spawn, and how a process ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import requests
from sqlalchemy import insert

from outbox import Outbox, SenderLimits
from tests.fixtures.fork_server import environment, fork_server
from tests.frameworks.reached import Reached
from tests.outbox.shop import Payment, Shop

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TOPIC = "payment.completed"
WAIT_SECONDS = 300
PAYMENTS_MAX = 500
GATHERING = SenderLimits(lease_ms=60_000, lease_margin_ms=1_000, gather_ms=3_000, close_timeout_ms=120_000)
"""The sender's first batch is sent at once, and what comes after it is in the queue when a worker ends."""
LEFT: list[Outbox] = []
ENDING = "tests.frameworks.ending_process"

# The parent has a sender, a queue and connections when its children are made.
USED_BEFORE_THE_FORK = """
@app.after_request
def say_who(response):
    response.headers["Process"] = str(os.getpid())
    return response

assert app.test_client().post('/payments/0').status_code == 201
"""


def body(order_id: int) -> str:
    return f'{{"order_id":{order_id}}}'


def shop_environment(shop: Shop, broker_url: str, **more: str) -> dict[str, str]:
    """What the guide's programs read, and the way to our tables."""
    named = {"DATABASE_URL": shop.database.url, "OUTBOX_BROKER": broker_url, "PYTHONPATH": str(ROOT)}
    return environment(**{**named, "OUTBOX_SCHEMA": shop.database.schema or "outbox", **more})


class Program:
    """A running program whose words are kept, so that a test can wait for some of them."""

    def __init__(self, command: list[str], *, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._said.append(line)
                self._changed.notify_all()
        with self._changed:
            self._said.append("")
            self._changed.notify_all()

    @property
    def said(self) -> str:
        """All its words so far."""
        with self._changed:
            return "".join(self._said)

    def wait_for(self, find: Callable[[str], str | None]) -> str:
        """What is found in its words, once it is there."""
        with self._changed:
            self._changed.wait_for(lambda: find("".join(self._said)) or "" in self._said, WAIT_SECONDS)
        found = find(self.said)
        if found is None:
            raise TimeoutError(f"the program never said it: {self.said}")
        return found

    def end(self) -> int:
        """Ask it to end, as an operator would; its status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._reader.join(WAIT_SECONDS)
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextlib.contextmanager
def running(command: list[str], *, folder: Path, env: dict[str, str]) -> Iterator[Program]:
    """A program for the length of a block; it must end well when it is asked to."""
    program = Program(command, folder=folder, env=env)
    try:
        yield program
    finally:
        status = program.end()
    assert status == 0, program.said


@pytest.mark.slow
def test_gunicorn_forks_after_the_outbox_was_used_and_each_worker_sends_its_own(
    shop: Shop, broker_url: str, reached: Reached, guide_files: Path
) -> None:
    reached.from_now_on(TOPIC)
    with (guide_files / "wsgi.py").open("a") as wsgi:
        wsgi.write(USED_BEFORE_THE_FORK)
    command = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "wsgi:app"]
    paid: list[int] = [0]
    pids: set[str] = set()

    with running(command, folder=guide_files, env=shop_environment(shop, broker_url)) as gunicorn:
        url = gunicorn.wait_for(listening_at)
        while len(paid) < 30 or (len(pids) < 2 and len(paid) < PAYMENTS_MAX):
            answer = requests.post(f"{url}/payments/{len(paid)}", timeout=WAIT_SECONDS)
            assert answer.status_code == 201
            pids.add(answer.headers["Process"])
            declined = requests.post(f"{url}/payments/{1000 + len(paid)}?declined=yes", timeout=WAIT_SECONDS)
            assert declined.status_code == 402
            paid.append(len(paid))

    assert len(pids) == 2
    assert sorted(reached.bodies(TOPIC)) == sorted(body(number) for number in paid)
    assert shop.payments() == paid
    assert "Traceback" not in gunicorn.said


def listening_at(said: str) -> str | None:
    """Where gunicorn listens, once its two workers run."""
    if said.count("Booting worker with pid") < 2:
        return None
    return said.partition("Listening at: ")[2].split()[0]


@pytest.mark.slow
def test_celerys_prefork_workers_send_what_tasks_commit(
    shop: Shop, broker_url: str, reached: Reached, guide_files: Path
) -> None:
    reached.from_now_on(TOPIC)
    queue = guide_files / "queue"
    queue.mkdir()
    (guide_files / "celeryconfig.py").write_text(
        f"broker_transport_options = {{'data_folder_in': {str(queue)!r}, 'data_folder_out': {str(queue)!r}}}\n"
    )
    # Used in the worker's parent, before it forks.
    with (guide_files / "celery_app.py").open("a") as app:
        app.write("app.config_from_object('celeryconfig')\nimport sys\nif 'worker' in sys.argv: charge(0, False)\n")
    env = shop_environment(shop, broker_url, CELERY_BROKER_URL="filesystem://")
    worker = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "--concurrency=2", "--pool=prefork"]
    worker += ["--loglevel=info", "--without-gossip", "--without-mingle", "--without-heartbeat"]

    subprocess.run(
        [sys.executable, "-c", "from celery_app import pay\nfor n in range(1, 11): pay.delay(n, declined=n % 5 == 0)"],
        cwd=guide_files, env=env, check=True, timeout=WAIT_SECONDS,
    )  # fmt: skip
    with running(worker, folder=guide_files, env=env) as celery:
        celery.wait_for(lambda said: "done" if said.count("succeeded in") + said.count("declined')") >= 10 else None)

    paid = [number for number in range(11) if number % 5 or number == 0]
    assert sorted(reached.bodies(TOPIC)) == sorted(body(number) for number in paid)
    assert shop.payments() == paid


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_send_their_own_commits_and_the_parent_its_own(
    shop: Shop, broker_url: str, reached: Reached, topic: str, method: str
) -> None:
    context = multiprocessing.get_context(method)
    box = shop.box(broker_url)
    pay(box, topic, 0)

    workers = [start(context, shop, box, broker_url, topic, first) for first in (10, 20)]
    pay(box, topic, 1)
    for worker in workers:
        worker.join(WAIT_SECONDS)

    assert [worker.exitcode for worker in workers] == [0, 0]
    assert box.close()
    expected = [0, 1, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert sorted(reached.bodies(topic), key=int) == [str(number) for number in expected]
    assert shop.payments() == expected
    assert shop.rows() == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_that_ends_without_close_sends_what_is_queued(
    shop: Shop, broker_url: str, reached: Reached, topic: str, method: str
) -> None:
    context = multiprocessing.get_context(method)
    box = shop.box(broker_url, sender=GATHERING)
    pay(box, topic, 0)

    worker = start(context, shop, box, broker_url, topic, 10, ends=leave)
    worker.join(WAIT_SECONDS)
    assert box.close()

    assert worker.exitcode == 0
    assert sorted(reached.bodies(topic), key=int) == ["0", "10", "11", "12", "13", "14"]
    assert shop.rows() == []


def start(
    context: BaseContext,
    shop: Shop,
    box: Outbox,
    broker_url: str,
    topic: str,
    first: int,
    *,
    ends: Callable[[Outbox], None] | None = None,
) -> multiprocessing.Process:
    """A worker that pays five times: forked, with the parent's Outbox; spawned, with one of its own."""
    target: Callable[..., None]
    ends = ends or close
    if context.get_start_method() == "fork":
        target, arguments = work_forked, (shop, box, topic, first, ends)
    else:
        target, arguments = work_spawned, (shop.database.url, shop.database.schema, broker_url, topic, first, ends)
    process: multiprocessing.Process = context.Process(target=target, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process


def work_forked(shop: Shop, box: Outbox, topic: str, first: int, ends: Callable[[Outbox], None]) -> None:
    shop.engine.dispose(close=False)
    work(box, topic, first, ends=ends)


def work_spawned(
    url: str, schema: str | None, broker_url: str, topic: str, first: int, ends: Callable[[Outbox], None]
) -> None:
    work(Outbox(url, broker=broker_url, schema=schema, sender=GATHERING), topic, first, ends=ends)


def work(box: Outbox, topic: str, first: int, *, ends: Callable[[Outbox], None]) -> None:
    for number in range(first, first + 5):
        pay(box, topic, number)
    ends(box)


def close(box: Outbox) -> None:
    """What the guide says, with a deadline that a loaded machine keeps."""
    if not box.close(timeout_ms=WAIT_SECONDS * 1_000):
        raise RuntimeError("the sender was not done")


def leave(box: Outbox) -> None:
    """What happens: somebody keeps the Outbox, and nobody closes it."""
    LEFT.append(box)


def pay(box: Outbox, topic: str, number: int) -> None:
    @box.transactional
    def charge(session: object) -> None:
        session.execute(insert(Payment).values(id=number, note=""))  # type: ignore[attr-defined]
        box.publish(topic, str(number))

    charge()


@pytest.mark.parametrize(("how", "status"), [("close", 0), ("exit", 0), ("raise", 3)])
def test_a_process_sends_what_is_queued_as_it_ends(
    shop: Shop, broker_url: str, reached: Reached, topic: str, how: str, status: int
) -> None:
    done = fork_server().run(ENDING, *arguments(shop, broker_url, topic), how, env=shop_environment(shop, broker_url))

    assert (done.returncode, done.stderr) == (status, "")
    assert reached.bodies(topic) == [str(number) for number in range(20)]
    assert shop.rows() == []


def test_a_process_whose_broker_is_mute_ends_at_its_deadline_and_leaves_the_rows(
    shop: Shop, reached: Reached, topic: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        done = fork_server().run(ENDING, *arguments(shop, url, topic), "mute", env=shop_environment(shop, url))

    assert (done.returncode, done.stderr) == (0, "")
    assert len(shop.rows()) == 20
    assert shop.payments() == list(range(20))
    shop.end_leases()
    assert shop.scan(reached.broker).run().accepted == 20
    assert sorted(reached.bodies(topic), key=int) == [str(number) for number in range(20)]


HOOKED_BEFORE = """
import sys
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

def raises(session):
    raise LookupError

event.listen(Session, "after_commit", raises)  # before anything of ours listens
from outbox import Outbox, SenderLimits
url, schema, broker, topic = sys.argv[1:]
box = Outbox(url, broker=broker, schema=schema or None)
with Session(box.engine) as session:
    session.begin()
    box.publish(topic, "1", session=session)
    try:
        session.commit()
    except LookupError:
        sys.exit(0 if box.close(timeout_ms=120_000) else 2)
"""


def test_a_hook_set_before_the_first_outbox_that_raises_keeps_nothing_from_the_broker(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOKED_BEFORE, *arguments(shop, broker_url, topic)],
        cwd=ROOT, env=shop_environment(shop, broker_url), capture_output=True, text=True, timeout=WAIT_SECONDS,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert reached.bodies(topic) == ["1"]
    assert shop.rows() == []


def arguments(shop: Shop, broker_url: str, topic: str) -> list[str]:
    """Of a program that pays in a process of its own."""
    return [shop.database.url, shop.database.schema or "", broker_url, topic]
