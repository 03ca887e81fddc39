"""The queue and runs against a sorted list: order, never early, canceled entries, any mix of memory and runs."""

from __future__ import annotations

from itertools import chain, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_broker.schedule.due_queue import DueQueue, Piece, TakenMessages
from outbox_broker.schedule.sorted_run import (
    RUN_MESSAGES_MAX,
    Columns,
    Entry,
    SortedRun,
    StoredRun,
    cut,
    decode_columns,
    decode_messages,
    encode_run,
    stored_columns,
)

dues = st.lists(st.integers(0, 50), min_size=1, max_size=30)


class Written:
    """Runs in memory, made as a bucket's segment would hold them."""

    def __init__(self) -> None:
        self.columns: dict[int, Columns] = {}
        self.stored: dict[int, StoredRun] = {}
        self.opened: list[int] = []
        self._ids = count(1)

    def write(self, entries: list[Entry]) -> SortedRun:
        entries = sorted(entries)
        columns, messages = encode_run(entries, stored_columns(entries))
        first, last = entries[0], entries[-1]
        run = SortedRun(
            id=next(self._ids), position=0, columns_bytes=len(columns), messages_position=0,
            messages_bytes=len(messages), count=len(entries), first_due_ms=first.due_ms, first_seq=first.seq,
            last_due_ms=last.due_ms, last_seq=last.seq,
        )  # fmt: skip
        self.columns[run.id] = decode_columns(columns)
        self.stored[run.id] = decode_messages(messages)
        return run

    def read(self, run: SortedRun) -> Columns:
        self.opened.append(run.id)
        return self.columns[run.id]

    def ids(self, taken: TakenMessages) -> list[str]:
        found: list[tuple[tuple[int, int], str]] = []
        for part in taken.parts:
            if isinstance(part, Piece):
                stored, columns = self.stored[part.run.id], self.columns[part.run.id]
                found += [
                    ((columns.due[at], columns.seq[at]), stored.ids[at])
                    for at in range(part.start, part.stop)
                    if not part.run.is_gone(at)
                ]
                part.run.taken = part.stop
            else:
                found.append((part.key, part.id))
        return [one for _, one in (sorted(found) if taken.is_mixed else found)]


def entries(due_times: list[int], seqs: count[int]) -> list[Entry]:
    return [
        Entry(due_ms, seq, f"m{seq}", f"t{seq % 3}", b"x" * seq) for due_ms, seq in zip(due_times, seqs, strict=False)
    ]


def small(due_ms: int, seqs: count[int]) -> Entry:
    seq = next(seqs)
    return Entry(due_ms, seq, f"m{seq}", "t", b"x")


@given(
    batches=st.lists(st.tuples(st.booleans(), dues), max_size=8),
    steps=st.lists(st.integers(0, 60), max_size=12),
    size=st.integers(1, 20),
)
def test_what_is_due_comes_once_in_order_of_due_time_then_arrival_wherever_it_stood(
    batches: list[tuple[bool, list[int]]], steps: list[int], size: int
) -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    waiting: list[Entry] = []
    for in_memory, due_times in batches:
        some = entries(due_times, seqs)
        waiting += some
        if in_memory:
            for entry in some:
                queue.push(entry)
        else:
            queue.add([written.write(some)])

    for now_ms in sorted(steps):
        expected = [entry.id for entry in sorted(waiting) if entry.due_ms <= now_ms]
        waiting = [entry for entry in waiting if entry.due_ms > now_ms]
        got: list[str] = []
        while part := written.ids(queue.take(now_ms, count_max=size, bytes_max=1 << 20, is_alive=lambda _: True)):
            assert len(part) <= size
            got += part
        assert got == expected


