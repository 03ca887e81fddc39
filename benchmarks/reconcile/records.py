"""N million messages with three records each, from the real flights, and faults planted at known ids. Parquet files.

    python -m benchmarks.reconcile.records --messages 10000000 --folder data [--faults 1900]

Each flight is booked again and again: a business row (`trip`), its message's archive row, and the broker's record of
it, one folder each, a file an hour. Ids are UUIDv7 of the time of the booking. DuckDB writes them. `planted.json` says
which id or key got which fault, and so which verdict must come of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import duckdb

from outbox_demo.flights import FLIGHTS, read_flights

START_MS: Final = 1_793_491_200_000
"""2026-11-01, the first hour."""
MESSAGES_A_DAY: Final = 3_600_000
KINDS: Final = ("lost", "phantom", "changed", "doubled", "unannounced")
RULES: Final = {
    "lost": "not_in_broker",
    "phantom": "no_business_row",
    "changed": "body_differs",
    "doubled": "stored_twice",
    "unannounced": "no_message",
}
_MESSAGE: Final = """
    create or replace temp table message as
    with numbered as (
        select i, flights.id as flight, origin, carrier, {start} + (i * 86400000 // {a_day}) as t
        from range({count}) as r(i) join flights on flights.id = (i * 7919) % {flights} + 1
    )
    select
        'trip.booked.' || lower(origin) as topic, i::varchar as key, t as created_ms,
        lpad(lower(hex(t)), 12, '0') || '7' || substr(md5(i::varchar), 1, 3) || '8' || substr(md5(i::varchar), 4, 15) as id,
        sha256(i::varchar || carrier) as body_sha256,
        case when i % {step} = {step} - 1 and i // {step} < {faults} then i // {step} % 5 else -1 end as fault
    from numbered order by i
"""  # noqa: E501
_TABLES: Final = {
    "business": """select topic, key as message_key, created_ms from message where fault is distinct from 1""",
    "archive": """select id, 'publish' as kind, topic, key as message_key, body_sha256, null::bigint as deliver_at_ms,
        created_ms * 1000 as created_at_us, created_ms * 1000 + 15000 as sent_at_us, 1 as attempts, 'stored' as outcome,
        created_ms from message where fault not in (1, 4)""",
    "messages": """select id, topic, key as message_key, i as sequence,
        if(fault = 2, sha256(id), body_sha256) as body_sha256, created_ms, created_ms + 12 as stored_ms,
        null::bigint as deliver_at_ms, null::varchar as damage
        from (select *, row_number() over () - 1 as i from (
            select * from message union all select * from message where fault = 3)) where fault not in (0, 4)""",
}


def write_records(folder: Path, *, messages: int, faults: int) -> dict[str, Any]:
    """Write the three tables and what was planted; returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as duck:
        duck.execute("set threads = 2; set memory_limit = '6GB'; set preserve_insertion_order = false")
        duck.execute("create temp table flights (id integer, origin varchar, carrier varchar)")
        _load_flights(duck, folder)
        duck.execute(
            _MESSAGE.format(
                start=START_MS, a_day=MESSAGES_A_DAY, count=messages, flights=FLIGHTS,
                step=max(1, messages // max(1, faults)), faults=faults,
            )
        )  # fmt: skip
        for name, query in _TABLES.items():
            duck.execute(
                f"copy (select *, created_ms // 3600000 as hour from ({query})) to '{folder / name}' "
                "(format parquet, partition_by (hour), overwrite true)"
            )
        found = duck.execute("select fault, id, key from message where fault >= 0").fetchall()
    planted = {"messages": messages, "faults": [[KINDS[fault], one, key] for fault, one, key in found]}
    (folder / "planted.json").write_text(json.dumps(planted))
    return planted


def expected(planted: dict[str, Any]) -> set[tuple[str, str]]:
    """(id or business key, rule) of every finding that must come out, echoes on business rows left out."""
    return {(key if kind == "unannounced" else one, RULES[kind]) for kind, one, key in planted["faults"]}


def _load_flights(duck: duckdb.DuckDBPyConnection, folder: Path) -> None:
    path = folder / "flights.csv"
    with path.open("w", encoding="ascii") as file:
        file.writelines(f"{one['id']},{one['origin']},{one['carrier']}\n" for one in read_flights())
    duck.execute(f"insert into flights select * from read_csv('{path}', header = false)")
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=0, help="default: in about 1 of 100 buckets")
    parser.add_argument("--folder", type=Path, required=True)
    chosen = parser.parse_args()
    faults = chosen.faults or max(5, chosen.messages // 5_300)
    planted = write_records(chosen.folder, messages=chosen.messages, faults=faults)
    print(json.dumps({"messages": chosen.messages, "faults": len(planted["faults"])}))


if __name__ == "__main__":
    main()
