"""Writes the table of figures in docs/benchmarks.md, from the JSON that the benchmarks printed.

    python -m benchmarks.publish_cost > benchmarks/figures/publish_cost.json
    python -m benchmarks.figures_table             # writes the table
    python -m benchmarks.figures_table --check     # only compares: exit status 1 where the page says something else

A row is one value of one program's output, with its target. Rows of programs without a file are left out, so the table
has what was measured and nothing else. A file made with --quick is refused. Behind a `-` in a file's name stands what
its run was made for, where a program has two: `delay.cluster.lateness-hour`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "benchmarks" / "figures"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- figures: python -m benchmarks.figures_table -->"
END: Final = "<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure: the program, its label, where its values are in the program's output, and what was aimed at."""

    program: str
    label: str
    paths: Sequence[tuple[str, ...]]
    target: str = "-"


def _adapter(kind: str, label: str, target: str = "-") -> Row:
    engines = ("redis", "nats", "rabbitmq", "kafka", "rocketmq", "pulsar")
    return Row("broker_adapter", label, [("engines", engine, kind, "ratio") for engine in engines], target)


def _rates(figure: str, label: str, target: str = "-") -> Row:
    peers = ("redis_streams", "nats_jetstream", "rabbitmq")
    return Row("broker.rates", label, [("ratios", peer, figure) for peer in peers], target)


def _timers(step: str, store: str, label: str) -> Row:
    others, targets = ("tables", "rq", "arq"), "5 / 1.5 / 1.5"
    paths = [("pending", "1000000", "ratios", step, store, other) for other in others]
    return Row("delay.timer_stores", label, paths, targets)


