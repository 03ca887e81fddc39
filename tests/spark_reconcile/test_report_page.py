"""The page and the folder: one safe file whatever the records hold, and a manifest that names only what is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_reconcile.config import BrokerSource, DatabaseSource, Output, Rule, Settings
from spark_reconcile.job import EXAMPLES_MAX, _publish, _Run
from spark_reconcile.report import Figures, write_report
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import RULES, Verdict, severity_of

BAD = [verdict for verdict in Verdict if severity_of(verdict) in {"warn", "error"}]


def _settings(folder: Path) -> Settings:
    return Settings(
        database=DatabaseSource(url="mysql+pymysql://shop:s3cret@db/shop"),
        broker=BrokerSource(data="data"),
        rules=[
            Rule(name="<i>rule</i>", table="t", key_column="k", time_column="at", topic="order.paid"),
        ],
        output=Output(folder=str(folder)),
    )


def _summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "run_id": "20270115T080000Z-abcdef", "judged_at_ms": 1_800_000_000_000, "business_rows": 2, "messages": 1_234,
        "message_groups": 1_234, "delivered": 1_000, "redelivered": 7, "deduplicated": 3, "unexplained": 0,
        "verdicts": {"settled": 1_234}, "business_verdicts": {"settled": 2},
    }  # fmt: skip
    return Summary(**{**values, **changes})


def _example(verdict: Verdict, number: int, *, key: str) -> dict[str, Any]:
    reason = next(rule.evidence for rule in RULES if rule.verdict == verdict)
    return {
        "verdict": verdict.value, "id": f"m-{number:060}", "topic": "t" * 255, "group": "g" * 255, "key": key,
        "created_ms": 1_799_999_000_000, "reason": reason,
    }  # fmt: skip


def _page(
    folder: Path, summary: Summary, *, examples: Sequence[dict[str, Any]] = (), business: Sequence[dict[str, Any]] = ()
) -> str:
    trouble = [{"verdict": verdict.value, "bucket": bucket, "count": 5} for verdict in BAD for bucket in range(61)]
    figures = Figures(
        from_ms=1_799_999_000_000, bucket_ms=1_000, stored=dict.fromkeys(range(61), 20),
        delivered=dict.fromkeys(range(61), 19), trouble=trouble if examples else [], examples=examples,
        business_examples=business,
    )  # fmt: skip
    path = folder / "report.html"
    write_report(path, summary=summary, settings=_settings(folder), figures=figures)
    return path.read_text()


def test_what_records_hold_is_text_on_the_page_and_never_markup(tmp_path: Path) -> None:
    hostile = "<b>\"'&</b><script>alert(1)</script>"
    lost = {"verdict": "lost", "rule": hostile, "topic": "t", "key": hostile, "at_ms": None, "messages": 0}

    page = _page(tmp_path, _summary(), examples=[_example(Verdict.LOST, 1, key=hostile)], business=[lost])

    assert "<script" not in page
    assert "<b>&#34;" not in page
    assert "&lt;b&gt;&#34;&#39;&amp;&lt;/b&gt;&lt;script&gt;" in page
    assert "&lt;i&gt;rule&lt;/i&gt;" in page
    assert "s3cret" not in page


def test_the_longest_page_is_small_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    examples = [_example(verdict, number, key="k" * 64) for verdict in BAD for number in range(EXAMPLES_MAX)]

    page = _page(tmp_path, _summary(), examples=examples)

    assert len(page.encode()) < 300_000
    assert not re.search(r"(src|href)\s*=|url\(|@import|\son[a-z]+\s*=", page)


def test_each_example_says_why_and_what_to_do_about_just_that(tmp_path: Path) -> None:
    by_effect = next(rule for rule in RULES if rule.verdict is Verdict.LOST and "effect" in rule.evidence)
    example = {**_example(Verdict.LOST, 1, key="k"), "reason": by_effect.evidence}

    page = _page(tmp_path, _summary(verdicts={"lost": 1}), examples=[example])

    examples = page.partition("Examples, and what to do")[2].partition("How it was judged")[0]
    assert by_effect.repair in examples
    assert "Publish it again" not in examples


@pytest.mark.parametrize(
    ("verdicts", "unexplained", "sentence"),
    [
        ({"settled": 9, "dead": 1, "late": 2, "pending": 3, "unknown": 4}, 0, "Balanced: all of 1,234 messages"),
        ({"settled": 9, "lost": 1_000}, 0, "Not balanced: 1,000 lost."),
        ({"settled": 9, "early": 1, "unsent": 2}, 0, "Not balanced: 2 unsent, 1 early."),
        ({"settled": 9}, 1, "Not balanced: 1 unexplained."),
    ],
)
def test_the_sentence_says_what_is_amiss(verdicts: dict[str, int], unexplained: int, sentence: str) -> None:
    summary = _summary(verdicts=verdicts, unexplained=unexplained)

    assert summary.sentence.startswith(sentence)
    assert summary.balanced is sentence.startswith("Balanced")


def test_results_are_whole_before_the_manifest_names_them(tmp_path: Path) -> None:
    summary = _summary()
    one = _Run(summary.run_id, 0, tmp_path / ".staging", tmp_path / summary.run_id)
    one.staging.mkdir()
    (tmp_path / "manifest.json").mkdir()  # the manifest cannot be written

    with pytest.raises(OSError, match=r"manifest\.json"):
        _publish(one, summary, _settings(tmp_path))

    assert json.loads((one.published / "run.json").read_text())["messages"] == 1_234
    assert not one.staging.exists()
