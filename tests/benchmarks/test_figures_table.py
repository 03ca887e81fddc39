"""The table of figures is that of the programs' output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures_table

ROOT = Path(__file__).parents[2]


def test_the_table_of_figures_is_that_of_the_programs_output() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    written = page.partition(figures_table.BEGIN)[2].partition(figures_table.END)[0]

    assert written.strip() == figures_table.table(ROOT / "benchmarks" / "figures").strip()
    assert written.count("`publish_cost`") > 2


def test_an_output_of_quick_sizes_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "claim.json").write_text(json.dumps({"benchmark": "claim", "options": {"quick": True}}))

    with pytest.raises(ValueError, match="not the whole output"):
        figures_table.table(tmp_path)
