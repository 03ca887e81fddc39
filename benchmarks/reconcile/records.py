"""Generates Parquet files of N million messages, three records each, from real flights, with faults at known ids.

    python -m benchmarks.reconcile.records --messages 10000000 --folder data [--faults 1900]

Each flight is booked again and again: a business row (`trip`), its message's archive row, and the broker's record of
it, one folder each, a file an hour. Ids are UUIDv7 of the time of the booking. DuckDB writes them. A few bookings, in
about 1 of 100 buckets, are given one fault each, every kind that three tables can show in turn; `planted.json` says
which verdict must come of which id or key. Kinds that need more (the outbox, what consumers did, a time that goes on)
are planted by benchmarks.reconcile.sources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from benchmarks.reconcile.faults import KINDS
from benchmarks.reconcile.planting import Kind, Message, Planted
from outbox_demo.flight_data_loader import FLIGHTS, read_flights

START_MS: Final = 1_793_491_200_000
"""2026-11-01, the first hour."""
HOUR_MS: Final = 3_600_000
MESSAGES_A_DAY: Final = 3_600_000
MESSAGES_A_FAULT: Final = 5_300
"""So that about 1 of 100 buckets is touched."""
_MESSAGE: Final = """
    create or replace temp table message as
    with numbered as (
        select i, flights.id as flight, origin, carrier, {start} + (i * 86400000 // {a_day}) as t
        from range({count}) as r(i) join flights on flights.id = (i * 7919) % {flights} + 1
    )
    select
        i, 'trip.booked.' || lower(origin) as topic, i::varchar as key, t as created_ms,
        lpad(lower(hex(t)), 12, '0') || '7' || substr(md5(i::varchar), 1, 3) || '8' || substr(md5(i::varchar), 4, 15) as id,
        i::varchar || carrier as body, i % {step} = {step} - 1 and i // {step} < {faults} as flawed
    from numbered order by i
"""  # noqa: E501
ARCHIVE: Final = """
    select id, 'publish' as kind, topic, key as message_key, sha256(body) as body_sha256,
        null::bigint as deliver_at_ms, created_ms * 1000 as created_at_us, created_ms * 1000 + 15000 as sent_at_us,
        1 as attempts, 'stored' as outcome, created_ms from message where not flawed
    union all by name select * from planted_archive"""
_TABLES: Final = {
    "business": """select topic, key as message_key, created_ms, null::bigint as deliver_at_ms from message
        where not flawed union all by name select * from planted_business""",
    "archive": ARCHIVE,
    "messages": """select id, topic, key as message_key, i as sequence, sha256(body) as body_sha256, created_ms,
        created_ms + 12 as stored_ms, null::bigint as deliver_at_ms, null::varchar as damage from message
        where not flawed union all by name select * from planted_messages""",
}


def write_records(
    folder: Path, *, messages: int, faults: int, kinds: Sequence[Kind] = KINDS
) -> dict[str, Any]:  # fmt: skip
    """Write the three tables and what was planted, each kind in turn; returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as duck:
        planted = plant(duck, folder, kinds, messages=messages, faults=faults)
        duck.register("planted_business", business_table(planted))
        duck.register("planted_messages", _messages_table(planted))
        for name, query in _TABLES.items():
            write_by_hour(duck, query, folder / name)
    told = as_planted(planted, messages=messages)
    (folder / "planted.json").write_text(json.dumps(told))
    return told


def plant(
    duck: duckdb.DuckDBPyConnection, folder: Path, kinds: Sequence[Kind], *, messages: int, faults: int
) -> Planted:  # fmt: skip
    """Make the bookings as a table `message`, and what is planted in those that are `flawed`, each kind in turn.

    Their archive rows are there as `planted_archive`.
    """
    duck.execute("set threads = 2; set memory_limit = '6GB'; set preserve_insertion_order = false")
    duck.execute("create temp table flights (id integer, origin varchar, carrier varchar)")
    _load_flights(duck, folder)
    duck.execute(
        _MESSAGE.format(
            start=START_MS, a_day=MESSAGES_A_DAY, count=messages, flights=FLIGHTS,
            step=max(1, messages // max(1, faults)), faults=faults,
        )
    )  # fmt: skip
    (last_ms,) = duck.execute("select max(created_ms) from message").fetchone() or (START_MS,)
    planted = Planted(now_ms=(last_ms // HOUR_MS + 1) * HOUR_MS + HOUR_MS // 2)
    flawed = duck.execute("select id, topic, key, created_ms, body from message where flawed order by i").fetchall()
    for number, values in enumerate(flawed):
        kind = kinds[number % len(kinds)]
        kind(planted, Message(*values))
        planted.kinds[kind.__name__] += 1
    duck.register("planted_archive", _archive_table(planted))
    return planted


def as_planted(planted: Planted, *, messages: int) -> dict[str, Any]:
    """What `planted.json` says: the verdicts to come, and the ids that something was planted at."""
    ids = {one.id for one in planted.stored} | {one.id for one, _, _ in planted.archive}
    return {
        "messages": messages, "kinds": planted.kinds, "now_ms": planted.now_ms, "expected": planted.expected,
        "ids": sorted(ids),
    }  # fmt: skip


def write_by_hour(duck: duckdb.DuckDBPyConnection, query: str, folder: Path) -> None:
    """A table as Parquet, a file an hour."""
    duck.execute(
        f"copy (select *, created_ms // {HOUR_MS} as hour from ({query})) to '{folder}' "
        "(format parquet, partition_by (hour), overwrite true)"
    )


def business_table(planted: Planted) -> pa.Table:
    """The business rows that were planted."""
    rows = [(one.topic, one.key, one.created_ms, one.due_ms) for one in planted.business]
    return _table(rows, "topic message_key created_ms: deliver_at_ms:")


def _archive_table(planted: Planted) -> pa.Table:
    rows = [
        (one.id, one.kind, one.topic, one.key, one.sha256, one.due_ms, one.created_ms * 1000, sent_ms * 1000, 1,
         outcome, one.created_ms)
        for one, sent_ms, outcome in planted.archive
    ]  # fmt: skip
    columns = "id kind topic message_key body_sha256 deliver_at_ms: created_at_us: sent_at_us: attempts: outcome"
    return _table(rows, f"{columns} created_ms:")


def _messages_table(planted: Planted) -> pa.Table:
    rows = [
        (one.id, one.topic, one.key, one.sequence, hashlib.sha256(one.body).hexdigest(), one.created_at_ms,
         one.stored_at_ms, one.deliver_at_ms, None)
        for one in planted.stored
    ]  # fmt: skip
    return _table(rows, "id topic message_key sequence: body_sha256 created_ms: stored_ms: deliver_at_ms: damage")


def _table(rows: Sequence[tuple[Any, ...]], columns: str) -> pa.Table:
    """Rows as a table; a column whose name ends with a colon is of integers."""
    schema = pa.schema([(one.strip(":"), pa.int64() if one.endswith(":") else pa.string()) for one in columns.split()])
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


def _load_flights(duck: duckdb.DuckDBPyConnection, folder: Path) -> None:
    path = folder / "flights.csv"
    with path.open("w", encoding="ascii") as file:
        file.writelines(f"{one['id']},{one['origin']},{one['carrier']}\n" for one in read_flights())
    duck.execute(f"insert into flights select * from read_csv('{path}', header = false)")
    path.unlink()


def arguments(about: str | None) -> argparse.Namespace:
    """What a generator is told on its command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=0, help="default: in about 1 of 100 buckets")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    chosen = arguments(__doc__)
    faults = chosen.faults or max(len(KINDS), chosen.messages // MESSAGES_A_FAULT)
    planted = write_records(chosen.folder, messages=chosen.messages, faults=faults)
    print(json.dumps({"messages": chosen.messages, "faults": faults, "kinds": len(planted["kinds"])}))


if __name__ == "__main__":
    main()
