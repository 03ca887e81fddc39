"""The sums of a part tell which keys differ in it, or that they cannot tell; and what is left of it without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spark_reconcile.decoding import KEYS, Decoded, decoded, without
from spark_reconcile.parts import MESSAGES, NUMBER, PARTED, clean_parts, digest, parts
from spark_reconcile.sources.frames import MESSAGE_SCHEMA
from spark_reconcile.sources.statements import LEG_SCHEMA, Leg

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]
HOUR_MS = 3_600_000
TOPIC = "ticket.sold"
ALL = 40
"""Keys of the one quarter of an hour: enough for parts of several, few enough for parts that have none."""

pytestmark = pytest.mark.spark


class Books:
    """Business rows, archive rows and the broker's messages; faults are made by changing them."""

    def __init__(self) -> None:
        self.business = [_leg(Leg.BUSINESS, f"key-{one}", note="0") for one in range(ALL)]
        self.archive = [_leg(Leg.ARCHIVE, f"key-{one}", id=f"id-{one}", note="stored") for one in range(ALL)]
        self.messages = [_message(f"key-{one}", f"id-{one}", one) for one in range(ALL)]

    def told(self, spark: SparkSession) -> pa.Table:
        """The sums of all parts."""
        rows = spark.createDataFrame([*map(_values, self.business), *map(_values, self.archive)], LEG_SCHEMA)
        messages = spark.createDataFrame([*map(_values_of_message, self.messages)], MESSAGE_SCHEMA)
        sums = [digest(rows.where(f"leg = '{leg}'"), leg) for leg in (Leg.BUSINESS, Leg.ARCHIVE)]
        sums.append(digest(messages, MESSAGES))
        return clean_parts(parts(spark, sums, topics=[TOPIC]), covered=[TOPIC]).toArrow()

    def only(self, keys: Iterable[str]) -> Books:
        """Those under some keys."""
        some, wanted = Books(), set(keys)
        for name in ("business", "archive", "messages"):
            setattr(some, name, [row for row in getattr(self, name) if row["message_key"] in wanted])
        return some

    def drop(self, leg: str, key: str) -> None:
        """Take the rows under a key out of a leg."""
        setattr(self, leg, [row for row in getattr(self, leg) if row["message_key"] != key])


@pytest.mark.parametrize("fault", ["lost", "phantom", "changed", "unannounced", "doubled", "due later", "two at once"])
def test_one_key_that_differs_is_named_by_the_sums_of_its_part(spark: SparkSession, fault: str) -> None:
    books = Books()
    _plant(books, fault, "key-7")

    found = decoded(_unclean(books.told(spark)))

    assert found.whole.num_rows == 0
    assert _keys(found) == {_places(spark, ["key-7"])["key-7"]}
    assert found.keys == 1


def test_two_keys_of_one_part_that_differ_alike_are_not_told_apart(spark: SparkSession) -> None:
    one, other = _neighbours(spark)
    books = Books()
    _plant(books, "changed", one)
    _plant(books, "changed", other)

    found = decoded(_unclean(books.told(spark)))

    assert (found.by_key.num_rows, found.whole.num_rows) == (0, 1)


def test_keys_of_one_part_that_differ_in_other_ways_are_each_named(spark: SparkSession) -> None:
    one, other = _neighbours(spark)
    books = Books()
    _plant(books, "changed", one)
    _plant(books, "unasked", other)

    found = decoded(_unclean(books.told(spark)))

    assert found.whole.num_rows == 0
    assert _keys(found) == set(_places(spark, [one, other]).values())


def test_what_is_left_without_the_keys_that_differ_is_what_agrees(spark: SparkSession) -> None:
    books = Books()
    _plant(books, "lost", "key-7")
    _plant(books, "changed", "key-9")
    unclean = _unclean(books.told(spark))

    left = without(unclean, books.only(["key-7", "key-9"]).told(spark))

    beside = [key for key in _same_parts(spark, ["key-7", "key-9"]) if key not in {"key-7", "key-9"}]
    assert left is not None
    assert sum(left["n"].to_pylist()) == sum(left["asked"].to_pylist()) == len(beside)


@pytest.mark.parametrize("found", [[], ["key-7"], ["key-7", "key-8"]])
def test_what_was_not_found_of_what_differs_is_noticed(spark: SparkSession, found: list[str]) -> None:
    books = Books()
    _plant(books, "lost", "key-7")
    _plant(books, "changed", "key-9")

    assert without(_unclean(books.told(spark)), books.only(found).told(spark)) is None


