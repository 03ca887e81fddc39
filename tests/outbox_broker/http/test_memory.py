"""A server's memory beside attacks on it: it never rises by more than a bound, what it refuses may be sent again, and
what it has acknowledged is there. Real processes; how long anything takes is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_core import connect
from outbox_core.messages.message import GroupConfig
from tests.broker_adapter.servers import ServerProcess
from tests.outbox_broker.http.attacks import ATTACKS, CLOSED, MIB, PULL_BYTES, TOPIC, Answer, Connection, Outcome

RISE_BYTES_MAX = 512 * MIB
NACKS = 40_000
pytestmark = [pytest.mark.processes, pytest.mark.slow]
type_of_played = Callable[[str], Outcome]


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    return _memory(pid, "VmHWM")


def _memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.fixture
def played(server_process: ServerProcess) -> Iterator[type_of_played]:
    """Play an attack on a server of its own; in the end that server's memory has kept to its bound, and it answers."""
    server_process.start()
    before = _memory(server_process.pid, "VmRSS")

    def play(name: str) -> Outcome:
        attack = ATTACKS[name]
        prepared = attack.prepare(server_process.url)
        with attack.played(server_process.url, prepared) as outcome:
            assert ask(server_process.url, "GET", "/livez").status == 200
        return outcome

    yield play
    rise = peak_bytes(server_process.pid) - before
    assert rise <= RISE_BYTES_MAX, f"memory rose by {rise // MIB} MiB"
    assert ask(server_process.url, "GET", "/readyz").status == 200


def ask(url: str, method: str, path: str, body: bytes = b"") -> Answer:
    connection = Connection(url)
    try:
        return connection.ask(method, path, body)
    finally:
        connection.close()


def check_refusals(answers: list[Answer]) -> None:
    """Whatever was not done is to be sent again, and says when."""
    for one in answers:
        assert one.status in {200, 503}, one
        if one.status == 503:
            assert int(one.headers["retry-after"]) >= 1
            problem = one.json()
            assert problem["type"].endswith("overloaded")
            assert problem["retry_after_ms"] >= 1


def consumed(url: str, topic: str, count: int) -> set[str]:
    """The ids of all that a new group gets of a topic; each message is taken and acknowledged."""
    broker = connect(url)
    ids: set[str] = set()
    try:
        broker.admin.declare_group(topic, "after", GroupConfig())
        while len(ids) < count:
            deliveries = broker.pull(topic, "after", max_messages=1_000, wait_ms=60_000)
            assert deliveries, f"only {len(ids)} of {count}"
            broker.ack([one.receipt for one in deliveries])
            ids |= {one.id for one in deliveries}
        assert broker.pull(topic, "after") == []
    finally:
        broker.close()
    return ids


def figures(url: str, path: str) -> dict[str, int]:
    found: dict[str, int] = ask(url, "GET", path).json()["figures"]
    return found


@pytest.mark.parametrize(
    ("name", "messages_min"),
    [("batch_packed", 60), ("batch_small", 60), ("batch_text", 50), ("batch_text_small", 900), ("message_text", 1)],
)
def test_one_batch_as_large_as_may_be_is_stored(
    played: type_of_played, server_process: ServerProcess, name: str, messages_min: int
) -> None:
    outcome = played(name)

    assert outcome.statuses == {200: 1}
    ((topic, count),) = outcome.stored.items()
    assert len(consumed(server_process.url, topic, count)) == count >= messages_min


def test_a_long_batch_in_json_is_refused_at_its_second_message(played: type_of_played) -> None:
    (answer,) = played("batch_text_long").answers

    assert (answer.status, answer.json()["where"]) == (413, "$.messages")
    assert "has one message" in answer.json()["detail"]


def test_one_batch_of_63_mib_for_later_is_scheduled(played: type_of_played, server_process: ServerProcess) -> None:
    outcome = played("batch_later")

    assert outcome.statuses == {200: 1}
    ((topic, count),) = outcome.stored.items()
    assert figures(server_process.url, f"/v1/topics/{topic}")["scheduled"] == count > 60


