"""The broker of `memory:`: what tests may do with it beyond what every broker does, and that nothing of it stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest

from broker_adapter.temporary_broker import TemporaryBroker
from outbox.testing import AdvancingClock
from outbox.testing.memory_broker_port import OutageControl
from outbox_broker.common.engine_options import EngineOptions
from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.common.clock import Clock, ManualClock
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox_core.messages.ids import new_message_id
from tests.fixtures.forks import FORK_IDS

Make = Callable[..., TemporaryBroker]
ROOT = Path(__file__).parents[2]
FORKS_ARE_MEANT = "ignore:This process:DeprecationWarning"  # of Python 3.12 and later, where there are threads
HOUR_MS = 3_600_000
WAIT_SECONDS = 300


def message(topic: str = "t", body: bytes = b"x", *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=new_message_id(), topic=topic, body=body, deliver_at_ms=deliver_at_ms)


def bodies(broker: Broker, topic: str = "t", group: str = "g", *, wait_ms: int = 0) -> list[bytes]:
    deliveries = broker.pull(topic, group, wait_ms=wait_ms)
    broker.ack([one.receipt for one in deliveries])
    return [one.body for one in deliveries]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes brokers, and closes them."""
    with ExitStack() as stack:

        def made(
            url: str = "memory:", *, clock: Clock | None = None, options: EngineOptions | None = None
        ) -> TemporaryBroker:
            broker = TemporaryBroker(url, clock=clock, options=options)
            stack.callback(broker.close)
            return broker

        yield made


def test_its_scheme_leads_to_it_and_a_test_may_control_it(make: Make) -> None:
    broker = connect("memory:")
    broker.close()

    assert isinstance(broker, TemporaryBroker)
    assert isinstance(make(), Broker)
    assert isinstance(broker, OutageControl)


def test_a_scheduled_message_falls_due_when_the_clock_is_put_forward_and_not_before(
    make: Make, clock: ManualClock
) -> None:
    broker = make(clock=clock)
    broker.publish([message(body=b"later", deliver_at_ms=clock.now_ms() + 2 * HOUR_MS), message(body=b"now")])

    early = bodies(broker)
    clock.advance(2 * HOUR_MS - 1)
    still_early = bodies(broker)
    clock.advance(1)

    assert (early, still_early, bodies(broker)) == ([b"now"], [], [b"later"])


def test_putting_the_clock_forward_wakes_every_long_poll(make: Make) -> None:
    clock = AdvancingClock()
    broker = make(clock=clock)
    due_at_ms = clock.now_ms() + 24 * HOUR_MS
    broker.publish([message(body=b"tomorrow", deliver_at_ms=due_at_ms)])
    found: dict[str, list[bytes]] = {}

    def poll(group: str) -> None:
        while not found.get(group):
            found[group] = bodies(broker, group=group, wait_ms=60_000)

    threads = [threading.Thread(target=poll, args=(group,)) for group in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    clock.advance(timedelta(days=1))
    for thread in threads:
        thread.join(WAIT_SECONDS)

    assert found == {group: [b"tomorrow"] for group in ("a", "b", "c")}


def test_time_that_is_put_forward_ends_invisible_times_and_backoffs(make: Make, clock: ManualClock) -> None:
    broker = make(clock=clock)
    broker.admin.declare_group("t", "g", GroupConfig(max_attempts=2, backoff_initial_ms=60_000))
    broker.publish([message()])
    [first] = broker.pull("t", "g")
    broker.nack([first.receipt])

    assert bodies(broker) == []
    clock.advance(60_000)
    [second] = broker.pull("t", "g", invisible_ms=5_000)
    assert second.attempt == 2
    clock.advance(5_000)
    assert bodies(broker) == []

    [letter], _ = broker.admin.dead("t", "g")
    assert (letter.id, letter.attempts) == (first.id, 2)


def test_all_who_name_a_broker_share_it_until_the_last_is_closed(make: Make) -> None:
    name = f"memory://shop-{new_message_id()}"
    one, two = make(name), make(name)
    one.publish([message(body=b"shared"), message(body=b"left")])
    one.close()

    [delivery] = two.pull("t", "g", max_messages=1)
    two.close()

    assert delivery.body == b"shared"
    assert bodies(make(name)) == []


def test_one_that_is_garbage_shares_nothing_more() -> None:
    name = f"memory://shop-{new_message_id()}"
    one = TemporaryBroker(name)
    one.publish([message(body=b"left")])
    del one
    gc.collect()

    two = TemporaryBroker(name)

    assert bodies(two) == []
    two.close()


def test_threads_that_use_it_first_at_once_open_one_engine(make: Make) -> None:
    name = f"memory://shop-{new_message_id()}"
    with ThreadPoolExecutor(8) as pool:
        brokers = list(pool.map(make, [name] * 8))
        list(pool.map(lambda broker: broker.publish([message()]), brokers))

    assert len(bodies(brokers[0])) == 8


def test_brokers_without_a_name_are_each_their_own(make: Make) -> None:
    one, two = make(), make("memory://")
    one.publish([message()])

    assert bodies(two) == []


@pytest.mark.parametrize("url", ["memory:x", "memory://a/b", "memory://a?x=1", "redis://a"])
def test_a_url_that_names_no_such_broker_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="memory://NAME"):
        TemporaryBroker(url)


