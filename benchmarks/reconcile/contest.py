"""Runs one contestant on the records of benchmarks.reconcile.records, in a process of its own; prints JSON.

    python -m benchmarks.reconcile.contest digests --folder data

`digests`: by the hour, as `outbox reconcile run --since` does it (compare, drill, judge, write the hours' tables).
`everything`: the same with every row looked at. `again`: after `digests` in another process, the records of one hour
changed; then of another hour, in the process that is warm by now. `ratio` is of the first, cold like the whole run.
`join`: a plain full outer join of the three tables in Spark, with counts by what is missing or differs. `duckdb`: that
join in DuckDB. `whole` and `hourly`: the job as a user runs it, on what benchmarks.reconcile.sources wrote. Verdicts
are held against what was planted, each at its id and by its rule, before a time is printed, and so are a join's counts.
Shuffled bytes are the sum over Spark's event log; memory is the highest that the Java process had; processor time is
all of that process's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reconcile.checking import also_changed, check, found_in_run, found_in_windows, planted_in
from benchmarks.reconcile.planting import NEWS, TRIPS
from benchmarks.reconcile.records import START_MS
from spark_reconcile.compare.file_digest_cache import FileDigestCache
from spark_reconcile.compare.key_digests import MESSAGES
from spark_reconcile.core.dataframes import listed
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.settings import BusinessRule, Grace, RunLimits, Settings
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.load.read_plan import SourcePlan
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.recheck.run_context import RereadSuspects, RunContext
from spark_reconcile.recheck.suspect_rereading import Suspects, ids_frame, keys_frame
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.runs.reconciliation import compare, evaluate_windows
from spark_reconcile.sources.broker_logs import ACTION_SCHEMA
from spark_reconcile.sources.parquet_archives import read_archive
from spark_reconcile.sources.parquet_file_identity import Files, some_files
from spark_reconcile.sources.sql_statements import INPUT_SCHEMA, InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MEDIUM_MESSAGES_MAX = 4_000_000
"""Up to so many, Java is set for a medium run, for every contestant on Spark."""
JOIN = """
    select case when b.topic is null then 'no business row' when a.id is null then 'not published'
                when m.id is null then 'not stored' when m.body_sha256 != a.body_sha256 then 'changed'
                else 'settled' end as verdict, count(*) as n
    from business b full outer join archive a on a.topic = b.topic and a.message_key = b.message_key
    full outer join messages m on m.id = a.id group by 1 order by 1
"""


JOINED: Mapping[str, Mapping[str, int]] = {
    "lost": {"not stored": 1}, "phantom": {"no business row": 1}, "changed": {"changed": 1}, "doubled": {"settled": 2},
    "unannounced": {"not published": 1}, "rerouted": {"no business row": 1}, "one_message_for_two": {"settled": 2},
    "published_twice": {"settled": 2}, "keyless": {"not published": 1}, "unrecorded": {"no business row": 2},
    "unarchived": {"not published": 1, "no business row": 1}, "foreign": {"no business row": 1},
}  # fmt: skip
"""What the join counts of each kind of fault; of any other one that is settled, as it is not asked about it."""


def say(step: str) -> None:
    """Progress on stderr."""
    print(f"{time.monotonic():.1f} {step}", file=sys.stderr, flush=True)


def plain_settings(output: Path) -> Settings:
    """One rule a topic; no database is opened."""
    rules = [
        BusinessRule(name=topic, table="trip", key_column="id", time_column="at", topic=topic, urls=["sqlite:///none"])
        for topic in TRIPS
    ]
    return Settings(
        database_url="sqlite:///none", broker_data=output, output=output, rules=rules,
        grace=Grace(confirm_after_seconds=0),
    )  # fmt: skip


def evidence_of(spark: SparkSession, folder: Path) -> Evidence:
    """The inputs, read from Parquet where they are asked for, and never kept."""
    files = [
        _files(spark, folder / "business", InputKind.BUSINESS, as_business),
        _files(spark, folder / "messages", MESSAGES, plain),
        read_archive(spark, folder / "archive").files,
    ]
    business, messages, archive = (one.read(one.names) for one in files)
    counts = [
        InputCount(input_kind=InputKind.ARCHIVE, topic=topic, note="", rows=1, first_ms=START_MS, last_ms=0)
        for topic in (*TRIPS, NEWS)
    ]
    return Evidence(
        inboxes=listed(spark, [], INPUT_SCHEMA), messages=messages,
        actions=listed(spark, [], ACTION_SCHEMA), rows=business.unionByName(archive), tables=(),
        groups=list[GroupFacts](), counts=counts, archive_reach_ms=0, broker_reach_ms=0, actions_reach_ms=0,
        business_reaches=dict.fromkeys(TRIPS, 0), files=files, loose=(None, None),
    )  # fmt: skip


def _files(spark: SparkSession, folder: Path, input_kind: str, shaped: Callable[[DataFrame], DataFrame]) -> Files:
    """An input's files."""
    whole = spark.read.parquet(str(folder))
    read = some_files(spark, folder, whole)
    return Files(input_kind=input_kind, names=whole.inputFiles(), read=lambda names: shaped(read(names)))


