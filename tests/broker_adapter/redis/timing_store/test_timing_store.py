"""The timing store on a real server: what is taken when and by whom, wake-ups, rebuilds, servers that cannot serve."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from broker_adapter.redis.timers.slot_scripts import slot_of
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import SlotServer, StoredTimer, TakenTimers, TimedRow, Timer, TimingStore
from tests.broker_adapter.redis.redis_cluster import STEADY_MS, redis_cluster
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, wait_until

SLOTS = 2
EVERY = range(SLOTS)
HOUR_MS = 3_600_000
WAIT_MS = 120_000
WRONG = ["name=a/b", "slots=3", "slots=0", "slots=x", "maxlen=7", "store=timers", "timeout_ms=1"]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def url_of(server: RedisServer, options: str = "") -> str:
    return f"redis://{HOST}:{server.port}/?slots={SLOTS}&name=shop{options}"


@contextlib.contextmanager
def opened(url: str) -> Iterator[TimingStore]:
    store = connect_timing(url)
    yield store
    store.close()


@pytest.fixture
def store(server: RedisServer) -> Iterator[TimingStore]:
    """The store of a source, on a server of the test's own."""
    with opened(url_of(server)) as found:
        yield found


def rows(count: int, *, prefix: str = "m") -> list[TimedRow]:
    return [TimedRow("message", f"{prefix}{number}") for number in range(count)]


def due(wanted: Sequence[TimedRow], *, in_ms: int = 0) -> list[Timer]:
    return [Timer(row, now_ms() + in_ms) for row in wanted]


def take(store: TimingStore, *, limit: int = 1_000, lease_ms: int = WAIT_MS) -> list[TakenTimers]:
    return store.take(EVERY, limit=limit, lease_ms=lease_ms)


def rows_of(taken: Sequence[TakenTimers]) -> list[TimedRow]:
    return sorted(row for one in taken for row in one.rows)


def settle_all(store: TimingStore, taken: Sequence[TakenTimers]) -> None:
    store.settle(taken, later_ms={})


def held(store: TimingStore) -> int:
    return sum(one.timers for one in store.figures())


def test_due_rows_are_taken_once_the_others_stay_and_what_is_settled_is_gone(store: TimingStore) -> None:
    store.add([*due(rows(20)), *due(rows(5, prefix="later"), in_ms=HOUR_MS)])

    taken = take(store)
    assert rows_of(taken) == sorted(rows(20))
    assert {slot_of(row.id, SLOTS) for one in taken for row in one.rows} == set(EVERY)
    assert all(0 <= one.late_ms < WAIT_MS for one in taken)
    assert rows_of(take(store)) == [], "leased to the first taker"
    settle_all(store, taken)

    assert held(store) == 5
    assert all(one.due == 0 and one.next_ms is not None for one in store.figures())
    assert all(one.next_ms is not None and one.next_ms > HOUR_MS - WAIT_MS for one in take(store))


def test_a_lease_that_ends_hands_the_rows_to_the_next_and_the_first_settles_nothing(store: TimingStore) -> None:
    store.add(due(rows(3)))
    first = take(store, lease_ms=1)
    again: list[TimedRow] = []  # those of one slot after the other, as their leases end

    def take_again() -> bool:
        again.extend(rows_of(take(store)))
        return len(again) >= 3

    assert wait_until(take_again)
    assert sorted(again) == sorted(rows(3))
    settle_all(store, first)

    assert held(store) == 3
    assert rows_of(first) == sorted(rows(3))


def test_a_row_may_be_taken_before_its_time_by_who_asks_so_and_the_next_one_later(store: TimingStore) -> None:
    rows_of_slot = [row for row in rows(40) if slot_of(row.id, SLOTS) == 0]
    soon, late = rows_of_slot[:2]
    store.add([*due([soon], in_ms=HOUR_MS), *due([late], in_ms=2 * HOUR_MS)])

    [nothing] = store.take([0], limit=10, lease_ms=WAIT_MS)
    [taken] = store.take([0], limit=10, lease_ms=3 * HOUR_MS, ahead_ms=HOUR_MS)

    assert (list(nothing.rows), list(taken.rows), taken.late_ms) == ([], [soon], 0)
    assert nothing.next_ms is not None
    assert HOUR_MS - WAIT_MS < nothing.next_ms <= HOUR_MS
    assert taken.next_ms is not None
    assert HOUR_MS - WAIT_MS < taken.next_ms <= HOUR_MS, "an hour less than until it is due"


def test_a_row_is_due_again_when_its_taker_says_so(store: TimingStore) -> None:
    [row] = rows(1)
    store.add(due([row]))
    taken = take(store)
    store.settle(taken, later_ms={row: HOUR_MS})
    assert rows_of(take(store)) == []
    assert held(store) == 1

    store.add(due([row]))
    taken = take(store)
    store.settle(taken, later_ms={row: 1})
    assert wait_until(lambda: rows_of(take(store)) == [row])