def test_whatever_differs_in_whatever_parts_is_named_or_looked_at_whole(spark: SparkSession, random_seed: int) -> None:
    random = Random(random_seed)
    books = Books()
    kinds = ["lost", "phantom", "changed", "unannounced", "doubled", "due later", "two at once", "unasked"]
    faulty = {f"key-{one}": random.choice(kinds) for one in random.sample(range(ALL), 12)}
    for key, kind in faulty.items():
        _plant(books, kind, key)

    found = decoded(_unclean(books.told(spark)))

    number, part = _places(spark, faulty), _parts(spark, faulty)
    whole = set(found.whole["part"].to_pylist())
    missed = [key for key in faulty if part[key] not in whole and number[key] not in _keys(found)]
    assert missed == []


def _plant(books: Books, fault: str, key: str) -> None:
    mine = {
        name: [row for row in getattr(books, name) if row["message_key"] == key] for name in ("archive", "messages")
    }
    match fault:
        case "lost":
            books.drop("messages", key)
        case "phantom":
            books.drop("business", key)
        case "unannounced":
            books.drop("archive", key)
            books.drop("messages", key)
        case "changed":
            mine["messages"][0]["body_sha256"] = "f" * 64
        case "doubled":
            books.messages.append({**mine["messages"][0], "sequence": 1_000})
        case "due later":
            for row in (*mine["archive"], *mine["messages"]):
                row["deliver_at_ms"] = HOUR_MS * 9
        case "two at once":
            mine["messages"][0]["body_sha256"] = "f" * 64
            books.drop("business", key)
        case "unasked":
            books.business.append(_leg(Leg.BUSINESS, key, note="0"))


def _unclean(told: pa.Table) -> pa.Table:
    return told.filter(pc.invert(told["clean"]))


def _keys(found: Decoded) -> set[int]:
    return {one for name in KEYS for one in found.by_key[name].to_pylist()}


def _placed(spark: SparkSession, keys: Iterable[str]) -> list[Mapping[str, Any]]:
    rows = spark.createDataFrame([_values(_leg(Leg.BUSINESS, key, note="0")) for key in keys], LEG_SCHEMA)
    return [row.asDict() for row in rows.selectExpr("message_key", f"{NUMBER} as key", *PARTED).collect()]


def _places(spark: SparkSession, keys: Iterable[str]) -> dict[str, int]:
    return {row["message_key"]: row["key"] for row in _placed(spark, keys)}


def _parts(spark: SparkSession, keys: Iterable[str]) -> dict[str, int]:
    return {row["message_key"]: row["part"] for row in _placed(spark, keys)}


def _same_parts(spark: SparkSession, keys: Iterable[str]) -> list[str]:
    """All keys of the books that share a part with one of these."""
    part = _parts(spark, [f"key-{one}" for one in range(ALL)])
    wanted = {part[key] for key in keys}
    return [key for key, its in part.items() if its in wanted]


def _neighbours(spark: SparkSession) -> tuple[str, str]:
    """Two keys of one part, that part's only ones or not."""
    part = _parts(spark, [f"key-{one}" for one in range(ALL)])
    for _, some in groupby(sorted(part, key=lambda key: part[key]), key=lambda key: part[key]):
        if len(keys := list(some)) > 1:
            return keys[0], keys[1]
    raise AssertionError("no two keys share a part")


def _leg(leg: str, key: str, *, note: str, id: str | None = None) -> Row:  # noqa: A002 - the column's name
    return {
        "leg": str(leg), "id": id, "topic": TOPIC, "message_key": key, "consumer_group": None,
        "body_sha256": None if id is None else "0" * 64, "deliver_at_ms": None, "created_ms": HOUR_MS,
        "at_ms": HOUR_MS, "attempts": 1, "note": note,
    }  # fmt: skip


def _message(key: str, name: str, sequence: int) -> Row:
    return {
        "id": name, "topic": TOPIC, "message_key": key, "sequence": sequence, "body_sha256": "0" * 64,
        "created_ms": HOUR_MS, "stored_ms": HOUR_MS + 5, "deliver_at_ms": None, "damage": None,
    }  # fmt: skip


def _values(row: Row) -> tuple[Any, ...]:
    return tuple(row[one.split()[0]] for one in LEG_SCHEMA.split(", "))


def _values_of_message(row: Row) -> tuple[Any, ...]:
    return tuple(row[one.split()[0]] for one in MESSAGE_SCHEMA.split(", "))