def as_business(found: DataFrame) -> DataFrame:
    """Business rows, each rule's under its number."""
    arms = " ".join(f"when '{topic}' then '{number}'" for number, topic in enumerate(TRIPS))
    return found.selectExpr(
        f"'{InputKind.BUSINESS}' as input_kind", "cast(null as string) as id", "topic", "message_key",
        "cast(null as string) as consumer_group", "cast(null as string) as body_sha256",
        "deliver_at_ms", "created_ms", "created_ms as at_ms", "0L as attempts",
        f"case topic {arms} end as note", "1L as due_unit_ms",
    )  # fmt: skip


def plain(found: DataFrame) -> DataFrame:
    """The broker's records, as they are."""
    return found.drop("hour")


def job_of(spark: SparkSession, folder: Path, output: Path, *, full: bool) -> tuple[RunContext, list[int]]:
    """Returns the run context, and the hours to evaluate."""
    hours = sorted(int(path.name.partition("=")[2]) for path in (folder / "business").iterdir())
    windows = [hour * HOUR_MS for hour in hours]
    settings = plain_settings(output)
    evidence = evidence_of(spark, folder)
    job = RunContext(
        session=spark, settings=settings, plan=SourcePlan((), (), 0), evidence=evidence,
        now_ms=windows[-1] + 10 * HOUR_MS, full=full, say=say, pause=lambda _: None,
        again=read_again_from(evidence.rows),
    )  # fmt: skip
    return job, windows


def read_again_from(files: DataFrame) -> RereadSuspects:
    """Reads suspects again out of rows that are at rest in files: these have no index to ask by."""

    def read_again(
        spark: SparkSession, _settings: Settings, _plan: SourcePlan, first: Evidence, suspects: Suspects
    ) -> Evidence:  # fmt: skip
        ids, keys = ids_frame(spark, suspects.ids), keys_frame(spark, suspects.keys)
        asked = files.where(f"input_kind = '{InputKind.BUSINESS}'").join(keys, ["topic", "message_key"], "left_semi")
        sent = first.rows.join(ids, "id", "left_semi")
        rows = asked.select(*first.rows.columns).unionByName(sent.select(*first.rows.columns))
        messages = first.messages.join(ids, "id", "left_semi").select(*first.messages.columns)
        return replace(first, rows=rows.localCheckpoint(), messages=messages.localCheckpoint())

    return read_again


def ours(spark: SparkSession, folder: Path, output: Path, *, full: bool = False) -> list[int]:
    """Evaluate all hours that need it; returns these hours."""
    job, windows = job_of(spark, folder, output, full=full)
    output.mkdir(parents=True, exist_ok=True)
    digests = compare(job, FileDigestCache(output, job.settings.limits))
    return evaluate_windows(job, windows, digests, store=WindowStore(output))


