"""docs/guides/observability.md lists every metric that a process exports, with its labels, and no page another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fixtures.exported_metrics import exported_metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "observability.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")

_ROW = re.compile(r"^\| (`(?:outbox|broker)_[a-z_`, ]+) \|([^|]*)\|", re.MULTILINE)
_NAME = re.compile(
    r"`((?:outbox_(?:compensator|timing_store|consumer|send|sender|messages)|broker_(?:http|messages|quarantined|delay))"
    r"_[a-z_]+)"
)
_OLD = ROOT / "docs" / "decisions"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """Every metric by the name that a page gives it, with its labels: of a histogram the name of all its series."""
    series = exported_metrics(tmp_path_factory.mktemp("metrics") / "data")
    names = {name: OF_HISTOGRAMS.sub("", name) if f"{OF_HISTOGRAMS.sub('', name)}_bucket" in series else name
             for name in series}  # fmt: skip
    return {names[name]: labels - {"le"} for name, labels in series.items()}


def test_every_metric_is_on_the_page(exported: Mapping[str, set[str]]) -> None:
    listed = re.findall(r"`((?:outbox|broker)_[a-z_]+)`", PAGE)

    assert sorted(exported.keys() - set(listed)) == []


def test_every_row_of_the_page_names_exported_metrics_and_their_labels(exported: Mapping[str, set[str]]) -> None:
    rows = [
        (re.findall(r"`([a-z_]+)`", names), set(re.findall(r"\w+", labels))) for names, labels in _ROW.findall(PAGE)
    ]
    wrong = [
        (names, labels)
        for names, labels in rows
        if not exported.keys() >= set(names) or set().union(*(exported[name] for name in names)) != labels
    ]

    assert len(rows) > 40
    assert wrong == []


def test_no_page_names_a_metric_that_nobody_exports(exported: Mapping[str, set[str]]) -> None:
    named = {(page.name, name) for page in PAGES if page.parent != _OLD for name in _NAME.findall(page.read_text())}

    assert len(named) > 60
    assert sorted((page, name) for page, name in named if name not in exported) == []
