"""Dead letters in columns, held against a dictionary of them."""

from __future__ import annotations

import itertools
import struct

from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.group.dead_letters import DeadLetters, DeadRun, DeathDetails, MemoryUse

SEQUENCES_MAX = 40
reasons = st.sampled_from(["bad", "late"])
runs = st.tuples(st.integers(0, SEQUENCES_MAX), st.integers(1, 8), st.integers(1, 2), reasons, st.integers(1, 2))
ranges = st.lists(st.tuples(st.integers(0, SEQUENCES_MAX), st.integers(1, 8)), max_size=4)
Model = dict[int, tuple[int, str, int]]


def seen(letters: DeadLetters) -> Model:
    return {
        sequence: (run.attempts, run.reason, run.dead_at_ms)
        for run in letters
        for sequence in range(run.first, run.end)
    }


def in_order(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (first, end) from (first, count), without overlaps."""
    ordered: list[tuple[int, int]] = []
    for first, count in sorted(found):
        low = max(first, ordered[-1][1]) if ordered else first
        if low < first + count:
            ordered.append((low, first + count))
    return ordered


@given(st.lists(runs | ranges, max_size=30), st.integers(0, SEQUENCES_MAX))
def test_runs_are_added_and_taken_as_single_letters_would_be(
    steps: list[tuple[int, int, int, str, int] | list[tuple[int, int]]], place: int
) -> None:
    memory = MemoryUse()
    letters, model = DeadLetters(memory), Model()
    for step in steps:
        if isinstance(step, list):
            wanted = in_order(step)
            taken = letters.take(wanted)
            gone = [one for first, end in wanted for one in range(first, end) if one in model]
            assert [one for first, end in taken for one in range(first, end)] == gone
            for one in gone:
                del model[one]
        else:
            first, count, attempts, reason, at_ms = step
            free = [sequence for sequence in range(first, first + at_ms * count, at_ms) if sequence not in model]
            added = [DeadRun(sequence, sequence + 1, attempts, reason, at_ms) for sequence in free]
            if attempts > 1:
                letters.add_all(added)
            else:
                for run in added:
                    letters.add(run)
            model.update(dict.fromkeys(free, (attempts, reason, at_ms)))

        assert seen(letters) == model
        assert len(letters) == len(model)
        assert letters.oldest == min(model, default=None)

    assert [place in letters, letters.count_before(place)] == [place in model, sum(one < place for one in model)]
    assert [one for run in letters.runs(place) for one in range(run.first, run.end)] == sorted(
        one for one in model if one >= place
    )
    restored_memory = MemoryUse()
    restored = DeadLetters(restored_memory)
    restored.restore(letters.capture())
    assert [*restored] == [*letters]
    assert (len(restored), restored_memory) == (len(letters), memory)
    restored.take([(0, 2 * SEQUENCES_MAX)])
    assert (restored.capture(), restored_memory.size_bytes) == (DeadLetters().capture(), 0)
    assert_keeps_nothing_of_what_it_gave_up(restored, restored_memory)
    letters.take_from(place)
    assert seen(letters) == {one: details for one, details in model.items() if one < place}
    letters.take_before(place)
    assert (letters.capture(), memory.size_bytes) == (DeadLetters().capture(), 0)
    assert_keeps_nothing_of_what_it_gave_up(letters, memory)


def assert_keeps_nothing_of_what_it_gave_up(emptied: DeadLetters, memory: MemoryUse) -> None:
    """Attributes that were in use before are stored anew, as often as they are used, and given up again."""
    for attempts, reason in itertools.product((1, 2), ("bad", "late")):
        emptied.add(DeadRun(0, 1, attempts, reason, 1))
        emptied.add(DeadRun(2, 3, attempts, reason, 1))
        assert [len(one) for one in emptied.capture()] == [16, 16, 16, 16, 1]

        emptied.take([(0, 1)])
        assert seen(emptied) == {2: (attempts, reason, 1)}
        emptied.take([(2, 3)])
        assert (emptied.capture(), memory.size_bytes) == (DeadLetters().capture(), 0)


def test_neighbours_that_died_alike_are_one_run() -> None:
    letters = DeadLetters()

    for sequence in range(500):
        letters.add(DeadRun(sequence, sequence + 1, 16, "broken", 7))

    assert list(letters) == [DeadRun(0, 500, 16, "broken", 7)]


def test_what_is_captured_is_little_endian_and_what_is_said_stands_there_once() -> None:
    letters = DeadLetters()
    for sequence in (1, 5, 9):
        letters.add(DeadRun(sequence, sequence + 2, 16, "broken", 7))

    firsts, ends, times, _, details = letters.capture()

    assert [firsts, ends, times] == [struct.pack("<QQQ", *one) for one in ((1, 5, 9), (3, 7, 11), (7, 7, 7))]
    assert details == [DeathDetails(1, 16, "broken")]


def test_what_dies_after_a_restore_is_said_under_numbers_of_its_own() -> None:
    letters, restored = DeadLetters(), DeadLetters()
    for sequence in range(3):
        letters.add(DeadRun(2 * sequence, 2 * sequence + 1, 1, f"broken {sequence}", 7))
    letters.take([(0, 1)])
    restored.restore(letters.capture())

    restored.add(DeadRun(10, 11, 1, "broken 10", 7))
    restored.add(DeadRun(12, 13, 1, "broken 2", 7))

    assert [one.reason for one in restored] == ["broken 1", "broken 2", "broken 10", "broken 2"]
    restored.take([(4, 5)])
    assert [one.reason for one in restored] == ["broken 1", "broken 10", "broken 2"]