def test_a_new_time_replaces_the_old_one_and_a_rebuild_replaces_none(store: TimingStore) -> None:
    [row] = rows(1)
    store.add(due([row], in_ms=HOUR_MS))
    store.add(due([row]), only_missing=True)
    assert rows_of(take(store)) == []

    store.add(due([row]))
    assert rows_of(take(store)) == [row]


def test_a_time_that_is_set_while_the_row_is_taken_survives_the_settlement(store: TimingStore) -> None:
    [row] = rows(1)
    store.add(due([row]))
    taken = take(store)
    store.add(due([row]))
    settle_all(store, taken)

    assert rows_of(take(store)) == [row]


def test_rows_that_are_due_together_are_taken_in_no_order_of_their_publishes(store: TimingStore) -> None:
    """The documented limit: of rows with a timing store no order is promised."""
    published = [TimedRow("message", f"m{number}") for number in range(100, 0, -1)]
    at_ms = now_ms()
    store.add([Timer(row, at_ms) for row in published])

    taken = [row for one in take(store) for row in one.rows]

    assert sorted(taken) == sorted(published)
    assert taken != published


def test_a_full_slot_starves_no_other(store: TimingStore) -> None:
    names = [one for one in rows(400) if slot_of(one.id, SLOTS) == 0]
    [other] = [one for one in rows(400) if slot_of(one.id, SLOTS) == 1][:1]
    store.add(due([*names, other]))

    assert other in rows_of(take(store, limit=10))


def test_who_waits_is_woken_by_a_timer_before_all_others_and_by_no_other(
    store: TimingStore, server: RedisServer
) -> None:
    store.add(due(rows(SLOTS * 8), in_ms=HOUR_MS))
    store.wait(1)  # subscribes
    woken = threading.Event()

    def wait() -> None:
        store.wait(WAIT_MS)
        woken.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    with opened(url_of(server)) as other:
        other.add(due(rows(1, prefix="latest"), in_ms=2 * HOUR_MS))
        assert wait_until(lambda: server.ask("PUBSUB", "NUMSUB", "outbox:timing:shop:wake")[1] == 1)
        assert not woken.is_set()
        other.add(due(rows(1, prefix="earliest")))
        assert woken.wait(WAIT_MS / 1_000)
    waiting.join(WAIT_MS / 1_000)


def test_a_wait_without_a_server_ends_with_its_time_or_a_close(store: TimingStore, server: RedisServer) -> None:
    server.kill()
    store.wait(1)

    with opened(url_of(server)) as other:
        waiting = threading.Thread(target=lambda: other.wait(10 * WAIT_MS), daemon=True)
        waiting.start()
        other.close()
        waiting.join(WAIT_MS / 1_000)
        assert not waiting.is_alive()


def test_a_slot_is_complete_only_after_a_rebuild_that_nothing_interrupted(
    store: TimingStore, server: RedisServer
) -> None:
    def complete() -> list[bool]:
        return [one.complete for one in store.figures()]

    assert not any(complete())
    rebuild = store.begin_rebuild(EVERY)
    assert list(rebuild.slots) == list(EVERY)
    assert store.continue_rebuild(rebuild)
    assert not any(complete())
    assert store.end_rebuild(rebuild)
    assert all(complete())
    assert all(one.complete for one in take(store))
    assert store.begin_rebuild(EVERY).slots == [], "nothing is to be rebuilt"

    server.ask("FLUSHALL")
    assert not any(complete())
    rebuild = store.begin_rebuild(EVERY)
    server.ask("FLUSHALL")
    assert not store.continue_rebuild(rebuild)
    assert not store.end_rebuild(rebuild), "what was added before is lost"


def test_a_slot_has_one_rebuild_at_a_time_until_its_time_has_passed(store: TimingStore, server: RedisServer) -> None:
    with opened(url_of(server)) as other:
        first = store.begin_rebuild([0])
        second = other.begin_rebuild(EVERY)
        assert (first.slots, second.slots) == ([0], [1])

        assert int(server.ask("PTTL", "outbox:timing:{shop:0}:generation")) > 0
        server.ask("PEXPIRE", "outbox:timing:{shop:0}:generation", 0)
        third = other.begin_rebuild([0])
        assert third.slots == [0]
        assert not store.end_rebuild(first)
        store.abandon_rebuild(first)
        assert other.end_rebuild(second)
        assert other.end_rebuild(third)
        assert server.ask("PTTL", "outbox:timing:{shop:0}:generation") == -1


