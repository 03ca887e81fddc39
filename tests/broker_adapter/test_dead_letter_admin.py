"""What our own broker's administration does with dead letters, by its client and in the process: the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_core import Broker, GroupConfig, Message, connect
from outbox_core.common.errors import BrokerRefused, InvalidMessage
from outbox_core.messages.broker_port import DeadLetterAdmin
from outbox_core.messages.message import EDITED_HEADER, DeadEdit, DeadFilter
from tests.broker_adapter.servers import served

TOPIC, GROUP = "orders", "billing"
EU = DeadEdit(headers={"region": "eu"})


@pytest.fixture(params=["http", "embedded"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own, with five dead letters of one group."""
    if request.param == "embedded":
        broker = connect(f"embedded:{tmp_path / 'data'}")
        yield from used(broker)
        return
    with served(tmp_path / "data") as server:
        yield from used(connect(server.url))


def used(broker: Broker) -> Iterator[Broker]:
    broker.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    broker.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(5)])
    broker.nack([one.receipt for one in broker.pull(TOPIC, GROUP)], reason="no region")
    yield broker
    broker.close()


def admin_of(broker: Broker) -> DeadLetterAdmin:
    admin = broker.admin
    assert isinstance(admin, DeadLetterAdmin)
    return admin


def test_dead_letters_are_edited_by_their_ids_and_a_repeat_of_the_operation_is_known(broker: Broker) -> None:
    admin = admin_of(broker)
    edits = {"m3": DeadEdit(body=b"y" * 700_000), "unknown": EU, "m1": DeadEdit(body=b"z" * 700_000)}

    results = admin.edit(TOPIC, GROUP, edits, why="typo", operation="op-1")

    assert [(one.id, one.status) for one in results] == [("m3", "edited"), ("unknown", "not_dead"), ("m1", "edited")]
    assert admin.edit(TOPIC, GROUP, edits, why="typo", operation="op-1") == results
    assert [one.status for one in admin.edit(TOPIC, GROUP, edits, why="typo")] == ["not_dead"] * 3
    came = {one.id: (one.headers[EDITED_HEADER], one.body) for one in broker.pull(TOPIC, GROUP)}
    assert came == {
        one.new_id: (one.id, edits[one.id].body) for one in results if one.new_id is not None
    }  # fmt: skip
    assert [one.id for one in broker.admin.dead(TOPIC, GROUP)[0]] == ["m0", "m2", "m4"]


def test_dead_letters_that_fit_are_edited_in_one_way(broker: Broker) -> None:
    admin = admin_of(broker)
    region = DeadFilter(reason="region")
    counted = admin.count_dead(TOPIC, GROUP, where=region)

    results = list(
        admin.edit_many(TOPIC, GROUP, EU, where=region, dead_before_ms=counted.dead_before_ms, why="region was missing")
    )

    assert [(one.id, one.status) for one in results] == [(f"m{number}", "edited") for number in range(counted.count)]
    assert {one.headers["region"] for one in broker.pull(TOPIC, GROUP)} == {"eu"}
    assert list(admin.edit_many(TOPIC, GROUP, EU, why="once more")) == []


def test_of_no_ids_no_dead_letter_is_meant(broker: Broker) -> None:
    admin = admin_of(broker)

    assert admin.count_dead(TOPIC, GROUP, ids=[]).count == 0
    assert broker.admin.redrive(TOPIC, GROUP, ids=[]) == 0
    assert admin.discard(TOPIC, GROUP, ids=[], why="none") == 0
    assert admin.edit(TOPIC, GROUP, {}, why="none") == []
    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 5


def test_what_is_no_edit_is_refused(broker: Broker) -> None:
    admin = admin_of(broker)

    with pytest.raises(InvalidMessage, match="say why"):
        admin.edit(TOPIC, GROUP, {"m0": EU}, why="")
    with pytest.raises(BrokerRefused, match="no consumer group"):
        admin.edit(TOPIC, "nobody", {"m0": EU}, why="typo")
    with pytest.raises((BrokerRefused, InvalidMessage), match="named by its id"):
        list(admin.edit_many(TOPIC, GROUP, DeadEdit(body=b"y"), why="typo"))

    assert len(broker.admin.dead(TOPIC, GROUP)[0]) == 5
