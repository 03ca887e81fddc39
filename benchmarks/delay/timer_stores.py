"""Measures stores of timers side by side with many timers pending: add, fire and ack.

    python -m benchmarks.delay.timer_stores [--pending 1000000] [--count 20000] [--rounds 3] [--fsync everysec]
    python -m benchmarks.delay.timer_stores --pending 10000000 --only timing_store tables

`redis_timers` is the broker `?store=timers`, `timing_store` that of the outbox, `tables` the traditional timeout
centre: 8 tables on MariaDB, each commit synced, of which each is scanned for what is due; `rq` and `arq` are task
queues with a scheduler. Payloads are 512 bytes (the timing store has none), batches 500, one worker. Each store on
Redis has a server of its own, all with the same append-only setting. Beside the timers that are pending, so many are
added, made due, fired and settled in each round; the order of the contestants rotates.

Rates are timers a second. `commands`: those that clients send; `reads`: how often the server read from a client's
connection, which is a round trip or 16 KiB of one; both a timer, and both of Redis alone. `bytes_a_timer`: memory of
what is pending, or data and indexes of the tables. A million timers take some 4 GB of memory for all contestants; RQ
and arq are left out where more than `--peers-pending-max` are pending. JSON on stdout.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.delay.timer_contestants import NAMES, PEERS, TABLES_NAME, Contestant, contestants
from benchmarks.harness import report, servers
from benchmarks.harness.rounds import ratio, rotated, spread

PENDING_SECONDS: Final = 10 * 3_600
ADDED_SECONDS: Final = 20 * 3_600
FILLED_A_STEP: Final = 50_000
OURS: Final = ("redis_timers", "timing_store")
STEPS: Final = ("add", "fire_and_ack")

Rates = Mapping[str, Mapping[str, Sequence[float]]]


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__, rounds=3)
    parser.add_argument("--pending", type=int, nargs="+", default=[1_000_000], metavar="TIMERS")
    parser.add_argument("--count", type=int, default=20_000, help="timers of a round")
    parser.add_argument("--fsync", choices=("always", "everysec"), default="everysec", help="of each Redis server")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="STORE", help=", ".join(NAMES))
    parser.add_argument("--peers-pending-max", type=int, default=1_000_000, help="RQ takes 1.5 KB of memory a timer")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the append-only files: a disk that syncs")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.pending, chosen.count, chosen.rounds = [2_000], 500, 1
    settings: Mapping[str, Any] = {}
    by_pending: dict[str, Any] = {}
    for pending in sorted(chosen.pending):
        with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
            settings = database.settings()
            names = [name for name in chosen.only if name not in PEERS or pending <= chosen.peers_pending_max]
            with contestants(names, fsync=chosen.fsync, folder=chosen.folder, database=database) as opened:
                by_pending[str(pending)] = measure(opened, pending=pending, count=chosen.count, rounds=chosen.rounds)
        _show(pending, by_pending[str(pending)])
    report.emit("delay.timer_stores", chosen=chosen, server=settings, results={"pending": by_pending})


def measure(opened: Mapping[str, Contestant], *, pending: int, count: int, rounds: int) -> dict[str, Any]:
    """All rounds of the contestants, each beside the same number of pending timers or some more. Commands and reads are
    those of the last round.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in opened}
    rates: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in opened}
    with report.progress() as bar:
        for name, store in opened.items():
            before = store.memory_bytes()
            _fill(bar, name, store, pending)
            found[name]["bytes_a_timer"] = round((store.memory_bytes() - before) / pending)
        for number in bar.track(range(rounds), description="rounds"):
            for name in rotated(list(opened), number):
                costs = _round(opened[name], count, rates[name])
                found[name] |= costs
    for name, steps in rates.items():
        found[name]["per_second"] = {step: spread(values) for step, values in steps.items()}
    return {"stores": found, "ratios": ratios(rates)}


def ratios(rates: Rates) -> dict[str, dict[str, dict[str, float]]]:
    """By step, of each store of ours to each other: the medians of the rounds' ratios."""
    others = [name for name in rates if name not in OURS]
    return {
        step: {
            name: {other: ratio(rates[name][step], rates[other][step]) for other in others}
            for name in OURS
            if name in rates
        }
        for step in STEPS
    }


def _fill(bar: Any, name: str, store: Contestant, pending: int) -> None:
    task = bar.add_task(f"{name}: pending", total=pending)
    for begin in range(0, pending, FILLED_A_STEP):
        step = min(FILLED_A_STEP, pending - begin)
        store.fill(step, seconds=PENDING_SECONDS)
        bar.advance(task, step)
    bar.remove_task(task)


def _round(store: Contestant, count: int, rates: dict[str, list[float]]) -> dict[str, Mapping[str, float]]:
    """One round: appends the rates, returns commands and reads a timer of each step."""
    counted = [store.counters()]
    seconds = store.add(count, seconds=ADDED_SECONDS)
    counted.append(store.counters())
    store.make_due(count)
    between = store.counters()
    seconds |= store.fire(count)
    if "fire_and_ack" not in seconds:
        seconds["fire_and_ack"] = seconds["fire"] + seconds["ack"]
    after = store.counters()
    for step, took in seconds.items():
        rates[step].append(count / took)
    return {
        f"{what}_a_timer": {
            "add": round((counted[1][what] - counted[0][what]) / count, 3),
            "fire_and_ack": round((after[what] - between[what]) / count, 3),
        }
        for what in between
    }


def _show(pending: int, results: Mapping[str, Any]) -> None:
    rows = [
        (
            name,
            *(of["per_second"].get(step, {}).get("median") for step in ("add", "fire", "ack", "fire_and_ack")),
            of["bytes_a_timer"],
            *(of.get(f"{what}_a_timer", {}).get(step) for what in ("commands", "reads") for step in STEPS),
        )
        for name, of in results["stores"].items()
    ]
    columns = (
        "store", "add/s", "fire/s", "ack/s", "both/s", "bytes", "commands: add", "both", "reads: add", "both",
    )  # fmt: skip
    report.table(f"{pending:,} timers pending", columns, rows)
    of_tables = [
        (step, name, to[TABLES_NAME])
        for step, ours in results["ratios"].items()
        for name, to in ours.items()
        if TABLES_NAME in to
    ]
    report.table("ratio to the tables", ("step", "store", "ratio"), of_tables)


if __name__ == "__main__":
    main()