@given(due_times=dues, canceled=st.sets(st.integers(0, 29)), taken=st.integers(0, 30))
def test_a_run_goes_on_from_where_it_was_left_without_what_was_canceled(
    due_times: list[int], canceled: set[int], taken: int
) -> None:
    written = Written()
    run = written.write(entries(due_times, count(1)))
    run.taken = min(taken, run.count)
    for index in canceled & set(range(run.count)):
        run.mark_gone(index)
    queue = DueQueue(written.read)

    queue.add([run])
    start = run.taken
    got = written.ids(queue.take(100, count_max=100, bytes_max=1 << 20, is_alive=lambda _: True))

    all_ids = written.stored[run.id].ids
    assert got == [one for at, one in enumerate(all_ids) if at >= start and at not in canceled]


def test_a_canceled_message_in_memory_is_passed_over() -> None:
    queue = DueQueue(Written().read)
    keep, gone = Entry(5, 2, "keep", "t", b""), Entry(5, 1, "gone", "t", b"")
    queue.push(keep)
    queue.push(gone)

    taken = queue.take(5, count_max=10, bytes_max=100, is_alive=lambda entry: entry is keep)

    assert taken.entries == [keep]


def test_nothing_comes_a_millisecond_early() -> None:
    queue = DueQueue(Written().read)
    queue.push(Entry(1_000, 1, "m", "t", b""))

    assert not queue.take(999, count_max=1, bytes_max=1, is_alive=lambda _: True).parts
    assert queue.take(1_000, count_max=1, bytes_max=1, is_alive=lambda _: True).parts


def test_a_run_is_read_only_when_its_first_message_is_next() -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    runs = [written.write(entries([start, start + 9], seqs)) for start in (0, 10, 20)]

    queue.add(runs)
    queue.take(12, count_max=100, bytes_max=1 << 20, is_alive=lambda _: True)

    assert set(written.opened) == {runs[0].id, runs[1].id}


def test_a_batch_ends_behind_the_bound_on_its_bytes() -> None:
    written = Written()
    queue = DueQueue(written.read)
    for seq in range(1, 11):
        queue.push(Entry(1, seq, f"m{seq}", "t", bytes(100)))

    taken = queue.take(1, count_max=100, bytes_max=250, is_alive=lambda _: True)

    assert len(taken.entries) == 3


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=60))
def test_runs_are_cut_by_count_and_by_bytes_and_miss_nothing(sizes: list[int]) -> None:
    some = [Entry(at, at, f"m{at}", "t", bytes(size * 100)) for at, size in enumerate(sizes)]

    pieces = list(cut(some))

    assert [entry for piece in pieces for entry in piece] == some
    assert all(len(piece) <= RUN_MESSAGES_MAX for piece in pieces)
    assert all(len(piece) == 1 or sum(len(one.payload) for one in piece[:-1]) < 256 * 1024 for piece in pieces)


@given(due_times=dues)
def test_every_entry_of_a_run_is_found_by_due_time_and_arrival_and_no_other(due_times: list[int]) -> None:
    some = sorted(entries(due_times, count(1)))
    columns = decode_columns(encode_run(some, stored_columns(some))[0])

    assert [columns.index_of(entry.due_ms, entry.seq) for entry in some] == list(range(len(some)))
    assert columns.index_of(some[0].due_ms, 1_000) is None
    assert columns.index_of(99, some[0].seq) is None
    assert [columns.topics[number] for number in columns.topic] == [entry.topic for entry in some]


def test_a_crowd_of_one_topic_shares_every_batch_with_the_others_in_memory_and_in_runs() -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    for seq in range(1_000):
        queue.push(Entry(1, next(seqs), f"crowd-{seq}", "crowd", b""))
    crowd = [Entry(1, next(seqs), f"run-{at}", "crowd2", b"") for at in range(500)]
    run = written.write(crowd)
    run.topic = "crowd2"
    queue.add([run])
    for number in range(30):
        queue.push(Entry(2, next(seqs), f"other-{number}", "other", b""))

    came: list[str] = []
    while batch := written.ids(queue.take(2, count_max=60, bytes_max=1 << 20, is_alive=lambda _: True)):
        came += batch

    assert len(came) == len(set(came)) == 1_530
    assert max(came.index(f"other-{number}") for number in range(30)) < 900
    assert [one for one in came if one.startswith("run-")] == [entry.id for entry in crowd]
    assert [one for one in came if one.startswith("other-")] == [f"other-{number}" for number in range(30)]