ROWS: Final = (
    Row("publish_cost", "publish to hand-written, 1 / 8 threads",
        [("workers", number, "to_hand_written", "ours") for number in ("1", "8")], "0.97"),
    Row("publish_cost", "publish to pactix / modupy / outbox-sqs, which only write, 1 thread",
        [("workers", "1", f"ours_to_{peer}") for peer in ("pactix", "modupy", "outbox_sqs")], "1.3 to pactix"),
    Row("publish_cost", "time of ten messages in a transaction to one's, 1 / 8 threads",
        [("workers", number, "ten_messages_to_one") for number in ("1", "8")], "less than 2"),
    Row("commit_to_handler", "commit to handler to the floor, p50: HTTP / embedded",
        [(kind, "ours_to_floor", "p50_ms") for kind in ("http", "embedded")], "at most 2"),
    Row("drain", "drain to the floor: 10,000 / 200,000 / 1,000,000 rows",
        [("sizes", size, "to_floor", "ours") for size in ("10000", "200000", "1000000")], "0.7"),
    Row("drain", "drain of 1,000,000 rows to 10,000", [("largest_to_smallest", "ours")], "0.9"),
    Row("drain_after_outage", "drain after an outage to unordered: 1 / 2 / 1,000 keys",
        [("to_unordered", keys) for keys in ("1", "2", "1000")], "0.5"),
    Row("claim", "idle queries a second", [("idle", "queries_per_second")], "at most 0.2"),
    Row("recovery", "a killed producer's rows are sent, s after its lease of 3 / 20 s",
        [("by_lease_ms", lease, "after_lease_seconds", "median") for lease in ("3000", "20000")], "at most 1"),
    Row("history", "with a long archive / and an open transaction, to without: publishing at 8 threads, to by hand",
        [("to_fresh", phase, "publish at 8, to hand-written") for phase in ("archive", "open")], "1"),
    Row("history", "the same: drain, to its floor",
        [("to_fresh", phase, "drain, to its floor") for phase in ("archive", "open")], "1"),
    _rates("publish_500", "broker, publishing by 500: to Redis / NATS / RabbitMQ", "2"),
    _rates("consume_500", "the same, consuming by 500", "1.5"),
    _rates("publish_1_at_32", "the same, publishing one at a time, 32 on their way", "2"),
    _rates("p99_ms", "the same, p99 from publisher to consumer at 1,000/s (above 1: sooner)"),
    Row("broker.topics", "a message each on 40,000 topics, to one topic: embedded / HTTP",
        [("results", "topics", kind, "ratio") for kind in ("embedded", "http")], "0.7"),
    Row("broker.filter", "10 subscriptions, share below asking each: each names a type / mixed / a tenth name none",
        [("shapes", shape, "sizes", "10", "traffic", "wanted", "below_unindexed")
         for shape in ("type", "mixed", "loose")], "0.32"),
    Row("broker.filter", "1,000 subscriptions, the same",
        [("shapes", shape, "sizes", "1000", "traffic", "wanted", "below_unindexed")
         for shape in ("type", "mixed", "loose")], "0.32"),
    Row("broker.attacks", "the largest of all attacks: server's memory in MiB / longest answer in ms",
        [("largest", name) for name in ("rss_mib", "longest_probe_ms")], "512 / 50"),
    Row("broker.backup", "beside an online backup, to without: publishing by 500 / lateness p50 / p99",
        [("to_alone", name) for name in ("publish_500", "late_p50_ms", "late_p99_ms")], "0.9 / 1.1 / 1.1"),
    _adapter("batches_of_500", "adapters to plain, by 500: Redis / NATS / RabbitMQ / Kafka / RocketMQ / Pulsar", "0.8"),
    _adapter("one_at_a_time", "the same, one at a time", "0.8"),
    _adapter("drain", "the drain into each, to a broker that accepts at once"),
    _timers("add", "timing_store", "timing store, adds beside a million: to tables / RQ / arq"),
    _timers("fire_and_ack", "timing_store", "the same, fire and ack"),
    _timers("add", "redis_timers", "Redis timers, adds beside a million: to tables / RQ / arq"),
    _timers("fire_and_ack", "redis_timers", "the same, fire and ack"),
    Row("delay.timing_store", "timing store, lateness at 1,000/s, p50 / p99 in ms",
        [("lateness_ms", "timing", name) for name in ("p50", "p99")], "p99 under 20"),
    Row("delay.timing_store", "rebuild of 1,000,000 timers in s: unbounded / by default",
        [("rebuild", name, "seconds") for name in ("unbounded", "default")]),
    Row("delay.lateness", "broker, lateness at 1,000/s, p99 in ms: embedded / HTTP / Redis / RabbitMQ",
        [(kind, "late_ms", "p99") for kind in ("embedded", "http", "redis", "rabbitmq")]),
    Row("delay.two_years", "scheduled over two years, to publishing for now: embedded / HTTP",
        [(kind, "share") for kind in ("write", "http")]),
    Row("delay.same_second", "all due in one second, consumed, to published for now: embedded / HTTP",
        [(kind, "share") for kind in ("embedded", "http")]),
    Row("delay.cluster.publish_rates", "scheduled publishes to a cluster of 1 / 8 / 64 shards, to the local store",
        [(f"{number} shard{'s' * (number > 1)}", "to_local") for number in (1, 8, 64)], "0.5 at 8"),
    Row("delay.cluster.takeover", "takeover in s with nothing / 1,000,000 messages pending",
        [("seconds", pending, "slowest", "median") for pending in ("0", "1000000")], "under 8"),
    Row("delay.cluster.lateness", "lateness at 1,000/s, p50 / p99 in ms: a cluster",
        [("cluster", name, "median") for name in ("p50_ms", "p99_ms")], "p99 under 20"),
    Row("delay.cluster.lateness", "the same: one process on a local disk",
        [("process", name, "median") for name in ("p50_ms", "p99_ms")]),
    Row("delay.cluster.lateness-hour", "a cluster for an hour at 1,000/s, p50 / p99 in ms",
        [("cluster", name, "median") for name in ("p50_ms", "p99_ms")], "p99 under 20"),
    Row("delay.cluster.lateness-hour", "the same, a node's memory in MiB in the second / last tenth",
        [("cluster", name, "median") for name in ("early_memory_mib", "memory_mib")], "under 512, and flat"),
)  # fmt: skip


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    chosen = parser.parse_args()
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_end:
        sys.exit(f"{PAGE}: no lines {BEGIN!r} and {END!r} to write between")
    written = f"{before}{BEGIN}\n\n{table(FOLDER)}\n{END}{after}"
    if not chosen.check:
        PAGE.write_text(written)
    elif written != page:
        sys.exit("the table is not that of benchmarks/figures; run python -m benchmarks.figures_table")


def table(folder: Path) -> str:
    """Returns the table of all files in a folder, in Markdown. Raises ValueError for a file that is no measurement."""
    outputs = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    lines = ["| figure | measured | target | made by, on |", "| --- | --- | --- | --- |"]
    lines += [_line(row, outputs[row.program]) for row in ROWS if row.program in outputs]
    return "\n".join([*lines, "", *_machines(outputs)]) + "\n"


def _read(path: Path) -> dict[str, Any]:
    output: dict[str, Any] = json.loads(path.read_text())
    program, _, _ = path.stem.partition("-")
    if output.get("benchmark") != program or output.get("quick") or output.get("options", {}).get("quick"):
        raise ValueError(f"{path}: not the whole output of {path.stem}")
    return output


def _line(row: Row, output: dict[str, Any]) -> str:
    values = " / ".join(_text(_at(output, path)) for path in row.paths)
    return f"| {row.label} | {values} | {row.target} | `{row.program}`, {output['machine']['at'][:10]} |"


def _machines(outputs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields where each file was made."""
    for name, output in outputs.items():
        of = output["machine"]
        load = ", ".join(f"{one:.1f}" for one in of["load_before"])
        yield f"- `{name}`: {of['processor']}, {of['cores']} cores, Python {of['python']}, load before {load}."


def _at(output: Any, path: Sequence[str]) -> float:
    for name in path:
        output = output[name]
    return float(output)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