def test_every_timer_of_a_slot_is_listed_and_one_that_changed_since_then_is_not_removed(store: TimingStore) -> None:
    store.add(due(rows(1_500), in_ms=HOUR_MS))
    listed: dict[TimedRow, StoredTimer] = {}
    for slot in EVERY:
        cursor: int | None = 0
        while cursor is not None:
            page = store.list_timers(slot, cursor=cursor, limit=100)
            assert all(slot_of(one.row.id, SLOTS) == slot for one in page.timers)
            listed |= {one.row: one for one in page.timers}
            cursor = page.next_cursor
    assert sorted(listed) == sorted(rows(1_500))

    [changed, same] = [one for one in rows(1_500) if slot_of(one.id, SLOTS) == 0][:2]
    assert store.add([Timer(changed, listed[changed].at_us // 1_000 + 1)]) == 1
    assert store.remove_timers(0, [listed[changed], listed[same]]) == 1
    assert held(store) == 1_499
    assert store.add(due([changed, same]), only_missing=True) == 1, "the removed one alone"


def test_another_number_of_slots_is_refused_at_start_and_at_an_add(store: TimingStore, server: RedisServer) -> None:
    store.prepare()
    assert store.slots == SLOTS

    with opened(url_of(server).replace("slots=2", "slots=4")) as other:
        with pytest.raises(ConfigurationError, match="has 2 slots"):
            other.prepare()
        with pytest.raises(StorageFailed, match="has 2 slots"):
            other.add(due(rows(1)))


def test_a_rebuild_registers_the_source_again_where_a_server_lost_everything(
    store: TimingStore, server: RedisServer
) -> None:
    store.prepare()
    server.ask("FLUSHALL")
    store.begin_rebuild(EVERY)

    with (
        opened(url_of(server).replace("slots=2", "slots=4")) as other,
        pytest.raises(ConfigurationError, match="has 2 slots"),
    ):
        other.prepare()


@pytest.mark.parametrize("rest", [f"{HOST}/?{one}" for one in WRONG] + ["", ":0"])
def test_a_url_that_says_what_cannot_be_is_refused_under_its_name(rest: str) -> None:
    with pytest.raises(ConfigurationError, match="the timing store's URL"):
        connect_timing(f"redis://{rest}")


def test_a_scheme_without_a_timing_store_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"known schemes: redis.*"):
        connect_timing("kafka://127.0.0.1:1")


def test_a_server_that_may_evict_timers_is_refused_at_start(store: TimingStore, server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigurationError, match="maxmemory-policy allkeys-lru"):
        store.prepare()

    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    store.prepare()


def test_a_full_server_refuses_adds_and_goes_on_with_all_else(store: TimingStore, server: RedisServer) -> None:
    store.add(due(rows(3)))
    server.ask("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(StorageFailed, match="OOM"):
        store.add(due(rows(1, prefix="refused")))

    rebuild = store.begin_rebuild(EVERY)
    taken = take(store)
    assert rows_of(taken) == sorted(rows(3))
    settle_all(store, taken)
    assert held(store) == 0
    assert store.end_rebuild(rebuild)


def test_the_rights_that_the_guide_lists_are_enough(server: RedisServer) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "delay.md").read_text(encoding="utf-8")
    [rights] = re.findall(r"^ACL SETUSER .*?^```", guide, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"\+[a-z|]+", rights)
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:*", "resetchannels", "&outbox:*", "-@all", *commands)

    with opened(url_of(server).replace("redis://", "redis://app:word@")) as store:
        store.prepare()
        store.wait(1)
        assert server.ask("PUBSUB", "NUMSUB", "outbox:timing:shop:wake")[1] == 1
        rebuild = store.begin_rebuild(EVERY)
        store.add(due(rows(20)), only_missing=True)
        assert store.continue_rebuild(rebuild)
        assert store.end_rebuild(rebuild)
        taken = take(store)
        assert rows_of(taken) == sorted(rows(20))
        settle_all(store, taken)
        store.add(due(rows(1), in_ms=HOUR_MS))
        store.announce(EVERY, SlotServer(host="h", process=1, instance="i"))
        assert all(one.figures is not None and one.server is not None for one in store.statuses(EVERY))
        pages = [store.list_timers(slot, cursor=0, limit=10) for slot in EVERY]
        assert sum(store.remove_timers(slot, page.timers) for slot, page in zip(EVERY, pages, strict=True)) == 1
        store.abandon_rebuild(store.begin_rebuild(EVERY))


def test_timers_survive_a_kill_and_a_dead_server_is_an_outage(store: TimingStore, server: RedisServer) -> None:
    store.add(due(rows(30), in_ms=HOUR_MS))
    server.kill()
    with pytest.raises(BrokerUnavailable):
        store.add(due(rows(1, prefix="lost")))

    server.start()
    assert held(store) == 30


@pytest.mark.slow
def test_a_cluster_has_the_slots_on_its_masters_and_wakes_from_any_node() -> None:
    with redis_cluster(node_timeout_ms=STEADY_MS) as cluster, opened(f"{cluster.url}?slots=16&name=shop") as store:
        store.prepare()
        store.add([*due(rows(64)), *due(rows(16, prefix="later"), in_ms=HOUR_MS)])
        store.wait(1)
        with opened(f"{cluster.url}?slots=16&name=shop") as other:
            other.add(due(rows(16, prefix="now"), in_ms=-HOUR_MS))
        store.wait(WAIT_MS)
        taken = store.take(range(16), limit=1_000, lease_ms=WAIT_MS)

        assert rows_of(taken) == sorted([*rows(64), *rows(16, prefix="now")])
        settle_all(store, taken)
        assert held(store) == 16