def test_what_comes_into_memory_stays_behind_earlier_messages_of_its_topic_in_runs() -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    earlier = [Entry(1, next(seqs), f"earlier-{number}", "crowd", b"") for number in range(500)]
    run = written.write(earlier)
    run.topic = "crowd"
    queue.add([run])
    later = [Entry(2, next(seqs), f"later-{number}", "crowd", b"") for number in range(10)]
    for entry in later:
        queue.push(entry)

    came: list[str] = []
    while batch := written.ids(queue.take(2, count_max=60, bytes_max=1 << 20, is_alive=lambda _: True)):
        came += batch

    assert came == [entry.id for entry in [*earlier, *later]]


def test_a_few_lanes_that_fit_a_batch_leave_nothing_behind() -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    for number in range(300):
        queue.push(Entry(1, next(seqs), f"crowd-{number}", "crowd", b""))
    queue.push(Entry(1, next(seqs), "other", "other", b""))

    assert len(written.ids(queue.take(1, count_max=400, bytes_max=1 << 20, is_alive=lambda _: True))) == 301


@pytest.mark.parametrize("in_memory", [0, 200])
def test_runs_that_lie_side_by_side_give_a_batch_by_the_piece_not_message_by_message(in_memory: int) -> None:
    """A minute of very many messages that sixteen writes filled: each neighbour of a message is in another run."""
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    writes = [[small(number * 7 % 60_000, seqs) for number in range(at, at + 4_000)] for at in range(16)]
    for one in writes:
        queue.add([written.write(list(piece)) for piece in cut(sorted(one))])
    near = [small(number * 20, seqs) for number in range(in_memory)]
    for entry in near:
        queue.push(entry)
    expected = [entry.id for entry in sorted([*chain.from_iterable(writes), *near])]

    came: list[str] = []
    for _ in range(10):
        before = len(written.opened)
        taken = queue.take(60_000, count_max=2_000, bytes_max=1 << 30, is_alive=lambda _: True)
        came += written.ids(taken)
        assert taken.count == 2_000
        assert len(taken.pieces) <= 64
        assert len(written.opened) - before <= 64

    assert came == expected[: len(came)]


@given(
    batches=st.lists(
        st.tuples(st.sampled_from(["memory", "mixed run", "own run"]), st.sampled_from([1, 3, 300]), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    size=st.sampled_from([1, 40, 200, 2_000]),
)
@settings(max_examples=60, deadline=None)
def test_each_topic_comes_in_order_of_due_time_then_arrival_in_whichever_lanes_it_is(
    batches: list[tuple[str, int, int]], steps: list[int], size: int
) -> None:
    written, seqs = Written(), count(1)
    queue = DueQueue(written.read)
    waiting: list[Entry] = []
    for where, messages, first_due_ms in batches:
        crowd = [Entry(first_due_ms + at % 3, next(seqs), "", "crowd", b"") for at in range(messages)]
        other = [] if where == "own run" else [Entry(first_due_ms, next(seqs), "", "other", b"") for _ in range(3)]
        batch = [Entry(entry.due_ms, entry.seq, f"m{entry.seq}", entry.topic, b"") for entry in [*crowd, *other]]
        waiting += batch
        if where == "memory":
            for entry in batch:
                queue.push(entry)
        else:
            run = written.write(batch)
            run.topic = "crowd" if where == "own run" else None
            queue.add([run])

    came: list[str] = []
    for now_ms in [*sorted(steps), 100]:
        while part := written.ids(queue.take(now_ms, count_max=size, bytes_max=1 << 20, is_alive=lambda _: True)):
            came += part
        assert len(came) == sum(entry.due_ms <= now_ms for entry in waiting)

    for topic in ("crowd", "other"):
        expected = [entry.id for entry in sorted(waiting) if entry.topic == topic]
        assert [one for one in came if one in set(expected)] == expected
