"""Generates sources from a random seed: thousands of messages, healthy in many ways, and faults of many kinds.

    python -m benchmarks.reconcile.random_world --seed 7 --messages 20000 --faults 500
    python -m benchmarks.reconcile.random_world --seed 1 --worlds 50

The reconciliation must give each planted verdict, at its id or key and by its rule, and no other finding. Prints the
seed, the kinds with their counts, and every difference; the exit status is 1 where there is one. `--hourly` judges by
the hour. The same seed, messages and faults give the same records.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.reconcile.checking import Verdict, found_in_run, found_in_windows, wanted_of
from benchmarks.reconcile.delivery_faults import group_actions
from benchmarks.reconcile.healthy_kinds import VARIETY, plant_seeks, seeking_groups
from benchmarks.reconcile.planting import GROUPS, STORED_AFTER_MS, TRIPS, Kind, Message, Planted
from benchmarks.reconcile.records import HOUR_MS, START_MS, as_planted
from benchmarks.reconcile.sources import (
    ALL_KINDS,
    LogWriter,
    insert_planted,
    open_shop,
    write_desk,
    write_settings,
)
from outbox_core.journal import journal
from outbox_core.journal.block import SegmentKind
from spark_reconcile import run, run_windows
from spark_reconcile.classify.classification import RULES
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.rules.verdict_rule import Severity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES: Final = 20_000
FAULTS: Final = 500
KINDS_MIN: Final = 20
HOURS_MAX: Final = 6
UNUSUAL_SHARE: Final = 0.15
"""So many of the messages that are no faults are healthy in an unusual way."""
SOUGHT_MAX: Final = 60
OWN_IDS_SHARE: Final = 0.02
"""So many ids are made by the producer, and carry no time."""
RUN_MAX: Final = 40
RUN_MS_MAX: Final = 60_000
"""Of one hand-out: so many messages at most, and so far apart."""
SEGMENT_BYTES: Final = 256 * 1024
_SEVERITIES: Final[Mapping[tuple[str, str], Severity]] = {
    (scope.value, rule.name): rule.severity for scope, rules in RULES.items() for rule in rules
}


def is_fault(kind: Kind) -> bool:
    """Whether a kind ends in a finding, or in something to look at; the others are healthy, or on their way."""
    scratch = Planted(now_ms=START_MS + HOUR_MS)
    kind(scratch, Message("0" * 32, TRIPS[0], "1", START_MS, "body"))
    loud = {Severity.FINDING, Severity.ATTENTION}
    return any(_SEVERITIES[one.scope, one.rule] in loud for one in scratch.expected)


FAULT_KINDS: Final = tuple(kind for kind in ALL_KINDS if is_fault(kind))
UNUSUAL_KINDS: Final = (*(kind for kind in ALL_KINDS if not is_fault(kind)), *VARIETY)


def write_world(folder: Path, *, seed: int, messages: int, faults: int) -> dict[str, Any]:
    """Write the sources and settings of a random world; returns what was planted, as `planted.json` has it."""
    random = Random(seed)
    bookings = _bookings(random, messages)
    last_ms = max(one.created_ms for one in bookings)
    planted = Planted(now_ms=(last_ms // HOUR_MS + 1) * HOUR_MS + HOUR_MS // 2)
    kinds = _kinds(random, faults)
    random.shuffle(kinds)
    flawed = sorted(random.sample(range(messages), faults))
    healthy = sorted(set(range(messages)).difference(flawed))
    for number, kind in zip(flawed, kinds, strict=True):
        _plant(planted, kind, bookings[number])
    sought = sorted(random.sample(healthy, min(SOUGHT_MAX, len(healthy) // 10)))
    plant_seeks(planted, [bookings[number] for number in sought], random)
    plain = []
    for number in sorted(set(healthy).difference(sought)):
        if random.random() < UNUSUAL_SHARE:
            _plant(planted, random.choice(UNUSUAL_KINDS), bookings[number])
        else:
            plain.append(bookings[number])
    _plant_plain(planted, plain, random)
    _write(folder, planted, random)
    told = as_planted(planted, messages=messages)
    (folder / "planted.json").write_text(json.dumps({"seed": seed, **told}))
    return told


def differences(
    folder: Path, planted: Mapping[str, Any], session: SparkSession, *, hourly: bool = False
) -> tuple[list[str], int]:
    """Reconcile a world; a line for each verdict that is missing or too many, and how many were planted."""
    settings = replace(settings_of(read_config(folder / "reconcile.toml"), folder=folder), output=folder / "out")
    now_ms = planted["now_ms"]
    found: Counter[Verdict]
    if hourly:
        run_windows(settings, since_ms=START_MS, now_ms=now_ms, session=session, pause=lambda _: None)
        found, before_ms = found_in_windows(settings.output), now_ms // HOUR_MS * HOUR_MS
    else:
        summary = run(settings, session=session, now_ms=now_ms, pause=lambda _: None)
        found, before_ms = found_in_run(Path(summary.folder)), None
    wanted = wanted_of(dict(planted), before_ms=before_ms)
    lines = [f"too many: {count} x {' '.join(one)}" for one, count in sorted((found - wanted).items())]
    lines += [f"missing: {count} x {' '.join(one)}" for one, count in sorted((wanted - found).items())]
    return lines, wanted.total()


def _bookings(random: Random, count: int) -> list[Message]:
    """Bookings in order of time, over some hours; some have ids of the producer's own."""
    span_ms = random.randint(2, HOURS_MAX) * HOUR_MS
    bookings = []
    for number, created_ms in enumerate(sorted(random.randrange(span_ms) for _ in range(count))):
        at_ms, digits = START_MS + created_ms, f"{random.getrandbits(72):018x}"
        id_ = f"own-{number}" if random.random() < OWN_IDS_SHARE else f"{at_ms:012x}7{digits[:3]}8{digits[3:]}"
        bookings.append(Message(id_, random.choice(TRIPS), str(number), at_ms, f"{number} {digits}"))
    return bookings


