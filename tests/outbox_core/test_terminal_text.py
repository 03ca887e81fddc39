"""What people see of texts and times that others wrote."""

from __future__ import annotations

from outbox_core.runtime.terminal_text import escaped, utc_text


def test_what_cannot_be_printed_is_spelled_out() -> None:
    assert escaped("é\x1b[2J\n") == "é\\x1b[2J\\n"
    assert escaped("a\nb\t", but="\n") == "a\nb\\t"


def test_a_time_is_shown_in_utc_and_one_that_no_calendar_has_as_it_is() -> None:
    assert utc_text(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert utc_text(10**20) == f"{10**20} ms"