def plain_join(spark: SparkSession, folder: Path) -> list[Any]:
    """Join the three tables completely."""
    for name in ("business", "archive", "messages"):
        spark.read.parquet(str(folder / name)).createOrReplaceTempView(name)
    return [tuple(row) for row in spark.sql(JOIN).collect()]


def as_a_user(spark: SparkSession, folder: Path, output: Path, *, hourly: bool) -> int:
    """Run the job itself on the sources of a settings file, and check every verdict; returns their number."""
    from spark_reconcile import run, run_windows

    settings = replace(settings_of(read_config(folder / "reconcile.toml"), folder=folder), output=output)
    planted = planted_in(folder)
    now_ms = planted["now_ms"]
    if not hourly:
        return check(planted, found_in_run(Path(run(settings, session=spark, now_ms=now_ms, say=say).folder)))
    run_windows(settings, since_ms=START_MS, now_ms=now_ms, session=spark, say=say)
    return check(planted, found_in_windows(output), before_ms=now_ms // HOUR_MS * HOUR_MS)


def check_join(planted: dict[str, Any], found: Sequence[tuple[str, int]]) -> None:
    """Check that a join counts the planted rows, for its columns. Exits if it does not."""
    wanted: Counter[str] = Counter()
    for kind, count in planted["kinds"].items():
        for name, rows in JOINED.get(kind, {"settled": 1}).items():
            wanted[name] += count * rows
    wanted["settled"] += planted["messages"] - sum(planted["kinds"].values())
    if dict(found) != dict(wanted):
        raise SystemExit(f"the join counts {dict(found)}, and {dict(wanted)} was planted")


def duck_join(folder: Path) -> list[Any]:
    """The same in DuckDB, with as many threads."""
    import duckdb

    with duckdb.connect() as duck:
        duck.execute("set threads = 2; set memory_limit = '6GB'")
        for name in ("business", "archive", "messages"):
            duck.execute(f"create view {name} as select * from read_parquet('{folder / name}/*/*.parquet')")
        return duck.execute(JOIN).fetchall()


def touch_one_hour(folder: Path, number: int) -> None:
    """Change the stored body of one message of an hour, another one each time; it is recorded as planted."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    planted = planted_in(folder)
    hours = sorted((folder / "messages").iterdir())
    path = next(hours[(len(hours) // 2 + number) % len(hours)].glob("*.parquet"))
    table = pq.ParquetFile(path).read()
    known = set(planted["ids"])
    place = next(place for place, one in enumerate(table.column("id").to_pylist()) if one not in known)
    chosen = pc.equal(table.column("id"), table.column("id")[place])
    changed = pc.if_else(chosen, pa.scalar("0" * 64), table.column("body_sha256"))
    fresh = path.with_suffix(".fresh")
    pq.write_table(table.set_column(table.schema.get_field_index("body_sha256"), "body_sha256", changed), fresh)
    fresh.replace(path)
    also_changed(planted, [table.slice(place, 1).to_pylist()[0]])
    (folder / "planted.json").unlink()
    (folder / "planted.json").write_text(json.dumps(planted))


def first_run(folder: Path, output: Path) -> float:
    """Returns the seconds of a complete run by digests, in a process of its own, whose results stay."""
    whole = [sys.executable, "-m", "benchmarks.reconcile.contest", "digests", "--rounds", "1", "--folder", str(folder)]
    done = subprocess.run([*whole, "--output", str(output)], check=True, stdout=subprocess.PIPE)
    return float(json.loads(done.stdout)["seconds"][0])


def timed(work: Callable[..., Any], *given: Any, **named: Any) -> tuple[float, Any]:
    """Returns the seconds, and the result."""
    started = time.monotonic()
    found = work(*given, **named)
    return round(time.monotonic() - started, 2), found


def shuffled_bytes(log: Path) -> int:
    """Returns the bytes that all tasks wrote for shuffles."""
    total = 0
    for path in (one for one in log.rglob("*") if one.is_file()):
        for line in path.open(encoding="utf-8"):
            if '"SparkListenerTaskEnd"' in line:
                metrics = json.loads(line).get("Task Metrics") or {}
                total += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
    return total


def java_peak_bytes() -> int:
    """Returns the peak resident size of this process's Java child."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    peaks = [0]
    for child in children:
        status = Path(f"/proc/{child}/status").read_text()
        peaks += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    return max(peaks)


def java_processor_seconds() -> float:
    """Returns the processor seconds of this process's Java child."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    used = [0]
    for child in children:
        times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        used.append(int(times[11]) + int(times[12]))
    return max(used) / os.sysconf("SC_CLK_TCK")


def measure(contestant: str, folder: Path, rounds: int, *, output: Path | None = None) -> dict[str, Any]:
    """Rounds of one contestant; the first is cold."""
    if contestant == "duckdb":
        runs = [timed(duck_join, folder) for _ in range(rounds)]
        check_join(planted_in(folder), runs[-1][1])
        return {"seconds": [took for took, _ in runs], "verdicts": runs[-1][1]}
    scratch = Path(tempfile.mkdtemp(prefix="reconcile-", dir=folder.parent))
    try:
        if contestant != "again":
            return _on_spark(contestant, folder, scratch, rounds, output=output)
        copy = scratch / "records"
        shutil.copytree(folder, copy, copy_function=os.link)
        threading.Event().wait(RunLimits().file_rest_ms / 1_000)
        first = first_run(copy, scratch / "out")
        found = _on_spark(contestant, copy, scratch, rounds)
        return {"first_seconds": first, **found, "ratio": round(found["seconds"][0] / first, 3)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _on_spark(
    contestant: str, folder: Path, scratch: Path, rounds: int, *, output: Path | None = None
) -> dict[str, Any]:  # fmt: skip
    from spark_reconcile.load.spark_session import Size, spark_session

    events = scratch / "events"
    events.mkdir()
    os.environ["SPARK_CONF_DIR"] = str(scratch)
    (scratch / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.dir file://{events}\nspark.eventLog.compress false\n"
        f"spark.local.dir {scratch}\n"
    )
    messages = planted_in(folder)["messages"]
    size = Size.MEDIUM if messages <= MEDIUM_MESSAGES_MAX else Size.LARGE
    with spark_session("local[2]", log=scratch / "spark.log", size=size) as spark:
        spark.conf.set("spark.sql.shuffle.partitions", "16")
        found: dict[str, Any] = {"seconds": []}
        for number in range(rounds):
            results = output or scratch / f"out-{number}"
            match contestant:
                case "join":
                    took, found["verdicts"] = timed(plain_join, spark, folder)
                    check_join(planted_in(folder), found["verdicts"])
                case "again":
                    touch_one_hour(folder, number)
                    took, judged = timed(ours, spark, folder, scratch / "out")
                    found["hours_judged"], found["verdicts"] = (
                        len(judged),
                        check(planted_in(folder), found_in_windows(scratch / "out")),
                    )
                case "whole" | "hourly":
                    took, found["verdicts"] = timed(as_a_user, spark, folder, results, hourly=contestant == "hourly")
                case _:
                    took, _ = timed(ours, spark, folder, results, full=contestant == "everything")
                    found["verdicts"] = check(planted_in(folder), found_in_windows(results))
            found["seconds"].append(took)
        found["java_peak_bytes"] = java_peak_bytes()
        found["java_processor_seconds"] = java_processor_seconds()
    found["shuffled_bytes_a_round"] = shuffled_bytes(events) // rounds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=("digests", "everything", "again", "join", "duckdb", "whole", "hourly"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="leave the results here; default: a folder that is removed")
    chosen = parser.parse_args()
    planted = planted_in(chosen.folder)
    found = measure(chosen.contestant, chosen.folder.resolve(), chosen.rounds, output=chosen.output)
    best = min(found["seconds"])
    whole = {"contestant": chosen.contestant, "messages": planted["messages"], **found}
    print(json.dumps({**whole, "rows_a_second": round(3 * planted["messages"] / best), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