def test_what_its_sender_changes_later_does_not_reach_consumers(make: Make) -> None:
    headers = {"a": "1"}
    broker = make()
    broker.publish([Message(id="m", topic="t", body=b"", headers=headers)])
    headers["a"] = "2"

    [delivery] = broker.pull("t", "g")

    assert dict(delivery.headers) == {"a": "1"}


def test_out_of_service_every_call_fails_and_a_long_poll_ends(make: Make) -> None:
    broker = make()
    broker.publish([message(body=b"kept")])
    ended = threading.Event()

    def poll() -> None:
        with suppress(BrokerUnavailable):
            broker.pull("nothing", "g", wait_ms=60_000)
        ended.set()

    thread = threading.Thread(target=poll)
    thread.start()
    with broker.out_of_service():
        assert ended.wait(WAIT_SECONDS)
        with pytest.raises(BrokerUnavailable):
            broker.publish([message()])
        with pytest.raises(BrokerUnavailable):
            broker.admin.topics()
    thread.join(WAIT_SECONDS)

    assert bodies(broker) == [b"kept"]


def test_closed_it_ends_its_polls_and_refuses_to_be_used(make: Make) -> None:
    broker = make()

    def poll() -> None:
        with suppress(ConfigurationError):  # where it comes too late
            broker.pull("t", "g", wait_ms=60_000)

    thread = threading.Thread(target=poll)
    thread.start()
    broker.close()
    broker.close()
    thread.join(WAIT_SECONDS)

    assert not thread.is_alive()
    with pytest.raises(ConfigurationError, match="closed"):
        broker.publish([message()])


def test_an_outage_forgets_nothing_and_what_was_delivered_before_can_be_acked_after(make: Make) -> None:
    broker = make()
    broker.publish([message(body=b"delivered"), message(body=b"stored")])
    [delivery] = broker.pull("t", "g", max_messages=1)

    with broker.out_of_service(BrokerRefused("no")), pytest.raises(BrokerRefused, match="no"):
        broker.pull("t", "g")

    assert broker.ack([delivery.receipt]) == ["acked"]
    assert bodies(broker) == [b"stored"]


def test_cleared_it_knows_nothing_more_and_long_polls_go_on(make: Make) -> None:
    broker = make()
    known = message(body=b"known")
    broker.publish([known])
    polled: list[bytes] = []
    thread = threading.Thread(target=lambda: polled.extend(bodies(broker, "other", wait_ms=60_000)))
    thread.start()

    broker.clear()
    assert broker.admin.topics() in ([], ["other"])
    assert [one.status for one in broker.publish([known])] == ["stored"]
    broker.publish([message("other", b"polled")])
    thread.join(WAIT_SECONDS)

    assert polled == [b"polled"]


def test_a_clock_that_is_put_forward_by_years_makes_nothing_outdated(make: Make, clock: ManualClock) -> None:
    broker = make(clock=clock)
    broker.publish([message(body=b"old")])
    assert bodies(broker) == [b"old"]

    clock.advance(2 * 365 * 24 * HOUR_MS)

    assert bodies(broker, group="new") == [b"old"]


def test_bounds_are_the_engines_options(make: Make) -> None:
    broker = make(options=EngineOptions(reserve_bytes=0, topics_max=1))
    broker.publish([message("one")])

    assert [one.status for one in broker.publish([message("two")])] == ["rejected"]


def test_closed_nothing_of_it_stays(tmp_path: Path) -> None:
    done = run(f"{OPENED}\nbroker.close()\nprint(threading.active_count(), folders())", tmp_path)

    assert done == "1 []\n"


@pytest.mark.parametrize("fork", FORK_IDS)
def test_what_is_left_open_is_removed_at_exit_and_a_forked_child_removes_nothing(tmp_path: Path, fork: str) -> None:
    done = run(f"{OPENED}\n{FORKED}\nprint(len(folders()), broker.pull('t', 'g')[0].body)", tmp_path, fork)

    assert done == "in-memory broker belongs to the process\n[] 2\n1 b'x'\n"
    assert run(f"{IMPORTS}\nprint(folders())", tmp_path) == "[]\n"


IMPORTS = """
import glob, os, sys, threading
from outbox_core import Message, connect
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.forks import FORK_IDS, FORKS


def folders():
    return glob.glob(os.path.join(os.environ["TMPDIR"], "outbox-memory-*"))
"""
OPENED = f"""{IMPORTS}
broker = connect("memory://shop", folder=os.environ["TMPDIR"])
broker.publish([Message(id="1", topic="t", body=b"x")])
assert len(folders()) == 1
"""
FORKED = """
child = dict(zip(FORK_IDS, FORKS))[sys.argv[1]].values[0]()
if not child:
    try:
        broker.pull("t", "g")
    except ConfigurationError as error:
        print(str(error)[3:42], flush=True)
    own = connect("memory://shop", folder=os.environ["TMPDIR"])
    print(own.pull("t", "g"), len(folders()), flush=True)
    sys.exit()
os.waitpid(child, 0)
"""


def run(program: str, folder: Path, *arguments: str) -> str:
    """What the program prints, with temporary folders in `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", FORKS_ARE_MEANT, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
