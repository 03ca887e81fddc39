"""Histories of failed attempts: short, whatever failed how often."""

from __future__ import annotations

from outbox_core.messages.failure_history import EXPIRED, HISTORY_MAX, History, failed, with_count, without_count


def test_attempts_that_fail_alike_are_one_entry() -> None:
    history: History = ()

    for reason in ("a", "a", "b", "a"):
        history = failed(history, reason)

    assert history == (("a", 2), ("b", 1), ("a", 1))


def test_only_the_newest_entries_are_kept() -> None:
    history: History = ()

    for number in range(HISTORY_MAX + 3):
        history = failed(history, str(number))

    assert [reason for reason, _ in history] == [str(number) for number in range(3, HISTORY_MAX + 3)]


def test_a_reason_of_ours_is_told_without_its_count_and_any_other_as_it_is() -> None:
    assert without_count(with_count(EXPIRED, 3), 3) == EXPIRED
    assert without_count("no stock, 3 attempts left", 3) == "no stock, 3 attempts left"
