"""The reasons of nacks: told whole while there is room for them, and never more than that in memory or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from sys import getsizeof

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.group.consumer_group import Group, Requeue
from outbox_broker.group.failure_reasons import NOT_KEPT, ReasonBudget, Reasons
from outbox_broker.log.topic_index import BlockPlace, Runs
from outbox_broker.state import checkpoint
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.messages.failure_history import EXPIRED, HISTORY_MAX, REFUSED
from outbox_core.messages.limits import REASON_CHARS_MAX
from outbox_core.messages.message import DeadLetter, GroupConfig, Message
from tests.outbox_broker.action_log import actions_of

TOPIC, GROUP = "orders", "billing"
LONG = "\N{COLLISION SYMBOL}" * (REASON_CHARS_MAX - 24)
MESSAGE_BYTES_MAX = 120
"""What a checkpoint may have of a message with HISTORY_MAX different reasons, beside their texts."""
type_of_open = Callable[..., Engine]


class NoBlocks:
    """No footers."""

    def load(self, place: BlockPlace) -> Runs:
        """Never asked."""
        raise StorageFailed(f"there is no block {place}")


def state_with_retries(
    count: int, *, attempts: int, reasons: Callable[[int, int], str], **options: int
) -> tuple[BrokerState, Group]:
    """A state with so many messages that wait for another attempt, each a run of its own."""
    state = BrokerState(EngineOptions(**options), NoBlocks())
    group = state.declare(TOPIC, GROUP, GroupConfig(max_attempts=1_000), position=0)
    for attempt in range(1, attempts + 1):
        for sequence in range(0, 2 * count, 2):
            group.deliver(sequence, 1, delivery=attempt, attempt=attempt, visible_at_ms=10)
            group.requeue(Requeue(sequence, 1, 20, attempt), reason=reasons(sequence, attempt))
    return state, group


def data_of(state: BrokerState) -> bytes:
    return b"".join(checkpoint.parts_of(state, messages_end=0))


def texts_of(group: Group) -> list[tuple[str | None, tuple[tuple[str, int], ...]]]:
    return [(group.reason_of(one), group.reasons.history_of(one.history)) for one in group.unsettled]


def give_back(engine: Engine, *, reason: Callable[[str], str], delay_ms: int = 0) -> int:
    """Nack what is ready, once, each message for a reason of its own."""
    deliveries = engine.puller.pull(TOPIC, GROUP, max_messages=1_000)
    for one in deliveries:
        engine.settler.nack([one.receipt], delay_ms=delay_ms, reason=reason(one.id))
    return len(deliveries)


def dead(engine: Engine) -> dict[str, DeadLetter]:
    page, after = engine.admin.dead(TOPIC, GROUP, limit=1_000)
    assert after is None
    return {one.id: one for one in page}


def publish(engine: Engine, count: int, *, max_attempts: int) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=max_attempts))
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(count)])


# -- texts under numbers -----------------------------------------------------------------------------------------------


def test_equal_reasons_have_one_number_and_the_text_comes_back() -> None:
    reasons = Reasons()

    numbers = [reasons.number_of(text) for text in ("no stock", "gone", "no stock")]

    assert numbers[0] == numbers[2] != numbers[1]
    assert [reasons.text(one) for one in numbers] == ["no stock", "gone", "no stock"]


def test_a_reason_goes_with_the_last_run_that_refers_to_it() -> None:
    budget = ReasonBudget()
    reasons = Reasons(budget)
    number = reasons.number_of("no stock")
    reasons.use(number, ((number, 2),), more=1)
    reasons.use(number, (), more=1)

    reasons.use(number, ((number, 2),), more=-1)
    reasons.forget_unused()
    assert reasons.text(number) == "no stock"
    assert budget.size_bytes == reasons.size_bytes > getsizeof("no stock")

    reasons.use(number, (), more=-1)
    reasons.forget_unused()
    assert (budget.size_bytes, reasons.size_bytes, reasons.capture()) == (0, 0, [])


def test_beyond_the_budget_new_reasons_are_not_kept_but_a_groups_own_share_is_and_so_are_the_brokers_words() -> None:
    budget = ReasonBudget(bytes_max=20_000, group_bytes_min=5_000)
    noisy, quiet = Reasons(budget), Reasons(budget)

    kept = [noisy.text(noisy.number_of(f"{number} {'x' * 500}")) != NOT_KEPT for number in range(100)]
    own = [quiet.text(quiet.number_of(f"{number} {'y' * 500}")) != NOT_KEPT for number in range(100)]

    assert kept == [True] * kept.count(True) + [False] * kept.count(False)
    assert 15 <= kept.count(True) <= 25
    assert 4 <= own.count(True) <= 6
    assert budget.size_bytes <= 25_000
    assert [quiet.text(quiet.number_of(one)) for one in (EXPIRED, REFUSED, NOT_KEPT)] == [EXPIRED, REFUSED, NOT_KEPT]


def test_reasons_come_back_under_their_numbers_and_new_ones_get_others() -> None:
    reasons = Reasons()
    number = reasons.number_of("no stock")
    budget = ReasonBudget()
    restored = Reasons(budget)

    restored.restore(reasons.capture())

    assert restored.number_of("no stock") == number
    assert restored.number_of("gone") != number
    assert budget.size_bytes == restored.size_bytes


# -- what waits for another attempt ------------------------------------------------------------------------------------


def test_what_waits_for_another_attempt_takes_as_much_of_a_checkpoint_for_long_reasons_as_for_short_ones() -> None:
    count = 3_000
    sizes = []
    for text in ("x", LONG):
        state, group = state_with_retries(
            count, attempts=HISTORY_MAX, reasons=lambda sequence, attempt, text=text: f"{sequence} {attempt} {text}",
            reasons_bytes_max=1 << 20,
        )  # fmt: skip
        sizes.append(len(data_of(state)))
        assert state.reason_budget.size_bytes <= 1 << 20
        assert group.reasons.size_bytes == state.reason_budget.size_bytes

    assert sizes[1] <= count * MESSAGE_BYTES_MAX + (1 << 20)


def test_the_same_reasons_over_and_over_are_kept_once() -> None:
    state, group = state_with_retries(2_000, attempts=3, reasons=lambda _, attempt: f"{attempt % 2} {LONG}")

    assert len(group.reasons.capture()) == 2
    assert len(data_of(state)) < 2_000 * MESSAGE_BYTES_MAX + 10_000
    assert set(texts_of(group)) == {(f"1 {LONG}", ((f"1 {LONG}", 1), (f"0 {LONG}", 1), (f"1 {LONG}", 1)))}


def test_a_checkpoint_brings_back_reasons_and_histories() -> None:
    state, group = state_with_retries(50, attempts=4, reasons=lambda sequence, attempt: f"{sequence % 5} {attempt}")

    restored = BrokerState(EngineOptions(), NoBlocks())
    checkpoint.restore(restored, data_of(state))

    again = restored.group(TOPIC, GROUP)
    assert again is not None
    assert texts_of(again) == texts_of(group)
    assert again.reasons.size_bytes == group.reasons.size_bytes
    again.ack(0, 100)
    assert restored.reason_budget.size_bytes == 0


def test_a_checkpoint_brings_back_that_a_reason_was_not_kept() -> None:
    state, group = state_with_retries(
        3, attempts=1, reasons=lambda sequence, _: f"{sequence} {LONG}", reasons_bytes_max=1, group_reasons_bytes_min=0
    )
    restored = BrokerState(EngineOptions(), NoBlocks())

    checkpoint.restore(restored, data_of(state))

    again = restored.group(TOPIC, GROUP)
    assert again is not None
    assert texts_of(again) == texts_of(group) == [(NOT_KEPT, ((NOT_KEPT, 1),))] * 3


@pytest.mark.parametrize("end", ["acknowledged", "sought", "dropped", "deleted", "dead"])
def test_reasons_are_let_go_of_with_their_messages(end: str) -> None:
    state, group = state_with_retries(50, attempts=2, reasons=lambda sequence, attempt: f"{sequence} {attempt}")
    assert state.reason_budget.size_bytes > 0

    match end:
        case "acknowledged":
            for sequence in range(100):
                group.ack(sequence)
        case "sought":
            group.seek(0, generation=1)
        case "dropped":
            group.drop_before(100, offset=0)
        case "deleted":
            state.delete_group(TOPIC, GROUP)
        case _:
            group.config = GroupConfig(max_attempts=2)
            for one in group.visible_again(now_ms=30, count_max=1_000)[1]:
                group.die(one, at_ms=30)
            assert len(group.dead) == 50

    assert (state.reason_budget.size_bytes, len(group.unsettled)) == (0, 0)


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_dead_letter_tells_every_reason_whole_while_there_is_room(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, 5, max_attempts=3)

    for attempt in range(3):
        assert give_back(engine, reason=lambda one, attempt=attempt: f"{attempt} {one} {LONG}") == 5
    engine = open_engine()

    for name, letter in dead(engine).items():
        assert letter.reason == f"2 {name} {LONG}"
        assert letter.history == tuple((f"{attempt} {name} {LONG}", 1) for attempt in range(3))


def test_beyond_the_room_the_last_reason_of_a_dead_letter_is_whole_and_the_history_counts_on(
    open_engine: type_of_open, folder: Path
) -> None:
    options = {"reasons_bytes_max": 1, "group_reasons_bytes_min": 1}
    engine = open_engine(**options)
    publish(engine, 5, max_attempts=4)

    for attempt in range(4):
        assert give_back(engine, reason=lambda one, attempt=attempt: f"{attempt} {one} {LONG}") == 5
    engine = open_engine(**options)

    for name, letter in dead(engine).items():
        assert letter.reason == f"3 {name} {LONG}"
        assert letter.history == ((NOT_KEPT, 3), (f"3 {name} {LONG}", 1))
    assert _logged_reasons(folder) >= {f"{attempt} m{number} {LONG}" for attempt in range(4) for number in range(5)}


def test_histories_of_long_reasons_make_no_more_dead_letters_than_there_is_room_for(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    room = 1 << 20
    engine = open_engine(dead_letters_bytes_max=room, durability=Durability.OS)
    publish(engine, 1_000, max_attempts=3)
    for attempt in range(2):
        assert give_back(engine, reason=lambda one, attempt=attempt: f"{attempt} {one} {LONG}") == 1_000
    receipts = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000, invisible_ms=1_000)]
    engine.settler.extend(
        receipts, invisible_ms=1_000, begun=True
    )  # else one of them alone may have ended its consumer
    clock.advance(2_000)

    assert engine.puller.pull(TOPIC, GROUP) == []

    figures = engine.admin.group_figures(TOPIC, GROUP)
    assert figures["dead"] + figures["backlog"] == len(receipts)
    letter_bytes = 3 * getsizeof(LONG)
    assert room // letter_bytes // 2 < figures["dead"] < 2 * room // letter_bytes + 200


def _logged_reasons(folder: Path) -> set[str]:
    """All reasons that the action log tells."""
    found = set()
    for action in actions_of(folder):
        if isinstance(action, journal.Requeued | journal.Died):
            found.add(action.reason or "")
    return found
