"""Runs the benchmarks of all engines, one after the other, and prints one table of their figures.

    ./scripts/test --engines kafka pulsar rocketmq      # once: their jars
    python -m benchmarks.broker_adapter --json > broker_adapter.json
    python -m benchmarks.broker_adapter --engines redis nats --rounds 7

Of each engine: batches of 500 and single messages, by the adapter and by the fastest plain program with the engine's
own client at equal durability; and the drain of an outbox into it, beside a broker that accepts at once. Rates are
medians in messages a second, the ratio is the median of the rounds' ratios. Each engine has a process and servers of
its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.broker_adapter.publish_rounds import Adapter
from benchmarks.harness.report import machine, table

PROGRAMS: Final[Mapping[str, str]] = {
    "redis": "redis.publish",
    "nats": "nats",
    "rabbitmq": "rabbitmq_publish",
    "kafka": "kafka_publish",
    "rocketmq": "rocketmq_publish",
    "pulsar": "pulsar_publish",
}
REPOSITORY: Final = Path(__file__).parents[2]
RUN_SECONDS_MAX: Final = 1_800
QUICK: Final = ("--rounds", "1", "--batches", "1", "--singles", "5", "--drain-rows", "500")


def run(engine: str, options: Sequence[str]) -> dict[str, Any]:
    """The figures of one engine. Raises CalledProcessError where its program fails, which has said why."""
    command = [sys.executable, "-m", f"benchmarks.broker_adapter.{PROGRAMS[engine]}", "--json", *options]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS_MAX, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def rows(engine: str, figures: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Engine, kind, the adapter's rate, the fastest other's and its name, the ratio."""
    return [
        (engine, kind, of[Adapter.name]["median"], of[of["fastest_plain"]]["median"], of["fastest_plain"], of["ratio"])
        for kind, of in figures.items()
        if isinstance(of, dict) and "fastest_plain" in of
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), metavar="ENGINE")
    parser.add_argument("--rounds", type=int, default=4, help="medians of so many (4)")
    parser.add_argument("--drain-rows", type=int, default=5_000, help="of a backlog, a round; 0 for no drain")
    parser.add_argument("--folder", help="where the servers have their files: a disk whose syncs are real")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; figures mean nothing")
    parser.add_argument("--json", action="store_true", help="the figures on stdout")
    chosen = parser.parse_args()
    of_machine = machine()
    engines = {engine: run(engine, _options(chosen)) for engine in chosen.engines}
    columns = ("engine", "kind", "adapter", "fastest", "which", "ratio")
    table("messages a second", columns, [row for engine, figures in engines.items() for row in rows(engine, figures)])
    if chosen.json:
        whole = {"benchmark": "broker_adapter", "options": vars(chosen), "machine": of_machine, "engines": engines}
        print(json.dumps(whole, indent=2))


def _options(chosen: argparse.Namespace) -> list[str]:
    """Those of an engine's program."""
    folder = ["--folder", chosen.folder] if chosen.folder else []
    if chosen.quick:
        return [*QUICK, *folder]
    return ["--rounds", str(chosen.rounds), "--drain-rows", str(chosen.drain_rows), *folder]


if __name__ == "__main__":
    main()
