"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.runtime.durations_and_sizes import parse_duration_ms, parse_size_bytes

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
UNITS_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(number=st.integers(1, 10_000), unit=st.sampled_from([*UNITS_MS]))
def test_durations_are_a_number_and_a_unit(number: int, unit: str) -> None:
    assert parse_duration_ms(f"{number}{unit}") == number * UNITS_MS[unit]
    assert parse_duration_ms(f"{number}.5 {unit}") == round((number + 0.5) * UNITS_MS[unit])


@given(number=st.integers(1, 10_000), unit=st.sampled_from([*UNITS_BYTES]))
def test_sizes_are_a_number_and_a_unit(number: int, unit: str) -> None:
    assert parse_size_bytes(f"{number}{unit}") == number * UNITS_BYTES[unit]
    assert parse_size_bytes(f" {number}.5 {unit}") == round((number + 0.5) * UNITS_BYTES[unit])


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5s 3s", "1e3s", 5, None, True])
def test_anything_else_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="a duration is a number and a unit"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["", "5", "MiB", "-5MiB", "5MB", "5mib", "1e3B", 5, None, True])
def test_anything_else_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="a size is a number and a unit"):
        parse_size_bytes(text)
