"""Exponential backoff: the delay before the next retry. Pure; randomness is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff with a cap: initial * multiplier ** (attempt - 1), never above `max_ms`.

    `jitter` spreads each delay evenly over [(1 - jitter) * delay, delay], at the cap too, so that rows that failed
    together are not retried together.
    """

    initial_ms: int = 1_000
    multiplier: float = 2.0
    max_ms: int = 5 * 60 * 1000
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if self.initial_ms < 1 or self.max_ms < self.initial_ms:
            raise ValueError("backoff needs 1 <= initial_ms <= max_ms")
        if self.multiplier < 1 or not 0 <= self.jitter <= 1:
            raise ValueError("backoff needs multiplier >= 1 and 0 <= jitter <= 1")

    def delay_ms(self, attempt: int, random: Random | None = None) -> int:
        """Returns the delay after the `attempt`-th failure (1 is the first); without `random` there is no jitter."""
        delay = float(self.max_ms)
        if self.multiplier == 1:
            delay = float(self.initial_ms)
        else:
            # Multiply step by step and stop at the cap: 2.0 ** 1025 overflows a float and would end a loop for good.
            grown = float(self.initial_ms)
            for _ in range(max(attempt, 1) - 1):
                grown *= self.multiplier
                if grown >= self.max_ms:
                    break
            delay = min(grown, delay)
        if random is not None:
            delay -= random.random() * self.jitter * delay
        return max(1, int(delay))
