"""What every segment store must do. A new implementation adds its opener to OPENERS and passes all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.segments.local_segments import LocalSegmentStore
from outbox_broker.segments.segment_store import SegmentAppend, SegmentStore, WriterFenced
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.delay.ledger_stores import LedgerCluster

OPENERS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "ledgers": lambda _: LedgerCluster().open,
    "local": lambda folder: lambda: LocalSegmentStore.open(folder),
}
RECORDS = [b"\x91a", b"\x91" + bytes(range(256)) * 40, b"\x91c"]


@pytest.fixture(params=sorted(OPENERS))
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Open a store on what the test's stores before it left; the caller closes it to open another."""
    opener = OPENERS[request.param](tmp_path / "store")
    with ExitStack() as stack:

        def opened() -> Any:
            store = opener()
            stack.callback(store.close)
            return store

        yield opened


def append_synced(store: SegmentStore, name: str) -> None:
    store.append(name, RECORDS, position=0)
    store.sync([name])


def payloads(store: SegmentStore, name: str) -> list[bytes]:
    return [one.payload for one in store.scan(name)]


def test_records_are_read_by_position_and_scanned_in_order(open_store: Callable[[], Any]) -> None:
    store = open_store()

    *positions, end = store.append("a", RECORDS, position=0)

    assert [store.read("a", at, len(one)) for at, one in zip(positions, RECORDS, strict=True)] == RECORDS
    assert payloads(store, "a") == RECORDS
    assert [one.position for one in store.scan("a")] == positions
    assert list(store.scan("a"))[-1].end == end


def test_what_was_synced_is_there_for_the_next_writer_who_goes_on_behind_it(open_store: Callable[[], Any]) -> None:
    store = open_store()
    *_, end = store.append("a", RECORDS, position=0)
    store.sync(["a"])
    store.close()

    store = open_store()
    assert payloads(store, "a") == RECORDS
    store.append("a", [b"\x91d"], position=end)

    assert payloads(store, "a") == [*RECORDS, b"\x91d"]


def test_many_segments_are_appended_to_at_once(open_store: Callable[[], Any]) -> None:
    store = open_store()
    *_, end = store.append("b", RECORDS[:1], position=0)

    positions = store.append_all(
        [SegmentAppend("a", RECORDS, 0), SegmentAppend("b", RECORDS[1:], end), SegmentAppend("c", RECORDS[2:], 0)]
    )
    store.sync(["a", "b", "c"])

    assert [len(one) for one in positions] == [4, 3, 2]
    assert store.read("b", positions[1][0], len(RECORDS[1])) == RECORDS[1]
    store.close()
    store = open_store()
    assert [payloads(store, name) for name in ("a", "b", "c")] == [RECORDS, RECORDS, RECORDS[2:]]


def test_a_segment_that_continues_keeps_what_it_had_for_the_writer_after_the_next(
    open_store: Callable[[], Any],
) -> None:
    store, end, written = open_store(), 0, []
    for record in RECORDS:
        if written and not store.continues("a"):
            break
        *_, end = store.append("a", [record], position=end)
        store.sync(["a"])
        written.append(record)
        store.close()
        store = open_store()

    assert payloads(store, "a") == written


def test_an_append_drops_what_an_earlier_writer_left_behind_its_position(open_store: Callable[[], Any]) -> None:
    store = open_store()
    *_, end = store.append("a", RECORDS[:1], position=0)
    store.sync(["a"])
    store.append("a", RECORDS[1:], position=end)
    store.close()

    store = open_store()
    store.append("a", [b"\x91new"], position=end)

    assert payloads(store, "a") == [RECORDS[0], b"\x91new"]


def test_segments_are_listed_sorted_and_deleted_for_good(open_store: Callable[[], Any]) -> None:
    store = open_store()
    for name in ("l0m-2-1", "l0m-10-1", "log-1"):
        store.append(name, RECORDS, position=0)

    store.delete(["l0m-2-1", "never-made"])
    store.sync(["l0m-2-1"])

    assert list(store.list()) == ["l0m-10-1", "log-1"]
    store.close()
    assert list(open_store().list()) == ["l0m-10-1", "log-1"]


def test_a_sealed_segment_is_read_as_before(open_store: Callable[[], Any]) -> None:
    store = open_store()
    position, _ = store.append("a", RECORDS[:1], position=0)
    store.sync(["a"])

    store.seal("a")
    store.seal("a")
    store.seal("never-made")

    assert store.read("a", position, len(RECORDS[0])) == RECORDS[0]


def test_a_wrong_position_or_size_is_told_as_damage(open_store: Callable[[], Any]) -> None:
    store = open_store()
    position, _, _ = store.append("a", RECORDS[:2], position=0)

    for at, size in ((position + 1, len(RECORDS[0])), (position, len(RECORDS[0]) + 1), (position + 10**6, 3)):
        with pytest.raises(SegmentDamaged, match="a: damaged record"):
            store.read("a", at, size)


def test_reading_what_is_not_there_fails(open_store: Callable[[], Any]) -> None:
    store = open_store()

    with pytest.raises(StorageFailed):
        store.read("a", 0, 1)
    with pytest.raises(StorageFailed):
        list(store.scan("a"))


def test_there_are_never_two_writers(open_store: Callable[[], Any]) -> None:
    first = open_store()
    first.append("a", RECORDS, position=0)

    try:
        second = open_store()
    except ConfigurationError:
        first.append("b", RECORDS, position=0)  # refused, so the first goes on
    else:
        assert second.epoch > first.epoch
        with pytest.raises(WriterFenced):
            append_synced(first, "b")


def test_each_writer_has_a_higher_epoch_than_those_before(open_store: Callable[[], Any]) -> None:
    epochs = []
    for _ in range(3):
        store = open_store()
        epochs.append(store.epoch)
        store.close()

    assert epochs == sorted(set(epochs))


def test_a_closed_store_refuses(open_store: Callable[[], Any]) -> None:
    store = open_store()
    store.append("a", RECORDS, position=0)
    store.close()
    store.close()

    for refused in (
        lambda: store.append("a", RECORDS, position=0),
        lambda: store.sync(["a"]),
        lambda: store.read("a", 0, 1),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StorageFailed, match="closed"):
            refused()


def test_many_segments_are_written_and_read_at_once(open_store: Callable[[], Any]) -> None:
    store = open_store()
    names = [f"s-{number}" for number in range(200)]
    failures: list[BaseException] = []

    def work(mine: list[str]) -> None:
        try:
            for name in mine:
                position, end = store.append(name, [name.encode()], position=0)
                store.append(name, [b"\x91" * 10], position=end)
                store.sync([name])
                assert store.read(name, position, len(name)) == name.encode()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(names[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert failures == []
    assert list(store.list()) == sorted(names)
    assert all(payloads(store, name) == [name.encode(), b"\x91" * 10] for name in names)
