"""A rebuild of timers that ends early leaves its slots to the next one, whatever ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from compensator.work.source import PendingRowReader
from compensator.work.timer_rebuild import RebuildOptions, RebuildProgress, rebuild_timers
from outbox_core import SystemClock
from outbox_core.common.errors import BrokerUnavailable, SchemaMissing
from outbox_core.messages.timing_port import SlotState, TimingStore
from tests.broker_adapter.redis.redis_server import RedisServer
from tests.compensator.timers.timer_workers import SLOTS, held, opened, publish, source_over, store_url
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

COUNT = 20
EVERY = list(range(SLOTS))
LEASE_MS_MAX = 20_000


def rebuild(
    tables: PendingRowReader,
    store: TimingStore,
    *,
    stopping: threading.Event | None = None,
    counted_rows_max: int = COUNT,
    on_progress: Callable[[RebuildProgress], None] = lambda _: None,
) -> bool:
    """One rebuild of all slots, by pages of two rows."""
    options = RebuildOptions(page_rows=2, counted_rows_max=counted_rows_max)
    return rebuild_timers(
        tables, store, EVERY, options=options, clock=SystemClock(), stopping=stopping or threading.Event(),
        on_progress=on_progress,
    )  # fmt: skip


@pytest.fixture
def tables(sqlite_shop: Shop, prompt: PromptBroker, server: RedisServer) -> Iterator[PendingRowReader]:
    """The rows of a shop, whose timers Redis lost."""
    publish(sqlite_shop, prompt, store_url(server), count=COUNT)
    server.ask("FLUSHALL")
    with source_over(sqlite_shop, prompt) as source:
        yield source.pending_rows


def states(store: TimingStore) -> set[SlotState]:
    return {one.state for one in store.figures()}


def test_the_next_worker_rebuilds_at_once_after_one_whose_database_was_away(
    sqlite_shop: Shop, tables: PendingRowReader, store: TimingStore, server: RedisServer
) -> None:
    def rename(old: str, new: str) -> None:
        with sqlite_shop.engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))

    name = sqlite_shop.store.table.name
    with pytest.raises(SchemaMissing):
        rebuild(tables, store, on_progress=lambda progress: rename(name, "away") if progress.rows == 2 else None)
    assert states(store) == {SlotState.INCOMPLETE}

    rename("away", name)
    with opened(store_url(server)) as other:
        assert rebuild(tables, other)
    assert states(store) == {SlotState.COMPLETE}
    assert held(store) == (COUNT, 0)


def test_the_next_worker_rebuilds_at_once_after_one_that_was_stopped(
    tables: PendingRowReader, store: TimingStore, server: RedisServer
) -> None:
    stopping = threading.Event()
    assert not rebuild(tables, store, stopping=stopping, on_progress=lambda _: stopping.set())

    with opened(store_url(server)) as other:
        assert other.begin_rebuild(EVERY).slots == EVERY


def test_a_worker_rebuilds_again_at_once_after_one_slot_lost_its_timers(
    tables: PendingRowReader, store: TimingStore, server: RedisServer
) -> None:
    def lose(_: RebuildProgress) -> None:
        server.ask("DEL", "outbox:timing:{shop:0}:due", "outbox:timing:{shop:0}:generation")

    assert not rebuild(tables, store, on_progress=lose)
    assert states(store) == {SlotState.INCOMPLETE}
    assert rebuild(tables, store)


def test_a_rebuild_whose_count_took_longer_than_its_slots_were_kept_becomes_complete(
    tables: PendingRowReader, store: TimingStore, server: RedisServer
) -> None:
    def let_the_time_pass(progress: RebuildProgress) -> None:
        for slot in EVERY if progress.rows == 0 else []:
            server.ask("PEXPIRE", f"outbox:timing:{{shop:{slot}}}:generation", 0)

    assert rebuild(tables, store, on_progress=let_the_time_pass)
    assert states(store) == {SlotState.COMPLETE}
    assert held(store) == (COUNT, 0)


def test_a_worker_rebuilds_again_at_once_after_redis_was_away(tables: PendingRowReader, server: RedisServer) -> None:
    with opened(store_url(server)) as store:
        with pytest.raises(BrokerUnavailable):
            rebuild(tables, store, on_progress=lambda progress: server.kill() if progress.rows == 2 else None)
        server.start()

        assert states(store) == {SlotState.REBUILDING}, "nobody could say so while Redis was away"
        assert rebuild(tables, store)
        assert states(store) == {SlotState.COMPLETE}


def test_a_rebuild_goes_on_where_the_answer_to_its_beginning_or_its_end_was_lost(
    store: TimingStore, server: RedisServer
) -> None:
    store.begin_rebuild(EVERY)
    again = store.begin_rebuild(EVERY)
    assert again.slots == EVERY
    assert store.end_rebuild(again)
    assert store.end_rebuild(again)


def test_the_slots_of_a_worker_that_was_killed_are_its_own_for_twenty_seconds_more(
    store: TimingStore, server: RedisServer
) -> None:
    rebuild_of_killed = store.begin_rebuild(EVERY)
    keys = [f"outbox:timing:{{shop:{slot}}}:generation" for slot in EVERY]
    assert all(0 < server.ask("PTTL", key) <= LEASE_MS_MAX for key in keys)

    with opened(store_url(server)) as other:
        assert other.begin_rebuild(EVERY).slots == []
        for key in keys:
            server.ask("PEXPIRE", key, 0)
        assert other.begin_rebuild(EVERY).slots == EVERY
    assert not store.continue_rebuild(rebuild_of_killed)


def test_a_rebuild_tells_how_many_rows_of_how_many_it_has_read(
    shop: Shop, prompt: PromptBroker, server: RedisServer
) -> None:
    publish(shop, prompt, store_url(server), count=COUNT)
    seen: dict[int, list[RebuildProgress]] = {COUNT - 1: [], COUNT: []}
    with source_over(shop, prompt) as source, opened(store_url(server)) as store:
        for bound, progress in seen.items():
            server.ask("FLUSHALL")
            assert rebuild(source.pending_rows, store, counted_rows_max=bound, on_progress=progress.append)

    rows = [0, *range(2, COUNT + 1, 2)]
    assert seen[COUNT - 1] == [RebuildProgress(one, None) for one in rows]
    assert seen[COUNT] == [RebuildProgress(one, COUNT) for one in rows]


def test_a_page_of_a_slow_rebuild_is_read_well_within_the_time_of_its_slots() -> None:
    assert RebuildOptions(rows_per_second=1).page_rows_at_rate * 1_000 < LEASE_MS_MAX
    assert RebuildOptions().page_rows_at_rate == RebuildOptions().page_rows
