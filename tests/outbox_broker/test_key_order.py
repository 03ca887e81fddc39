"""The order of an ordered group by itself: lanes, what is behind them, and the set of bits, against plain lists."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_broker.group.key_order import KeyOrder, key_hash
from outbox_broker.group.sequence_bitmap import PIECE_SEQUENCES, SequenceSet

NEAR_EDGES = st.integers(0, 3 * PIECE_SEQUENCES) | st.sampled_from(
    [0, 1, PIECE_SEQUENCES - 1, PIECE_SEQUENCES, PIECE_SEQUENCES + 1]
)


def file_all(order: KeyOrder, keys: list[str | None], first: int = 0) -> None:
    order.file(first, [key_hash(key) for key in keys])


def look_up(order: KeyOrder, keys: list[str | None], *, settled: int | None = None) -> None:
    """What a pull does where a lane has come to what is behind it: read, hash, file where there is room.

    While it reads, one that is in hand may be settled.
    """
    stretches, _ = order.to_read(0, scan_max=3)
    if settled is not None:
        order.end(settled, settled + 1)
    end = 0
    for first, stop in stretches:
        for sequence in range(first, stop):
            key = key_hash(keys[sequence])
            if order.room(key, sequence) > 0:
                order.file(sequence, [key])
            end = sequence + 1
    order.record_scan(len(keys), backlog_scan_end=end, enough=False)


@given(adds=st.lists(NEAR_EDGES, max_size=40), discards=st.lists(NEAR_EDGES, max_size=40), start=NEAR_EDGES)
def test_a_set_of_sequences_is_what_a_set_of_integers_is(adds: list[int], discards: list[int], start: int) -> None:
    found, plain = SequenceSet(), set(adds)
    for one in adds:
        found.add(one)
    dropped = {one for one in discards if found.discard(one)}

    assert dropped == plain & set(discards)
    plain -= dropped
    assert (list(found), len(found), found.first) == (sorted(plain), len(plain), min(plain, default=None))
    stretches = list(found.ranges(start))
    assert [one for first, end in stretches for one in range(first, end)] == sorted(x for x in plain if x >= start)
    assert all(end < following for (_, end), (following, _) in pairwise(stretches))
    assert found.count_before(start) == sum(one < start for one in plain)
    assert list(SequenceSet(found.pieces())) == sorted(plain)
    found.discard_before(start)
    assert list(found) == sorted(one for one in plain if one >= start)


def test_a_key_s_hash_is_the_same_everywhere_and_never_that_of_no_key() -> None:
    assert key_hash("order-17") == 6_353_913_075_222_410_428
    assert key_hash(None) == 0
    assert 0 < key_hash("") < 2**63


def test_only_the_first_of_each_key_is_ready_and_what_has_no_key_always_is() -> None:
    order = KeyOrder()

    file_all(order, ["a", "a", None, "b", None, "b"])

    assert order.ready(10) == [0, 2, 3, 4]
    assert len(order) == 6


def test_the_next_of_a_key_is_ready_once_the_one_before_is_settled_and_not_when_it_is_handed_out() -> None:
    order = KeyOrder()
    file_all(order, ["a", "a", "b"])

    order.deliver(0, 1)
    assert order.ready(10) == [2]

    order.end(0, 1)
    assert order.ready(10) == [1, 2]


def test_looking_for_what_is_ready_changes_nothing() -> None:
    order = KeyOrder()
    file_all(order, ["a", "b", "c"])

    assert [order.ready(2) for _ in range(3)] == [[0, 1]] * 3


def test_a_key_that_holds_thousands_knows_but_a_few_by_their_places() -> None:
    order, keys = KeyOrder(queue_max=4), ["hot"] * 10_000

    file_all(order, keys)

    keys, _, pieces = order.capture()
    assert [len(waiting) for _, _, waiting, _ in keys] == [4]
    assert sum(len(piece) for _, piece in pieces) <= 10_000 / 8 + PIECE_SEQUENCES / 8
    assert len(order) == 10_000


@pytest.mark.parametrize("settled_while_reading", [False, True])
def test_a_look_for_one_key_passes_over_no_message_of_another_key(settled_while_reading: bool) -> None:
    order, keys = KeyOrder(queue_max=1), ["a", "a", "a", "b", "b", "b", "a", "b"]
    file_all(order, keys)
    for handed in (0, 3, 4):
        order.deliver(handed, handed + 1)
        order.end(handed, handed + 1)
    order.deliver(1, 2)  # b has to be looked up, from its third message on; a has room, and lacks one before that

    if settled_while_reading:
        look_up(order, keys, settled=1)
    else:
        look_up(order, keys)
        order.end(1, 2)
    look_up(order, keys)

    assert order.ready(10) == [2, 5]


def test_dropping_old_messages_lets_the_next_of_a_key_go() -> None:
    order = KeyOrder()
    file_all(order, ["a", "a", "b", "a"])
    order.deliver(0, 1)

    order.drop_before(2)

    assert (order.ready(10), len(order), order.oldest) == ([2, 3], 2, 2)


@settings(max_examples=300)
@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=60),
    queue_max=st.integers(1, 3),
    choices=st.lists(st.integers(0, 100), max_size=200),
)  # fmt: skip
def test_whatever_is_settled_when_each_key_goes_in_order_and_nothing_stays_behind(  # noqa: C901
    keys: list[str | None], queue_max: int, choices: list[int]
) -> None:
    order = KeyOrder(queue_max=queue_max)
    gone: defaultdict[str | None, list[int]] = defaultdict(list)
    in_hand: list[int] = []
    filed = 0

    for choice in [*choices, *[0] * 300]:
        if choice % 3 == 1 and filed < len(keys):
            count = min(1 + choice % 7, len(keys) - filed)
            file_all(order, keys[filed : filed + count], first=filed)
            filed += count
        elif choice % 3 == 2 and in_hand:
            settled = in_hand.pop(choice % len(in_hand))
            order.end(settled, settled + 1)
        elif choice % 5 == 4:
            state = order.capture()
            order = KeyOrder(queue_max=queue_max)
            order.restore(state)
        else:
            look_up(order, keys, settled=in_hand.pop(choice % len(in_hand)) if in_hand and choice % 2 else None)
            for sequence in order.ready(2):
                order.deliver(sequence, sequence + 1)
                gone[keys[sequence]].append(sequence)
                in_hand.append(sequence)
        held = [keys[one] for one in in_hand if keys[one] is not None]
        assert len(held) == len(set(held)), "two of one key in hand"
    while in_hand or len(order):
        while in_hand:
            settled = in_hand.pop()
            order.end(settled, settled + 1)
        for _ in keys:
            look_up(order, keys)
        taken = order.ready(100)
        assert taken or not len(order), "held up for ever"
        for sequence in taken:
            order.deliver(sequence, sequence + 1)
            gone[keys[sequence]].append(sequence)
        in_hand += taken

    for key, sequences in gone.items():
        expected = [number for number, one in enumerate(keys[:filed]) if one == key]
        assert (sequences if key is not None else sorted(sequences)) == expected
    assert order.keys == 0