def _kinds(random: Random, faults: int) -> list[Kind]:
    """The kinds of the faults, at least KINDS_MIN of them, in random shares."""
    chosen = random.sample(FAULT_KINDS, random.randint(min(KINDS_MIN, faults), min(len(FAULT_KINDS), faults)))
    weights = [random.random() + 0.05 for _ in chosen]
    return [*chosen, *random.choices(chosen, weights, k=faults - len(chosen))]


def _plant(planted: Planted, kind: Kind, one: Message) -> None:
    kind(planted, one)
    planted.kinds[kind.__name__] += 1


def _plant_plain(planted: Planted, bookings: Sequence[Message], random: Random) -> None:
    """Bookings for which all is well: each group takes them in runs of random length."""
    taken: dict[str, list[tuple[int, Message]]] = {}
    for one in bookings:
        planted.asked(one)
        planted.sent(one)
        mine = taken.setdefault(one.topic, [])
        if mine and (one.created_ms - mine[0][1].created_ms > RUN_MS_MAX or random.random() < 1 / RUN_MAX):
            _take(planted, taken.pop(one.topic))
            mine = taken.setdefault(one.topic, [])
        mine.append((planted.store(one), one))
    for mine in taken.values():
        _take(planted, mine)
    planted.kinds["plain"] += len(bookings)


def _take(planted: Planted, taken: Sequence[tuple[int, Message]]) -> None:
    """Every group is handed a run, and acknowledges it; no other message of the topic was stored meanwhile."""
    first, topic = taken[0][0], taken[0][1].topic
    at_ms = max(one.created_ms for _, one in taken) + STORED_AFTER_MS + 8
    for group in GROUPS[topic]:
        runs = [journal.HandedRun(first, len(taken), 1, 1)]
        planted.actions.append(
            journal.Handed(topic=topic, group=group, at_ms=at_ms, visible_at_ms=at_ms + 30_000, runs=runs)
        )
        planted.actions.append(journal.Settled(topic=topic, group=group, at_ms=at_ms + 20, runs=[(first, len(taken))]))
    for _, one in taken:
        planted.handle(one, at_ms=at_ms + 10)


