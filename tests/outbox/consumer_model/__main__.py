"""Runs programs of consumers by seed: python -m tests.outbox.consumer_model FIRST COUNT."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.outbox.consumer_model.in_process import run


def main(first: int, count: int) -> None:
    """Run `count` seeds from `first` on; the first that fails raises."""
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(seed, Path(folder))
            except BaseException:
                print(f"seed {seed} failed", file=sys.stderr)
                raise
    print(f"seeds {first} to {first + count - 1}: held")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