@pytest.mark.parametrize("name", ["batches", "messages_text"])
def test_of_eight_batches_of_63_mib_each_is_stored_or_told_to_come_again(
    played: type_of_played, server_process: ServerProcess, name: str
) -> None:
    outcome = played(name)

    check_refusals(outcome.answers)
    assert 1 <= outcome.statuses[200] <= 8
    for topic, count in outcome.stored.items():
        if count:
            assert figures(server_process.url, f"/v1/topics/{topic}")["stored"] == count
        else:
            assert ask(server_process.url, "GET", f"/v1/topics/{topic}").status == 404
    for topic, count in outcome.stored.items():
        assert len(consumed(server_process.url, topic, count)) == count


@pytest.mark.parametrize(
    ("name", "refused"), [("tiny_messages", (422, "$")), ("tiny_messages_text", (413, "$.messages"))]
)
def test_a_million_tiny_messages_are_refused_for_their_number(
    played: type_of_played, name: str, refused: tuple[int, str]
) -> None:
    (answer,) = played(name).answers

    assert (answer.status, answer.json()["where"]) == refused


def test_a_body_that_is_no_text_and_no_bytes_is_not_built(played: type_of_played) -> None:
    (answer,) = played("nested_body").answers

    assert (answer.status, answer.json()["where"]) == (422, "$[0][4]")


@pytest.mark.parametrize("name", ["many_headers", "many_headers_text", "headers_in_many"])
def test_millions_of_headers_are_not_built(played: type_of_played, name: str) -> None:
    (answer,) = played(name).answers

    assert answer.status == 422
    assert "the headers have more than" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["tiny_receipts", "tiny_receipts_text"])
def test_a_million_tiny_receipts_are_refused_before_they_are_read(played: type_of_played, name: str) -> None:
    (answer,) = played(name).answers

    assert answer.status == 413


def test_acks_that_never_end_hold_no_memory(played: type_of_played) -> None:
    outcome = played("unfinished_acks")

    assert outcome.statuses == {413: 20}


def test_batches_that_never_end_hold_what_all_work_may_and_others_are_told_to_come_again(
    played: type_of_played,
) -> None:
    outcome = played("unfinished_batches")

    check_refusals(outcome.answers)
    assert 12 <= outcome.statuses[503] <= 19


def test_pulls_that_nobody_reads_hold_what_all_work_may_and_their_messages_come_back(
    played: type_of_played, server_process: ServerProcess
) -> None:
    outcome = played("unread_pulls")

    check_refusals(outcome.answers)
    assert 1 <= outcome.statuses[200] <= 30
    count = figures(server_process.url, f"/v1/topics/{TOPIC}")["stored"]
    broker = connect(server_process.url)
    ids: set[str] = set()
    try:
        while len(ids) < count:  # what was handed out is invisible for a second
            deliveries = broker.pull(TOPIC, "g0", max_messages=1_000, wait_ms=60_000)
            broker.ack([one.receipt for one in deliveries])
            ids |= {one.id for one in deliveries}
    finally:
        broker.close()
    assert count > PULL_BYTES // MIB


def test_reasons_of_nacks_take_no_more_than_their_share(played: type_of_played, server_process: ServerProcess) -> None:
    outcome = played("nack_reasons")

    assert outcome.statuses == {200: NACKS}
    path = f"/v1/topics/{TOPIC}/groups/nacks"
    found = figures(server_process.url, path)
    assert (found["backlog"], found["in_flight"], found["dead"]) == (NACKS, 0, 0)
    server_process.kill()
    server_process.start()
    assert figures(server_process.url, path)["backlog"] == NACKS


def test_pages_of_dead_letters_are_short_and_go_on_to_the_last_one(
    played: type_of_played, server_process: ServerProcess
) -> None:
    outcome = played("dead_pages")

    check_refusals(outcome.answers)
    assert outcome.statuses[200] >= 1
    assert max(len(one.body) for one in outcome.answers) <= 16 * MIB
    path = f"/v1/topics/{TOPIC}/groups/dead"
    ids: list[str] = []
    after = ""
    while True:
        page: dict[str, Any] = ask(server_process.url, "GET", f"{path}/dead?limit=1000{after}").json()
        ids += [one["id"] for one in page["dead"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert len(ids) == len(set(ids)) == figures(server_process.url, path)["dead"] > PULL_BYTES // (128 * 1024)


def test_all_attacks_are_played() -> None:
    played_here = Path(__file__).read_text()

    assert [name for name in ATTACKS if json.dumps(name) not in played_here] == []
    assert CLOSED == 0
