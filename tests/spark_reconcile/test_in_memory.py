"""Few rows judged in this process: the same expressions mean the same to SQLite as to Spark, or are refused."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from spark_reconcile.business_rules import BUSINESS_RULES
from spark_reconcile.delivery_rules import DELIVERY_RULES
from spark_reconcile.dialect import translated
from spark_reconcile.figures import sql_text
from spark_reconcile.in_memory import FewRows, Memory, as_spark, grouped, in_memory, to_arrow, to_spark
from spark_reconcile.message_rules import MESSAGE_RULES
from spark_reconcile.slots import KEYED, hour, period, slot, slot_start, window_of_message
from spark_reconcile.sources.statements import LEG_SCHEMA
from spark_reconcile.verdict import case_sql, facts_asked, lookup_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id string, topic string, message_key string, n bigint, m bigint, flag boolean"
HUGE = 1 << 53
IDS = (
    "0199c2f5e1d37abc8123456789abcdef", "0199C2F5E1D37abc8123456789abcdef", "zz99c2f5e1d37abc8123456789abcdef",
    " 199c2f5e1d37abc8123456789abcdef", "-199c2f5e1d37abc8123456789abcdef", "0199c2f5e1d37abc\u2603" + "1" * 15,
    "0199c2f5e1d37abc812345678\x009abcdef", "",
)  # fmt: skip
TEXTS = (None, *IDS, "a", "A", "it's", "back\\slash", "\N{SNOWMAN}", "0", "007", " a", "a ")
NUMBERS = (None, 0, 1, -1, 3_599_999, -3_600_001, HUGE, -HUGE)
QUOTED = sql_text("it's a back\\slash")
SCALARS = {
    "slot": slot(), "begins": slot_start(f"({slot()})"), "hour": hour("n"), "period": period("n"),
    "window": window_of_message("coalesce(n, 0L)", otherwise="coalesce(m, 0L)", slack_ms=60_000).replace(
        "slot", f"({slot()})"
    ),
    "least": "least(n, m)", "greatest": "greatest(n, m, 0L)",
    "chosen": "if(n > m, n, m)", "null_if": "nullif(topic, '')",
    "among": "coalesce(topic in ('a', 'A'), false)", "is_same": "n <=> m", "differs": "topic != message_key",
    "named": f"'{QUOTED}'", "is_named": f"coalesce(topic = '{QUOTED}', false)",
    "simple": "case topic when 'a' then 1L when 'A' then 2L else 0L end", "of_case": "case when n > 0 then 'x' end",
    "pmod": "pmod(n, 256)", "low": "n & 4294967295L", "high": "shiftright(n, 32)", "sha": "sha2(topic, 256)",
    "length": "length(id)", "place": "coalesce(id, topic || '#' || n)", "far": "abs(n - m) > 60000L",
    "no_text": "cast(null as string)", "no_number": "cast(null as bigint)", "not_flag": "not flag",
    "either": "flag or n > 0", "between": "n between -5L and 5L", "number": "cast(flag as int)",
}  # fmt: skip
SAME_HASH = {"keyed": KEYED, "two": "xxhash64(topic, message_key)", "one": "xxhash64(id)"}
AGGREGATES = {
    "rows": "count(*)", "sum": "sum(n)", "low": "min(topic)", "high": "max(topic)", "true": "count_if(n > 0)",
    "last": "coalesce(max_by(m, n), 0L)", "differ": "if(coalesce(min(topic) != max(topic), false), 1, 0)",
    "some": "bool_or(n > 0)", "both": "greatest(sum(n), sum(m))",
}  # fmt: skip


@pytest.mark.spark
@settings(max_examples=2, phases=(Phase.explicit, Phase.generate))
@example(seed=1, count=0)
@given(seed=st.integers(0, 1 << 32), count=st.just(150))
def test_expressions_and_joins_mean_the_same_to_both_engines(spark: SparkSession, seed: int, count: int) -> None:
    print("seed", seed)
    random = Random(seed)
    rows, others = _rows(random, count), _rows(random, count // 2)

    with in_memory() as memory:
        mine = _answers(memory, rows, others)

    for one, other in zip(mine, _answers(spark, rows, others), strict=True):
        assert one == other


@pytest.mark.spark
@settings(max_examples=2, phases=(Phase.generate,))
@given(seed=st.integers(0, 1 << 32))
def test_rules_are_the_same_to_both_engines(spark: SparkSession, seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    for rules in (MESSAGE_RULES, DELIVERY_RULES, BUSINESS_RULES):
        names = sorted(facts_asked(rules))
        rows = [tuple(random.choice((-1, 0, 1, 2, 100, 1_800_000_000_000)) for _ in names) for _ in range(1_000)]
        schema = ", ".join(f"{name} bigint" for name in names)

        with in_memory() as memory:
            mine = _verdicts(as_spark(memory.createDataFrame(rows, schema)), rules)

        assert mine == _verdicts(spark.createDataFrame(rows, schema), rules)
        assert len({rule for *_, rule, _ in mine}) > len(rules) / 3, "few rules were asked"


@pytest.mark.spark
def test_rows_come_from_spark_and_go_back_as_they_were(spark: SparkSession) -> None:
    rows = [
        ("archive", "i", "t", None, None, "0" * 64, None, 5, -(1 << 63), (1 << 63) - 1, "007"),
        ("business", None, "\N{SNOWMAN}", "it's", None, None, 7, None, 0, 1, "1"),
    ]

    with in_memory() as memory:
        here = memory.fetched(spark.createDataFrame(rows, LEG_SCHEMA))
        back = to_spark(spark, as_spark(here), LEG_SCHEMA)

        assert here.columns == [one.split()[0] for one in LEG_SCHEMA.split(", ")]
        assert [tuple(row) for row in back.collect()] == here.rows() == rows


def test_an_expression_that_is_not_known_to_mean_the_same_is_refused() -> None:
    with pytest.raises(ValueError, match=r"date_trunc\(\) is not known"):
        translated("date_trunc('hour', n)")
    with pytest.raises(ValueError, match="no expression"):
        translated("n ? m")
    with in_memory() as memory, pytest.raises(ValueError, match="not the same columns"):
        memory.createDataFrame([], "a bigint").unionByName(memory.createDataFrame([], "b bigint"))


def test_tables_have_their_columns_types_even_where_they_are_empty() -> None:
    schema = "a string, b bigint, c boolean"
    with in_memory() as memory:
        frame = memory.createDataFrame([("x", None, True)], schema)

        tables = [to_arrow(frame, schema), to_arrow(frame.where("false"), schema)]

    assert [table.num_rows for table in tables] == [1, 0]
    assert tables[0].to_pylist() == [{"a": "x", "b": None, "c": True}]
    assert {table.schema for table in tables} == {pa.schema([("a", pa.string()), ("b", pa.int64()), ("c", pa.bool_())])}


def test_what_is_kept_does_not_change_and_what_is_not_is_asked_anew() -> None:
    with in_memory() as memory:
        frame = memory.createDataFrame([("x", 1), ("x", 2)], "a string, b bigint").selectExpr("*", "b + 1 as c")
        summed = frame.grouped("a", total="sum(c)").persist()

        assert summed.rows() == [("x", 5)]
        assert summed.join(frame.limit(1), "a", "left_semi").count() == 1
        assert frame.withColumnsRenamed({"b": "d"}).drop("a").columns == ["d", "c"]
        assert frame.select("c").distinct().orderBy("c").rows() == [(2,), (3,)]


def _rows(random: Random, count: int) -> list[tuple[Any, ...]]:
    """Rows of SCHEMA; no number `n` comes twice, as of ties `max_by` may take any."""
    numbers = {*NUMBERS[1:], *(random.randint(-HUGE, HUGE) for _ in range(count // 2))}
    chosen = [*random.sample(sorted(numbers), min(count, len(numbers))), *[None] * count][:count]
    return [
        (random.choice(TEXTS), random.choice(TEXTS), random.choice(TEXTS), n, random.choice(NUMBERS),
         random.choice((None, True, False)))
        for n in chosen
    ]  # fmt: skip


def _answers(engine: SparkSession | Memory, rows: list[Any], others: list[Any]) -> list[list[Any]]:
    """What all expressions say of the rows, in an order of its own."""
    frame, other = (_frame(engine, some) for some in (rows, others))
    keyed = other.selectExpr("topic", "message_key", "n as theirs")
    found = [
        frame.selectExpr("n", *(f"{value} as `{name}`" for name, value in SCALARS.items())),
        grouped(frame, "message_key", **AGGREGATES),
        *(frame.join(keyed, ["topic", "message_key"], how) for how in ("inner", "left", "left_semi", "left_anti")),
        frame.select("topic").unionByName(other.select("topic")).distinct(),
        # A hash is another one: what it is asked is what is the same.
        *(grouped(frame.selectExpr(f"{value} as h", "n"), "h", rows="count(*)").select("rows")
          for value in SAME_HASH.values()),
        frame.selectExpr("row_number() over (partition by topic order by n, m, id, message_key, flag) as place",
                         "count(*) over (partition by topic) as beside"),
    ]  # fmt: skip
    return [sorted((_plain(row) for row in one.collect()), key=repr) for one in found]


def _frame(engine: SparkSession | Memory, rows: list[Any]) -> DataFrame:
    frame = engine.createDataFrame(rows, SCHEMA)
    return as_spark(frame) if isinstance(frame, FewRows) else frame


def _plain(row: Any) -> tuple[Any, ...]:
    """SQLite's truth is a number."""
    return tuple(int(value) if isinstance(value, bool) else value for value in row)


def _verdicts(facts: DataFrame, rules: Any) -> list[tuple[Any, ...]]:
    named = facts.selectExpr("*", f"{case_sql(rules, {})} as rule")
    found = named.selectExpr("*", f"{lookup_sql(rules, 'state', column='rule')} as state")
    return sorted(tuple(row) for row in found.collect())
