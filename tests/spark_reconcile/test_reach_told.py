"""How far each source reaches, as the report says it: since when it is complete, until when, and how far behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spark_reconcile import BusinessRule, InboxSource, Settings, Summary
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.load.completeness_bound import NEVER_MS, Reach
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.report.page import page_of
from spark_reconcile.results.run_figures import inputs
from spark_reconcile.results.summary import InputExtent, WindowCounts
from spark_reconcile.sources.sql_statements import InputKind

HOUR_MS = 3_600_000
NOW_MS = 500_000 * HOUR_MS
"""2027-01-15 08:00:00."""


def test_each_source_has_the_least_end_of_its_databases_and_the_logs_have_none() -> None:
    rules = [
        BusinessRule(name=name, table="t", key_column="k", time_column="a", topic=topic, urls=["sqlite:///none"])
        for name, topic in (("paid", "order.paid"), ("sent", "order.sent"))
    ]
    settings = Settings(
        database_url="sqlite:///none", broker_data=Path("b"), output=Path("o"), rules=rules,
        inboxes=[InboxSource(group="tickets"), InboxSource(group="mail")],
    )  # fmt: skip
    reach = Reach(
        archive_ms=NOW_MS - 9,
        business={"order.paid": NOW_MS - 5, "order.sent": NOW_MS},
        inboxes={("", "tickets"): NOW_MS - 3, ("order.paid", "tickets"): NOW_MS - 4},
    )

    found = inputs(_evidence(reach), settings)

    assert {(one.source, one.what): (one.complete_since_ms, one.complete_until_ms) for one in found} == {
        ("inbox", "tickets"): (7, NOW_MS - 4),
        ("inbox", "mail"): (0, None),
        ("broker", "action log"): (3, None),
        ("broker", "message log"): (2, None),
        ("archive", "sent messages"): (None, NOW_MS - 9),
        ("outbox", "unsent messages"): (0, NOW_MS - 9),
        ("business", "paid"): (4, NOW_MS - 5),
        ("business", "sent"): (5, NOW_MS),
    }


def test_the_page_says_on_what_stretch_of_time_the_verdicts_stand() -> None:
    page = page_of(
        _summary(
            _input("broker", "message log", since_ms=0),
            _input("inbox", "none yet", since_ms=None),
            _input("archive", "sent messages", since_ms=NOW_MS - 30 * HOUR_MS, until_ms=NOW_MS),
            _input("business", "paid <orders>", since_ms=NOW_MS - 20 * HOUR_MS, until_ms=NOW_MS - 90_000),
        )
    )

    told = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "is complete from 2027-01-14 12:00:00 up to 2027-01-15 07:58:30 UTC, 1.5 min before this run" in told
    assert "since its beginning until this run" in told
    assert "it is empty: nothing can be held against it" in told
    assert "since 2027-01-14 02:00:00 until this run" in told
    assert "since 2027-01-14 12:00:00 until 2027-01-15 07:58:30, 1.5 min behind" in told
    assert page.count('<rect class="held"') == 3
    assert "paid <orders>" not in page


def test_a_bar_ends_where_its_source_ends_and_begins_where_it_begins() -> None:
    page = page_of(
        _summary(
            _input("broker", "message log", since_ms=0),
            _input("archive", "sent messages", since_ms=NOW_MS - 6 * HOUR_MS, until_ms=NOW_MS - 3 * HOUR_MS),
        )
    )

    (judged, *bars) = [
        (float(left), float(width))
        for left, width in re.findall(r'<rect class="(?:judged|held)" x="([\d.]+)" y="\d+" width="([\d.]+)"', page)
    ]
    whole, kept = bars
    assert judged == whole, "the hours that were judged are all that there is"
    assert kept[0] - whole[0] == pytest.approx(whole[1] / 4, abs=0.1)
    assert kept[1] == pytest.approx(whole[1] * 3 / 8, abs=0.1)


def _evidence(reach: Reach) -> Evidence:
    none: Any = None
    counts = [
        InputCount(input_kind=input_kind, topic="order.paid", note=note, rows=1, first_ms=1, last_ms=2)
        for input_kind, note in (("actions", "delivered"), ("messages", ""), (InputKind.BUSINESS, "0"))
    ]
    return Evidence(
        inboxes=none, messages=none, actions=none, rows=none, tables=(), counts=counts, reach=reach,
        groups=[GroupFacts(topic="order.paid", consumer_group="tickets", has_inbox=1, inbox_reach_ms=7)],
        archive_reach_ms=NEVER_MS, broker_reach_ms=2, actions_reach_ms=3,
        business_reaches={"order.paid": 4, "order.sent": 5},
    )  # fmt: skip


def _summary(*sources: InputExtent) -> Summary:
    return Summary(
        run_id="r", judged_at_ms=NOW_MS, business_rows=0, messages=0, message_groups=0, stored=0, delivered=0,
        redelivered=0, acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0, inputs=sources,
        windows=WindowCounts(since_ms=NOW_MS - 8 * HOUR_MS, until_ms=NOW_MS, windows=8, judged=8, open=0, not_closed=0,
                             looked_at=0, resolved=0),
    )  # fmt: skip


def _input(source: str, what: str, *, since_ms: int | None, until_ms: int | None = None) -> InputExtent:
    return InputExtent(
        source=source, what=what, rows=1, first_ms=NOW_MS - 8 * HOUR_MS, last_ms=NOW_MS - 9, complete_since_ms=since_ms,
        complete_until_ms=until_ms,
    )  # fmt: skip