def _write(folder: Path, planted: Planted, random: Random) -> None:
    """A database, a second one with an inbox, an archive half in the table and half in files, a broker's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_desk(folder / "desk.db", planted)
    moved = [random.random() < 0.5 for _ in planted.archive]
    with closing(open_shop(folder / "shop.db")) as shop:
        insert_planted(shop, planted)
        rows = [_archived(*one) for one, is_moved in zip(planted.archive, moved, strict=True) if not is_moved]
        names = ", ".join(_ARCHIVED)
        shop.executemany(f"insert into outbox_archive ({names}) values ({', '.join('?' * len(_ARCHIVED))})", rows)
        shop.commit()
    rows = [_archived(*one) for one, is_moved in zip(planted.archive, moved, strict=True) if is_moved]
    (folder / "archive").mkdir()
    pq.write_table(_table(rows), folder / "archive" / "part.parquet")
    _write_log(folder / "broker", SegmentKind.MESSAGES, planted.stored)
    actions = sorted(planted.actions, key=lambda action: action.at_ms)
    groups = [*group_actions(START_MS), *seeking_groups(START_MS)]
    _write_log(folder / "broker", SegmentKind.ACTIONS, [*groups, *actions])
    write_settings(folder)


_ARCHIVED: Final = (
    "id", "kind", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us", "sent_at_us", "attempts",
    "outcome",
)  # fmt: skip


def _archived(one: Message, sent_ms: int, outcome: str) -> tuple[Any, ...]:
    attempts = 2 if outcome == "duplicate" else 1
    return (
        one.id, one.kind, one.topic, one.key, one.sha256, one.due_ms, one.created_ms * 1000, sent_ms * 1000, attempts,
        outcome,
    )  # fmt: skip


def _table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    integers = {"deliver_at_ms", "created_at_us", "sent_at_us", "attempts"}
    schema = pa.schema([(name, pa.int64() if name in integers else pa.string()) for name in _ARCHIVED])
    return pa.Table.from_pylist([dict(zip(_ARCHIVED, row, strict=True)) for row in rows], schema=schema)


def _write_log(folder: Path, kind: SegmentKind, records: Sequence[Any]) -> None:
    log = LogWriter(folder, kind, SEGMENT_BYTES)
    for one in records:
        log.add(one)
    log.close()


def main() -> None:
    from spark_reconcile.load.spark_session import spark_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one; it is printed")
    parser.add_argument("--worlds", type=int, default=1, help="so many, of this seed and those that follow it")
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--hourly", action="store_true", help="judge by the hour")
    parser.add_argument("--folder", type=Path, default=None, help="keep the worlds here; default: a temporary folder")
    chosen = parser.parse_args()
    first = secrets.randbits(32) if chosen.seed is None else chosen.seed
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="random-world-") as scratch:
        log = Path(scratch) / "spark.log"
        with spark_session("local[2]", log=log) as session:
            for seed in range(first, first + chosen.worlds):
                folder = (chosen.folder or Path(scratch)) / str(seed)
                wrong += bool(_reconciled(folder, session, seed, chosen))
                if chosen.folder is None:
                    shutil.rmtree(folder)
    raise SystemExit(1 if wrong else 0)


def _reconciled(folder: Path, session: SparkSession, seed: int, chosen: argparse.Namespace) -> list[str]:
    """Write a world, reconcile it, and print what was planted and each difference; returns the differences."""
    print(f"seed: {seed}", flush=True)
    told = write_world(folder, seed=seed, messages=chosen.messages, faults=chosen.faults)
    if chosen.worlds == 1:
        for name, count in sorted(told["kinds"].items()):
            print(f"{count:>7,} {name}", flush=True)
    lines, planted = differences(folder, told, session, hourly=chosen.hourly)
    for line in lines:
        print(line)
    counts = {"messages": chosen.messages, "faults": chosen.faults, "kinds": len(told["kinds"]), "verdicts": planted}
    print(json.dumps({"seed": seed, **counts, "hourly": chosen.hourly, "differences": len(lines)}), flush=True)
    return lines


if __name__ == "__main__":
    main()
